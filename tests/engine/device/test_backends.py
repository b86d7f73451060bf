"""A model says the same by any backend; those for accelerators are interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import SHAPES, engine, generate, write_shape

# The narrowest heads that every backend takes; other tests compile numba kernels for them, too.
SHAPE = {**SHAPES["llama"], "head_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE["num_key_value_heads"] = 1
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
def test_greedy_text_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setitem(SHAPES, "wide", SHAPE)
    path = write_shape(tmp_path, "wide")
    texts = {}
    for name in ("xla", backend):
        # Interpreted TPU kernels go through the host, and compile there what they compute with.
        small = {**SMALL, "engine__forbid_compile": name != "tpu-interpret"}
        with engine(path, engine__attention_backend=name, **small) as running:
            assert running.info().attention_backend == name
            texts[name] = generate(running, PROMPTS, max_tokens=3, ignore_eos=True)
    assert texts[backend] == texts["xla"]
    assert texts["xla"][0] != texts["xla"][1]
