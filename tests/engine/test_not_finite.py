"""A request whose numbers overflow fails with a line that says so, and nobody beside it notices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxserve.engine import failures
from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason
from jaxserve.engine.startup.finite_check import warn_of_overflow
from jaxserve.models.families.opt import POSITION_OFFSET
from jaxserve.models.registry import get_family
from jaxserve.sched.request import PoolingParams, PoolingType
from tests.engine.conftest import Texts
from tests.engine.harness import (
    SAMPLING,
    SHAPES,
    engine,
    generate,
    pool,
    prompts,
    send,
    wait_until_idle,
)

BROKEN = 40  # the first position whose numbers are none
SAID = "NotFinite: the model computed NaN or infinite numbers for this request"
KINDS = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 2, "repetition_penalty": 1.2},
    {"logprobs": 0, "logit_bias": ((5, 1.0),)},
)


def poison(executor: JaxExecutor) -> None:
    """Makes embeddings overflow in the model's norms from a position on."""
    table = executor.params.embed_positions
    broken = table.at[BROKEN + POSITION_OFFSET :].set(3e38)
    executor.params = replace(executor.params, embed_positions=jax.device_put(broken, table.device))


@pytest.fixture
def poisoned(roomy: Engine, alone: Texts) -> Iterator[Engine]:
    alone("opt")  # of the whole model
    executor = roomy._step_loop._executor
    assert isinstance(executor, JaxExecutor)
    whole = executor.params
    poison(executor)
    yield roomy
    wait_until_idle(roomy)
    executor.params = whole


@pytest.mark.promise(30)
def test_it_fails_alone_and_is_counted(
    poisoned: Engine, alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(failures, "_LINES", 1000)  # whatever has failed before
    monkeypatch.setattr(failures.log, "error", lambda form, *said: told.append(form % said))
    before = poisoned.stats()
    few = [i for i, prompt in enumerate(prompts()) if len(prompt) + SAMPLING["max_tokens"] < BROKEN]
    victims = [
        send(poisoned, [7] * (30 if late else 50), max_tokens=14, ignore_eos=True, **kind)[1]
        for late in (False, True)
        for kind in KINDS
    ]
    others = generate(poisoned, [prompts()[i] for i in few], **SAMPLING)
    assert others == [alone("opt")[i] for i in few]
    for number, victim in enumerate(victims):
        last = victim.wait().last()
        assert last.finish_reason is FinishReason.ERROR and not last.engine_failed
        assert last.error.startswith(SAID)
        # The logits behind the last token whose position is whole are the last ones.
        assert len(victim.tokens()) == (0 if number < len(KINDS) else BROKEN - 29)
        assert min(victim.tokens(), default=0) >= 0
    after = poisoned.stats()
    assert after.corrupted_requests == before.corrupted_requests + len(victims)
    assert after.request_failures == before.request_failures + len(victims)
    assert after.step_failures == before.step_failures
    assert any(SAID in line and "\n" not in line for line in told)


def test_what_was_theirs_in_the_cache_hurts_nobody(roomy: Engine, alone: Texts) -> None:
    """Blocks with NaN in them are others' next, with fewer tokens in them."""
    expected = alone("opt")
    executor = roomy._step_loop._executor
    assert isinstance(executor, JaxExecutor)
    whole = executor.params
    poison(executor)
    try:
        for _ in range(40):
            send(roomy, [7] * 60, max_tokens=2)
        wait_until_idle(roomy)
    finally:
        executor.params = whole
    assert generate(roomy, prompts(), **SAMPLING) == expected


def test_prompt_logprobs_and_vectors(poisoned: Engine) -> None:
    scored = send(poisoned, [7] * 50, max_tokens=1, prompt_logprobs=2)[1].wait().last()
    assert scored.finish_reason is FinishReason.ERROR and scored.error.startswith(SAID)
    for params in (
        PoolingParams(),
        PoolingParams(PoolingType.MEAN),
        PoolingParams(scored_token_ids=(3,)),
    ):
        last = pool(poisoned, [7] * 50, params).wait().last()
        assert last.finish_reason is FinishReason.ERROR and last.error.startswith(SAID)


def test_with_drafts_too(shapes: dict[str, Path], alone: Texts) -> None:
    with engine(shapes["opt"], scheduler__policy="vllm+spec") as running:
        assert isinstance(running._step_loop._executor, JaxExecutor)
        poison(running._step_loop._executor)
        prompt = [5, 6, 7] * 9
        whole = send(running, prompt, max_tokens=14, ignore_eos=True)[1].wait()
        assert whole.reason is FinishReason.LENGTH
        broken = send(running, prompt, max_tokens=30, ignore_eos=True)[1].wait()
        assert broken.last().error.startswith(SAID)
        assert broken.tokens() == whole.tokens()
        assert (
            generate(running, prompts()[:1], max_tokens=4, ignore_eos=True)[0]
            == (alone("opt")[0][:4])
        )


def test_a_start_warns(roomy: Engine, caplog: pytest.LogCaptureFixture) -> None:
    executor, info = roomy._step_loop._executor, roomy.info()
    assert isinstance(executor, JaxExecutor)
    config = get_family("opt").config_from_hf(SHAPES["opt"])
    whole, check = executor.params, (executor, config, info.num_blocks, 16, "float32")
    with caplog.at_level(logging.WARNING):
        assert not warn_of_overflow(*check)
        assert not caplog.records
        table = whole.embed_positions
        executor.params = replace(whole, embed_positions=table.at[POSITION_OFFSET + 9].set(3e38))
        try:
            assert warn_of_overflow(*check)
        finally:
            executor.params = whole
    assert "NaN or infinite logits in float32 behind a prompt of 16 tokens" in caplog.text
