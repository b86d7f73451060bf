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
from tests.engine.harness import SHAPES, Stream, engine, send, wait_until_idle, write_shape

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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model whose products, norms and so on are XLA's, which on CPUs adds up by shape, too."""
    other = contextvars.ContextVar("backend of the first device", default="xla")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_COMPILING", other)
        patch.setitem(SHAPES, "wide", SHAPE)
        yield write_shape(tmp_path_factory.mktemp("wide"), "wide")


@pytest.fixture(scope="module")
def asked(wide: Path) -> Iterator[Engine]:
    with engine(wide, **FIELDS) as running:
        yield running


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


def test_who_asks_has_the_same_bits_in_any_company(asked: Engine) -> None:
    asked.add_observer(recorder := StepRecorder())
    usual = list(in_turns(asked))
    first, *others = in_turns(asked, deterministic=True)
    assert asked.stats().prefix_cache_hits["realtime"] > 0
    wait_until_idle(asked)
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


def test_who_asks_finds_only_what_was_computed_so(asked: Engine) -> None:
    cached, prompt = [], [PROMPT[0] + 1, *PROMPT[1:]]
    for each in (False, True, True, False):
        stream = send(asked, prompt, max_tokens=2, deterministic=each)[1]
        cached.append(stream.wait().last().usage.cached_tokens)
        wait_until_idle(asked)
    assert cached == [0, 0, 32, 32]


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
