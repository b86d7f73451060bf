"""DeepSeek-V2: what its config.json and its checkpoint must have, and what steps make of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.startup.choices.model_options import cached_whole
from jaxserve.models.base import Experts, Latent, ModelConfig, with_quantization
from jaxserve.models.dense import sequence_logits
from jaxserve.models.families.deepseek import config_from_hf
from jaxserve.models.fused import fuse
from jaxserve.models.presets import preset
from jaxserve.models.rope import Rope
from jaxserve.models.sharding import check_tensor
from jaxserve.pallas_kernels.pool import slot_bytes
from jaxserve.weights import load_config, load_params, transpose_loaded
from tests.models.fixtures import hf_config, write_checkpoint
from tests.models.quantized.test_quantized import widened

LITE, FULL = hf_config("deepseek_v2_lite"), hf_config("deepseek_v2")


def test_the_lite_model_has_its_shape() -> None:
    # As deepseek-ai/DeepSeek-V2-Lite has it.
    hf = preset("deepseek-v2-lite") | {
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
    }
    assert config_from_hf(hf) == config_from_hf(preset("deepseek-v2-lite"))
    config = config_from_hf(hf)
    assert config.latent == Latent(rank=512, q_rank=None, plain=128, rotated=64, values=128)
    assert (config.d_model, config.num_heads, config.num_kv_heads) == (2048, 16, 16)
    assert (config.head_dim, config.value_dim, config.rotated_dim) == (192, 128, 64)
    assert config.experts == Experts(
        num_experts=64,
        experts_per_token=6,
        d_ff=1408,
        shared_d_ff=2816,
        normalised=False,
        dense_layers=(0,),
    )
    assert (config.num_layers, config.d_ff, config.vocab_size) == (27, 10944, 102400)
    assert config.max_position == 163840
    assert isinstance(config.rope, Rope) and config.rope.amplitude == 1
    temperature = 0.1 * 0.707 * np.log(40) + 1
    assert config.attn_scale == pytest.approx(192**-0.5 * temperature**2)
    # K and V of a token, with zeros and without, and what they are made of.
    assert 2 * slot_bytes(27, 16, 192, "bfloat16") == 324 << 10
    assert 27 * (16 * (192 + 128) * 2) == 270 << 10
    assert 27 * (512 + 64) * 2 == 31104
    assert cached_whole(config) == (
        "K and V are cached whole: 6,144 numbers of each token in each layer, of which 1,024 are "
        "zeros; the 576 that they are made of would take 10.7 times less"
    )
    assert cached_whole(config_from_hf(LITE)) is not None
    for tensor in (2, 4, 16):
        check_tensor(config, tensor)
    assert not config.plain_keys


def test_a_config_without_fields_means_what_transformers_takes_it_for() -> None:
    config = config_from_hf({"model_type": "deepseek_v2", "num_experts_per_tok": 6})
    assert config.latent == Latent(rank=512, q_rank=1536, plain=128, rotated=64, values=128)
    assert config.experts is not None and config.experts.dense_layers == ()
    assert (config.d_model, config.num_heads, config.eos_token_ids) == (4096, 32, (2,))


def test_layers_may_all_be_dense() -> None:
    config = config_from_hf(LITE | {"first_k_dense_replace": 4})
    assert config.experts is None


def test_projections_in_few_bits_say_what_they_stand_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LITE | {"num_hidden_layers": 2})
    family, plain, _ = load_config(tmp_path)
    config = with_quantization(family, plain, "int8")
    small = load_params(tmp_path, family, config, dtype="float32")
    assert small.layers[1].attn.kv_b.kernel.q.dtype == jnp.int8
    tokens = jnp.arange(20)

    def logits(params: Any, shape: ModelConfig) -> np.ndarray:
        run = functools.partial(sequence_logits, family, dtype=jnp.float32)
        return np.asarray(jax.jit(lambda params: run(params, shape, tokens))(params))

    want = logits(widened(small, family.leaves(config)), plain)
    got = logits(transpose_loaded(fuse(small, config), "float32"), config)
    np.testing.assert_allclose(got, want, atol=1e-3)
