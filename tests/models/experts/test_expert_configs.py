"""Mixtures of experts: what of config.json decides them."""

from __future__ import annotations

import pytest

from jaxserve.models.base import Experts
from jaxserve.models.families.llama_types import config_from_hf

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
MIXTRAL = SHAPE | {"model_type": "mixtral", "num_local_experts": 8}
QWEN_3 = SHAPE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
QWEN_2 = QWEN_3 | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24}


@pytest.mark.parametrize(
    ("hf", "experts"),
    [
        (MIXTRAL, Experts(num_experts=8, experts_per_token=2, d_ff=48)),
        (
            MIXTRAL | {"router_jitter_noise": 0.1},
            Experts(num_experts=8, experts_per_token=2, d_ff=48),
        ),
        (QWEN_3, Experts(num_experts=8, experts_per_token=2, d_ff=16, normalised=False)),
        (
            QWEN_2 | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
            Experts(
                num_experts=8, experts_per_token=2, d_ff=16, shared_d_ff=24, dense_layers=(0, 1, 2)
            ),
        ),
        (QWEN_3 | {"decoder_sparse_step": 5}, None),
    ],
)
def test_experts_of_a_config(hf, experts):
    config = config_from_hf(hf)
    assert config.experts == experts
    dense = range(4) if experts is None else experts.dense_layers
    assert [config.experts_of(layer) is None for layer in range(4)] == [
        i in dense for i in range(4)
    ]


def test_windows_are_those_of_each_model_type():
    window = {"use_sliding_window": True, "sliding_window": 7}
    assert config_from_hf(MIXTRAL).windows == (None,)
    assert config_from_hf(MIXTRAL | {"sliding_window": 7}).windows == (7,)
    assert config_from_hf(QWEN_3 | {"sliding_window": 7}).windows == (None,)
    assert config_from_hf(QWEN_3 | window).windows == (7,)
    second = config_from_hf(QWEN_2 | window | {"max_window_layers": 2})
    assert [kind.sliding_window for kind in second.layer_kinds] == [7, None, None, None]
