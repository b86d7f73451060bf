"""Bad requests are refused with the name of the field and its limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.request import SLO, InvalidRequest, Program, Request, SamplingParams, validate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: .*at most 4"),
        ({"temperature": -0.1}, "temperature: must be at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": -0.1}, "top_p: must be at least 0"),
        ({"top_p": 1.1}, "top_p: .*at most 1"),
        ({"min_p": 2.0}, "min_p"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 101.0}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": -(10**400)}, "temperature"),
        ({"logprobs": 21}, "logprobs: .*at most 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: .*at least 0"),
        ({"n": 17}, "n: .*at most 16"),
        ({"n": 0}, "n: must be at least 1"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": tuple((i, 0.0) for i in range(301))}, "logit_bias: has 301 entries"),
        ({"stop_token_ids": tuple(range(33))}, "stop_token_ids: has 33 entries; at most 32"),
        ({"stop": ("a",) * 17}, "stop: has 17 entries"),
        ({"stop": ("",)}, "stop: a stop string has 0 characters; 1 to 256"),
        ({"stop": ("a" * 257,)}, "stop: a stop string has 257 characters"),
    ],
)
def test_sampling_limits(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("name", ["ttft", "tbt", "jct"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 10**400])
def test_slo_limits(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=rf"slo\.{name}: must be a positive, finite time"):
        SLO(**{name: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": ""}, "program: has 0 characters; 1 to 128 are allowed"),
        ({"id": "a" * 129}, "program: has 129 characters; 1 to 128"),
        ({"id": "a" * 8_000_000}, "program: has 8000000 characters; 1 to 128"),
        ({"id": "a\0"}, "program: has characters that cannot be printed"),
        ({"id": "a\ud800"}, "program: has characters that cannot be printed"),
        ({"deadline": 0.0}, r"program\.deadline: must be a positive, finite time, got 0"),
        ({"deadline": -1.0}, r"program\.deadline: must be a positive, finite time"),
        ({"deadline": float("nan")}, r"program\.deadline: must be a positive, finite time"),
        ({"deadline": 10**400}, r"program\.deadline: must be a positive, finite time"),
        ({"expected_calls": -1}, "expected_calls: must be at least 0 and at most 10000, got -1"),
        ({"expected_calls": 10**400}, "expected_calls: must be at least 0 and at most 10000"),
        (
            {"expected_calls": 1, "over": True},
            "expected_calls: must be 0 in a program's last call, got 1",
        ),
    ],
)
def test_program_limits(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Program(**{"id": "a", **fields})


def test_a_program_may_say_all_that_it_knows() -> None:
    said = Program("a" * 128, deadline=1e-300, expected_calls=10_000)
    last = Program("ü 1", deadline=1e300, expected_calls=0, over=True)
    assert (said.over, last.over) == (False, True)


def test_empty_prompt() -> None:
    with pytest.raises(InvalidRequest, match="prompt: is empty"):
        Request("a", ())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", (1,) * 64), "prompt: has 64 tokens; at most 63 can be served"),
        (
            Request("a", (1,) * 60, SamplingParams(max_tokens=5)),
            "max_tokens: 5 after a prompt of 60 tokens makes 65; at most 64",
        ),
        (Request("a", (1, 100), SamplingParams(max_tokens=1)), "prompt: token id 100"),
        (Request("a", (1, -1), SamplingParams(max_tokens=1)), "prompt: token id -1"),
        (
            Request("a", (1,), SamplingParams(max_tokens=1, logit_bias=((100, 1.0),))),
            "logit_bias: token id 100 is outside 0..99",
        ),
        (
            Request("a", (1,), SamplingParams(max_tokens=1, stop_token_ids=(101,))),
            "stop_token_ids: token id 101",
        ),
    ],
)
def test_engine_limits(request_: Request, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        validate(request_, max_model_len=64, vocab_size=100, pool_tokens=1000, d_model=8)


def test_pool_limits_a_request_too() -> None:
    request = Request("a", (1,) * 60, SamplingParams(max_tokens=4))
    validate(request, max_model_len=64, vocab_size=100, pool_tokens=64, d_model=8)
    with pytest.raises(InvalidRequest, match="at most 31"):
        validate(request, max_model_len=64, vocab_size=100, pool_tokens=32, d_model=8)


def test_import_sched_is_still_the_standard_library() -> None:
    """The folder `sched/` at the top must not shadow Python's module, from the root either."""
    code = "import sched; print(sched.scheduler.__module__, sched.__file__)"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith("sched ") and str(ROOT) not in out


def test_sched_never_imports_jax() -> None:
    code = (
        "import sys; from jaxserve.sched import scheduler; from jaxserve.sched.registry import "
        "policies; policies(); print('jax' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "False"
