"""Whatever company, budgets, beginnings, drafts and cancellations Hypothesis thinks of: what is
said of a request has the bits that it has alone. `make fuzz` tries more."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View
from jaxserve.sched.registry import make_policy
from tests.engine.harness import TIMEOUT, engine, wait_until_idle
from tests.exact.conftest import Quiet, Quietly
from tests.exact.questions import POOLING, SAMPLING, Question, alone

KIND = "whole, bfloat16"
MINUTES = float(os.environ.get("JAXSERVE_FUZZ_MINUTES", "0"))
EXAMPLES = 40 if MINUTES else 5  # a time
SHARE = 8  # of those minutes, in which other tests run, too


class Sent(NamedTuple):
    """A request: what is asked; of which request before it the first words are waited for, if of
    any; after how many outputs it is cancelled, if it is."""

    number: int
    after: int | None
    cancelled: int | None


requests = st.builds(
    Sent,
    st.integers(0, 119),
    st.none() | st.integers(0, 11),
    st.none() | st.none() | st.integers(1, 6),
)


def question(quiet: Quiet, number: int) -> Question:
    """Number 0 to 119: prompts of three beginnings, of all lengths, with all sampling."""
    prompt = max((q.prompt for q in quiet.asked[number % 3 :: 3]), key=len)[: 1 + number % 37]
    prompt += quiet.asked[number % 5].prompt[: number % 4]
    if number % 8 == 7:
        return Question(prompt, pooling=POOLING[number // 8 % len(POOLING)])
    return Question(prompt, SAMPLING[number // 3 % len(SAMPLING)])


class Heard:
    """A request that has been sent. cancelled: after how many outputs; None for never."""

    def __init__(self, on: Engine, asked: Question, cancelled: int | None) -> None:
        self._on, self._asked, self._cancelled = on, asked, cancelled
        self._begun, self._outputs = threading.Event(), 0
        self.stream = asked.ask(on, self._hear)

    def _hear(self, output: Output) -> None:
        self._outputs += 1
        self._begun.set()
        if self._outputs == self._cancelled and output.finish_reason is None:
            self._on.cancel(output.request_id)

    def wait(self) -> None:
        """For the first words, or the vector."""
        if self._asked.pooling is not None:
            self.stream.wait()
        else:
            assert self._begun.wait(TIMEOUT)

    def same_as(self, expected: Any) -> bool:
        """Whether it has these bits, as far as it came."""
        if self.ended() is not FinishReason.CANCELLED:
            return bool(self._asked.answer(self.stream) == expected)
        return all(
            part == whole[: len(part)]
            for index, parts in self._asked.said(self.stream).items()
            for part, whole in zip(parts, expected[index], strict=True)
        )

    def ended(self) -> FinishReason:
        """How the last continuation did."""
        return self.stream.wait().outputs[-1].finish_reason or FinishReason.CANCELLED


@pytest.mark.promise(45)
@pytest.mark.usefixtures("eager")
def test_any_company(quietly: Quietly, monkeypatch: pytest.MonkeyPatch) -> None:
    """budgets: tokens of batches, in turn."""
    quiet, known, budgets = quietly(KIND), dict[int, Any](), [64]
    policy, turns = make_policy("sarathi+spec"), itertools.count()
    happened = {"found": 0, "drafted": 0, "preempted": 0, "cancelled": 0}

    @settings(
        max_examples=EXAMPLES,
        derandomize=not MINUTES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(requests, min_size=2, max_size=12),
        st.lists(st.integers(1, 64), min_size=1, max_size=5),
        st.booleans(),
    )
    def check(company: list[Sent], sizes: list[int], cold: bool) -> None:
        for one in company:
            if one.number not in known:
                (known[one.number],) = alone(quiet.engine, [question(quiet, one.number)])
        if cold:
            running.reset_prefix_cache()
        budgets[:] = sizes
        streams = list[Heard]()
        for one in company:
            if one.after is not None and one.after < len(streams):
                streams[one.after].wait()
            streams.append(Heard(running, question(quiet, one.number), one.cancelled))
        for one, sent in zip(company, streams, strict=True):
            assert sent.same_as(known[one.number]), question(quiet, one.number)
            usage = sent.stream.outputs[-1].usage
            happened["cancelled"] += sent.ended() is FinishReason.CANCELLED
            happened["found"] += usage is not None and usage.cached_tokens > 0
            happened["drafted"] += usage is not None and usage.accepted_draft_tokens > 0
        wait_until_idle(running)

    plan = type(policy).plan

    def budgeted(self: Any, view: View, now: float) -> BatchPlan:
        if self is policy:
            most = budgets[next(turns) % len(budgets)]
            limits = dataclasses.replace(
                view.limits, max_batch_tokens=most, max_prefill_tokens=most
            )
            view = dataclasses.replace(view, limits=limits)
        return plan(self, view, now)

    monkeypatch.setattr(type(policy), "plan", budgeted)
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: policy)
    fields = {**quiet.fields, "cache__prefix_caching": True, "cache__num_blocks": 44}
    with engine(quiet.path, **fields) as running:
        end = time.monotonic() + 60 * MINUTES / SHARE
        check()
        while time.monotonic() < end:
            check()
        happened["preempted"] = running.stats().preemptions
    assert all(happened.values()), happened
