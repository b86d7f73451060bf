"""A model says the same by any backend; those for accelerators are interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.models.dense import sequence_logits
from jaxserve.weights import load_config, load_params
from tests.engine.harness import SHAPES, engine, generate, write_shape

# The narrowest heads that every backend takes; other tests compile numba kernels for them, too.
SHAPE = {**SHAPES["llama"], "head_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE["num_key_value_heads"] = 1
# Windows in every second layer, which some prompts and texts leave; scores and logits are capped.
GEMMA = {**SHAPE, "model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": 6}
GEMMA |= {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
GEMMA |= {"query_pre_attn_scalar": 1, "tie_word_embeddings": False}  # attention shows in the text
# A window in the first layer, sinks in both, experts with biases.
GPT_OSS = {**SHAPE, "model_type": "gpt_oss", "num_hidden_layers": 2, "sliding_window": 6}
GPT_OSS |= {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_scaling": {"rope_type": "default"},
}
# Heads of V have half the elements of those of K, of which some are not rotated. Half a latent
# vector and half of its rotated part fill a head.
DEEPSEEK = {**SHAPES["deepseek"], "num_hidden_layers": 1, "first_k_dense_replace": 0}
DEEPSEEK |= {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32, "kv_lora_rank": 112}
PROMPTS = [[5, 9, 4], [7] * 9 + [3] * 9]  # one in a block, one in two and in three chunks
SMALL = {
    "cache__block_size": 16,
    "scheduler__max_batch_tokens": 8,
    "scheduler__max_prefill_tokens": 8,
    "scheduler__max_rows": 2,
    "engine__row_buckets": (2,),
    "engine__token_buckets": (8,),
    "engine__max_model_len": 32,
    "cache__num_blocks": 16,
}


@pytest.mark.parametrize(
    "backend",
    [
        "numba",
        *(pytest.param(f"{name}-interpret", marks=pytest.mark.slow) for name in ("triton", "tpu")),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [SHAPE, GEMMA, *(pytest.param(one, marks=pytest.mark.slow) for one in (GPT_OSS, DEEPSEEK))],
    ids=lambda shape: shape["model_type"],
)
def test_greedy_text_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, shape: dict[str, Any]
) -> None:
    monkeypatch.setitem(SHAPES, "wide", shape)
    path = write_shape(tmp_path, "wide")
    texts = {}
    for name in ("xla", backend):
        # Interpreted TPU kernels go through the host, and compile there what they compute with.
        small = {**SMALL, "engine__forbid_compile": name != "tpu-interpret"}
        with engine(path, engine__attention_backend=name, **small) as running:
            assert running.info().attention_backend == name
            texts[name] = generate(running, PROMPTS, max_tokens=5, ignore_eos=True)
    assert texts[backend] == texts["xla"]
    assert texts["xla"][0] != texts["xla"][1]
    assert texts["xla"] == [_dense_text(path, prompt, 5) for prompt in PROMPTS]


def _dense_text(path: Path, prompt: list[int], count: int) -> list[int]:
    """What follows a prompt without a cache."""
    family, config, _ = load_config(str(path))
    params = load_params(None, family, config, dtype="float32", load_format="random")
    of = jax.jit(lambda params, tokens: sequence_logits(family, params, config, tokens))
    tokens = list(prompt)
    for _ in range(count):
        # Of one shape, so that it is compiled once; what comes behind a token is not seen.
        padded = np.pad(tokens, (0, 32 - len(tokens)))
        logits = of(params, padded)
        tokens.append(int(logits[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]
