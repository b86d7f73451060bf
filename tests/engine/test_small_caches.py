"""Caches of 8 bits: text is what it is alone, whatever is done to blocks, and nearly what it is
with a wide cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import Config, ConfigError
from jaxserve.config.sections import SMALL_CACHES
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.pallas_kernels import slot_bytes
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from tests.engine.harness import SAMPLING, SCARCE, Stream, engine, generate, prompts, send

BOX = Path(__file__).parents[2] / "jaxserve" / "assets" / "tiny-stories"
COUNT = 16  # prompts
MOVING: dict[str, Any] = {
    **SCARCE,
    "scheduler__max_rows": 32,
    "scheduler__policy": "bros",
    "scheduler__max_prefill_tokens": 7,
    "cache__host_gib": 1e-3,
}


@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_text_is_what_it_is_alone(shapes: dict[str, Path], dtype: str) -> None:
    """Together, and with blocks found again; with int8 also in chunks, preempted, with blocks that
    two share, saved and restored."""
    small = {"cache__dtype": dtype}
    with engine(shapes["llama"], **small, cache__prefix_caching=True) as running:
        alone, again = ([ask(running, prompt) for prompt in prompts(COUNT)] for _ in range(2))
        texts = [text for text, _ in alone]
        assert [text for text, _ in again] == texts == generate(running, prompts(COUNT), **SAMPLING)
        assert sum(found for _, found in again) > sum(found for _, found in alone)
    if dtype != "int8":
        return
    params = SamplingParams(**SAMPLING)
    with engine(shapes["llama"], **small, **MOVING) as running:
        streams = []
        for number, prompt in enumerate(prompts(COUNT)):
            tier, stream = Tier(number % 2), Stream()
            slo = SLO(ttft=30.0, tbt=30.0) if tier is Tier.REALTIME else SLO()
            running.submit(Request(str(number), tuple(prompt), params, slo, tier), stream)
            streams.append(stream)
        assert [stream.wait().tokens() for stream in streams] == texts
        stats = running.stats()
        assert stats.preemptions > 0 and stats.slots_checkpointed > 0


def ask(on: Engine, prompt: Sequence[int]) -> tuple[list[int], int]:
    """What it is answered, and how many of its tokens were found."""
    stream = send(on, prompt, **SAMPLING)[1].wait()
    usage = stream.last().usage
    assert usage is not None
    return stream.tokens(), usage.cached_tokens


def test_hidden_vectors_of_8_bits(shapes: dict[str, Path]) -> None:
    """Both kinds of cache, and one that becomes the other."""
    fields = {"cache__dtype": "int8", "cache__hidden_read": "absorbed", "cache__rho": "1e-7"}
    given: dict[str, Any] = {**SCARCE, **fields, "scheduler__policy": "aptserve"}
    counted: list[dict[tuple[str, str], int]] = []
    with engine(shapes["opt"], **given) as running:
        streams = [
            send(running, prompt, lambda _: counted.append(running.stats().blocks), **SAMPLING)[1]
            for prompt in prompts()
        ]
        assert all(stream.wait().tokens() for stream in streams)
    assert any(blocks["hidden", "realtime"] and blocks["kv", "realtime"] for blocks in counted)


def test_perplexity_is_nearly_that_of_a_wide_cache() -> None:
    """Of stories that the model in the box tells, by an engine's own steps."""
    fields: dict[str, Any] = {
        **{"model__load_format": "auto", "engine__max_model_len": 256},
        **{"scheduler__max_rows": COUNT, "engine__row_buckets": (COUNT,)},  # few steps to compile
    }
    stories: list[list[int]] = []
    found = dict[str, float]()
    for dtype in ("float32", *SMALL_CACHES):
        with engine(BOX, **fields, cache__dtype=dtype) as running:
            begin = running.encode("Once upon a time")
            told = {"max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
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
