"""Requests that ask for it, or all, have the same bits whatever else is served, where kernels and
XLA's operations add up by what is in the batch: as on GPUs and TPUs, whose kernels are interpreted.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConfigError
from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import StepRecorder
from jaxserve.pallas_kernels import backends
from jaxserve.sched.request import InvalidRequest
from tests.engine.harness import SCARCE, SHAPES, Stream, engine, send, wait_until_idle, write_shape

SHAPE = {**SHAPES["llama"], "head_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE["num_key_value_heads"] = 1
# No other model's: functions that are jitted once a process, as those that sample, keep what they
# have traced by shapes, and what is traced here has XLA's operations where others have kernels.
SHAPE["vocab_size"] = 101
FIELDS: dict[str, Any] = {
    "cache__block_size": 16,
    "cache__num_blocks": 64,
    "cache__prefix_caching": True,
    "scheduler__max_batch_tokens": 24,
    "scheduler__max_prefill_tokens": 24,
    "scheduler__max_rows": 4,
    "engine__row_buckets": (1, 4),
    "engine__token_buckets": (8, 24),
    "engine__max_model_len": 64,
    "engine__attention_backend": "triton-interpret",
}
PROMPT = [(7 * i) % 90 + 3 for i in range(37)]
COMPANY = [[5, 9, 4], [8] * 30, [*PROMPT[:33], 6]]
ASKED = {"max_tokens": 6, "ignore_eos": True, "logprobs": 4, "temperature": 0.7, "seed": 3}


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose products, norms and so on are XLA's, which on CPUs adds up by shape, too."""
    other = contextvars.ContextVar("backend of the first device", default="xla")
    monkeypatch.setattr(backends, "_COMPILING", other)
    monkeypatch.setitem(SHAPES, "wide", SHAPE)
    return write_shape(tmp_path, "wide")


def said(stream: Stream) -> list[Any]:
    """Tokens and all log-probabilities."""
    return [(one.token_ids, one.logprobs) for one in stream.wait().outputs]


def in_turns(running: Engine, **asked: Any) -> Iterator[list[Any]]:
    """What the same request says: alone, finding its beginning, and twice among others."""
    for company in ([], [], COMPANY, COMPANY[::-1]):
        if not company:
            wait_until_idle(running)
        before = [send(running, prompt, **{**ASKED, "seed": 9}) for prompt in company[:2]]
        mine = send(running, PROMPT, **ASKED, **asked)[1]
        after = [send(running, prompt, max_tokens=9) for prompt in company[2:]]
        yield said(mine)
        for _, stream in before + after:
            stream.wait()


def test_who_asks_has_the_same_bits_in_any_company(wide: Path) -> None:
    with engine(wide, **FIELDS) as running:
        running.add_observer(recorder := StepRecorder())
        usual = list(in_turns(running))
        first, *others = in_turns(running, deterministic=True)
        assert running.stats().prefix_cache_hits["realtime"] > 0
    assert others == [first] * len(others)
    assert len({repr(one) for one in usual}) > 1, "nothing here depends on company"
    assert {step.padded_tokens for step in recorder.steps} == {1, 4, 8, 24}


def test_all_may_be_served_so(wide: Path) -> None:
    with engine(wide, **FIELDS, engine__deterministic=True) as running:
        running.add_observer(recorder := StepRecorder())
        first, *others = in_turns(running)
        assert next(in_turns(running, deterministic=True)) == first
    assert others == [first] * len(others)
    assert {step.padded_tokens for step in recorder.steps} == {24}


def test_who_asks_finds_only_what_was_computed_so(wide: Path) -> None:
    cached = []
    with engine(wide, **FIELDS) as running:
        for asked in (False, True, True, False):
            stream = send(running, PROMPT, max_tokens=2, deterministic=asked)[1]
            cached.append(stream.wait().last().usage.cached_tokens)
            wait_until_idle(running)
    assert cached == [0, 0, 32, 32]


def test_cpus_have_no_other_steps(shapes: dict[str, Path]) -> None:
    """Those of theirs are exact."""
    with engine(shapes["llama"], engine__deterministic=True, **SCARCE) as running:
        assert not any(layout.deterministic for layout in running.executor.buckets.all())
        assert send(running, [5, 6], max_tokens=2, deterministic=True)[1].wait().reason


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        (
            "wide",
            {"engine__attention_backend": "xla"},
            "kernels xla add up in an order that depends",
        ),
        (
            "opt",
            {"cache__hidden_read": "projected", "scheduler__policy": "aptserve"},
            r"hidden caches are read in an order .*\(cache.hidden_read\)",
        ),
    ],
)
def test_a_start_that_cannot_be_is_refused(
    wide: Path, family: str, fields: dict[str, Any], why: str
) -> None:
    given = {**FIELDS, "engine__max_model_len": 24, **fields, "engine__deterministic": True}
    refused = pytest.raises(ConfigError, match=rf"engine\.deterministic: .*{why}")
    with refused, engine(write_shape(wide.parent, family), **given):
        pass


def test_who_cannot_be_served_so_is_refused(wide: Path) -> None:
    with engine(wide, **{**FIELDS, "engine__attention_backend": "xla"}) as running:
        with pytest.raises(InvalidRequest, match="kernels xla add up") as error:
            send(running, PROMPT, max_tokens=2, deterministic=True)
        assert error.value.field_name == "deterministic"
