"""Caches of 8 bits: text is what it is alone, whatever is done to blocks, and nearly what it is
with a wide cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import Config, ConfigError
from jaxserve.config.sections import SMALL_CACHES
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.pallas_kernels import slot_bytes
from tests.engine.harness import box, send

COUNT = 16  # prompts


@pytest.mark.slow
def test_perplexity_is_nearly_that_of_a_wide_cache() -> None:
    """Of stories that the model in the box tells, by an engine's own steps."""
    fields: dict[str, Any] = {
        "engine__max_model_len": 128,
        "scheduler__max_rows": COUNT,  # few steps to compile
        "engine__row_buckets": (COUNT,),
    }
    stories: list[list[int]] = []
    found = dict[str, float]()
    for dtype in ("float32", *SMALL_CACHES):
        with box(**fields, cache__dtype=dtype) as running:
            begin = running.encode("Once upon a time")
            told = {"max_tokens": 100, "temperature": 1.0, "ignore_eos": True}
            if not stories:
                streams = [send(running, begin, **told, seed=seed)[1] for seed in range(COUNT)]
                stories = [[*begin, *stream.wait().tokens()] for stream in streams]
            found[dtype] = perplexity(running, stories)
    assert found["int8"] == pytest.approx(found["float32"], rel=0.001)
    assert found["fp8"] == pytest.approx(found["float32"], rel=0.005)


def perplexity(on: Engine, texts: list[list[int]]) -> float:
    found: list[float] = []
    for stream in [send(on, text, max_tokens=1, prompt_logprobs=0)[1] for text in texts]:
        stream.wait()
        found += [one.logprob for output in stream.outputs for one in output.prompt_logprobs]
    assert len(found) == sum(map(len, texts)) - len(texts)
    return math.exp(-sum(found) / len(found))


def chosen(shape: Path, **fields: Any) -> Any:
    given = {"model__path": str(shape), "model__load_format": "random", "cache__num_blocks": 64}
    return choose(Config().with_fields(**{**given, **fields}))


def test_hidden_caches_of_8_bits_are_had_by_those_who_ask(shapes: dict[str, Path]) -> None:
    fields = {"scheduler__policy": "aptserve", "cache__dtype": "int8"}
    assert chosen(shapes["opt"], **fields).kernels.model.hidden_read is None
    made = chosen(shapes["opt"], **fields, cache__rho="1e-6", cache__hidden_read="absorbed")
    assert made.kernels.model.hidden_read == "absorbed" and made.kernels.cache_dtype == "int8"
    del fields["cache__dtype"]
    assert chosen(shapes["opt"], **fields).kernels.model.hidden_read == "projected"
    assert (
        chosen(shapes["opt"], **fields, cache__dtype="bfloat16").kernels.model.hidden_read is None
    )


def test_a_dtype_that_plain_xla_would_convert_is_refused(shapes: dict[str, Path]) -> None:
    fields = {"engine__attention_backend": "xla"}
    assert chosen(shapes["opt"], **fields, cache__dtype="int8").kernels.cache_dtype == "int8"
    for dtype in ("fp8", "bfloat16", "float16"):
        with pytest.raises(ConfigError, match=r"cache\.dtype: .*would convert the whole pool"):
            chosen(shapes["opt"], **fields, cache__dtype=dtype)


def test_memory_holds_more_latent_vectors(shapes: dict[str, Path]) -> None:
    """Of a token and layer 16 numbers and 4 rotated ones, which have 16 bits at least; a block has
    half of them, of 16 tokens, and for int8 a scale."""
    given = {"cache__memory_gib": 1e-4, "cache__host_gib": 1e-3, "cache__num_blocks": 0}
    wide = chosen(shapes["deepseek"], cache__dtype="float32", **given).memory
    for dtype, size in (("float32", 40), ("bfloat16", 20), ("fp8", 8 + 4), ("int8", 8 + 4 + 4)):
        found = chosen(shapes["deepseek"], cache__dtype=dtype, **given).memory
        assert found.num_blocks == pytest.approx(1e-4 * 2**30 / (2 * 16 * size), rel=0.1)
        assert found.host_slots == pytest.approx(40 / size * wide.host_slots, rel=0.01)


def test_memory_holds_more_of_them(shapes: dict[str, Path]) -> None:
    """Blocks that the same memory holds, and slots of the host's."""
    given = {"cache__memory_gib": 1e-4, "cache__host_gib": 1e-3, "cache__num_blocks": 0}
    wide, fp8, int8 = (
        chosen(shapes["llama"], cache__dtype=dtype, **given) for dtype in ("float32", "fp8", "int8")
    )
    assert fp8.memory.num_blocks == pytest.approx(4 * wide.memory.num_blocks, rel=0.02)
    assert int8.memory.num_blocks == pytest.approx(4 * 8 / 12 * wide.memory.num_blocks, rel=0.02)
    assert fp8.memory.host_slots == pytest.approx(4 * wide.memory.host_slots, rel=0.01)
    assert slot_bytes(2, 2, 8, "int8") == 2 * 2 * (8 + 4)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.dtype must be one of auto, float32, .*int8"):
        Config().with_fields(cache__dtype="int4")
