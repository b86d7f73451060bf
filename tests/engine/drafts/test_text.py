"""Drafts never change text, whatever is drafted, by whomever, and however much of it is right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.drafts.drafting import Drafting
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import StepRecorder, StepStats
from jaxserve.sched.request import Grammar, GrammarKind, Request, SamplingParams, Tier
from jaxserve.sched.speculation.choice import MOST
from tests.engine.conftest import Texts
from tests.engine.drafts.conftest import Known
from tests.engine.harness import (
    SAMPLING,
    SCARCE,
    Stream,
    box,
    engine,
    generate,
    prompts,
    send,
    wait_until_idle,
)

SPEC = {
    "scheduler__policy": "sarathi+spec",
    "scheduler__max_prefill_tokens": 24,  # so that prompts come beside decodes
    "engine__token_buckets": (16, 64),
}


@pytest.fixture(scope="module")
def shared(shapes: dict[str, Path]) -> Iterator[Engine]:
    with engine(shapes["opt"], **SPEC) as running:
        yield running


@pytest.fixture
def steps(shared: Engine) -> Iterator[list[StepStats]]:
    """Those of the shared engine from now on; idle before and after."""
    recorder = StepRecorder()
    shared.add_observer(recorder)
    yield recorder.steps
    wait_until_idle(shared)


def accepted(steps: Sequence[StepStats]) -> int:
    """How many drafted tokens were right; some must have been wrong."""
    right = sum(step.num_accepted for step in steps)
    assert sum(step.num_draft_tokens for step in steps) > right
    return right


# tests/exact has the log-probabilities, and continuations of one prompt.
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "counted": {
        "temperature": 0.7,
        "seed": 5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.3,
        "min_tokens": 9,
        "top_k": 20,
        "top_p": 0.9,
        "logit_bias": ((7, 2.0), (11, -5.0)),
    },
}


@pytest.mark.promise(4)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("variant", VARIANTS)
def test_text_is_what_it_is_without(
    roomy: Engine,
    shared: Engine,
    steps: list[StepStats],
    proposing: Callable[[Known], None],
    variant: str,
) -> None:
    sampling = {**SAMPLING, **VARIANTS[variant], "ignore_eos": False}
    asked = prompts(16)
    expected = generate(roomy, asked, **sampling)
    proposing({tuple(a): text for a, text in zip(asked, expected, strict=True)})
    assert generate(shared, asked, **sampling) == expected
    wait_until_idle(shared)
    assert accepted(steps) > 60
    drafted = [step for step in steps if step.num_draft_tokens]
    assert any(step.num_prefill_tokens for step in drafted), "none beside a prompt"
    assert max(step.received.count(0) for step in drafted) <= MOST + 1


@pytest.mark.usefixtures("eager", "steps")
def test_an_end_inside_a_draft_is_an_end(
    roomy: Engine, shared: Engine, proposing: Callable[[Known], None]
) -> None:
    asked = prompts(12)
    full = generate(roomy, asked, **SAMPLING)
    proposing({tuple(a): text for a, text in zip(asked, full, strict=True)})
    for prompt, text in zip(asked, full, strict=True):
        stop = text[9]
        sampling: dict[str, Any] = {**SAMPLING, "stop_token_ids": (stop,)}
        plain = send(roomy, prompt, **sampling)[1].wait()
        drafted = send(shared, prompt, **sampling)[1].wait()
        assert drafted.tokens() == plain.tokens() == text[: text.index(stop) + 1]
        assert drafted.reason == plain.reason == FinishReason.STOP
        usage = drafted.last().usage
        assert usage is not None and usage.output_tokens == len(drafted.tokens())
        assert usage.accepted_draft_tokens < usage.output_tokens
    for count in range(1, 9):
        sampling: dict[str, Any] = {**SAMPLING, "max_tokens": count}
        assert send(shared, asked[0], **sampling)[1].wait().tokens() == full[0][:count]


@pytest.mark.usefixtures("eager", "steps")
def test_who_leaves_a_drafted_step_leaves_it_whole(
    roomy: Engine, shared: Engine, proposing: Callable[[Known], None]
) -> None:
    """With all of a drafted step gone before its tokens come, nothing has failed."""
    asked = prompts(8)
    full = generate(roomy, asked, **SAMPLING)
    proposing({tuple(a): text for a, text in zip(asked, full, strict=True)})
    for prompt in asked:
        names: list[str] = []

        def leave(output: Output, names: list[str] = names) -> None:
            if output.finish_reason is None and names:
                shared.cancel(names[0])

        name, stream = send(shared, prompt, leave, **SAMPLING)
        names.append(name)
        assert stream.wait().reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    wait_until_idle(shared)
    assert shared.stats().step_failures == 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("fails", ["append", "propose"])
def test_who_cannot_draft_goes_on_without(
    shared: Engine,
    steps: list[StepStats],
    alone: Texts,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    def broken(self: Drafting, *args: Any) -> None:
        raise ZeroDivisionError("a drafter's bug")

    monkeypatch.setattr(Drafting, fails, broken)
    before = shared.stats().request_failures
    assert generate(shared, prompts(4), **SAMPLING) == alone("opt")[:4]
    assert shared.stats().request_failures == before + 4
    assert not sum(step.num_draft_tokens for step in steps)


def test_where_nobody_drafts_steps_are_as_ever(
    shared: Engine, steps: list[StepStats], alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafting, "propose", lambda self, most, estimate: None)
    assert generate(shared, prompts(8), **SAMPLING) == alone("opt")[:8]
    wait_until_idle(shared)
    decodes = [step for step in steps if step.num_decodes == step.num_rows]
    assert {step.padded_tokens for step in decodes} <= {8, 32}, "no decode program"
    assert not any(step.after_idle for step in decodes[2:]), "the loop does not overlap"


TREATMENTS: dict[str, dict[str, Any]] = {
    "whole prompts, without overlap": {"scheduler__policy": "vllm+spec", "engine__overlap": False},
    "bros": {"scheduler__policy": "bros+spec"},
}


@pytest.mark.promise(4)
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_treatment(
    shapes: dict[str, Path], alone: Texts, proposing: Callable[[Known], None], treatment: str
) -> None:
    asked, expected = prompts(), alone("opt")
    proposing({tuple(a): text for a, text in zip(asked, expected, strict=True)})
    recorder = StepRecorder()
    with engine(shapes["opt"], **{**SPEC, **SCARCE, **TREATMENTS[treatment]}) as running:
        running.add_observer(recorder)
        tiers = [Tier.BEST_EFFORT if i % 3 == 0 else Tier.REALTIME for i in range(len(asked))]
        streams = [
            send(running, prompt, tier=tier, **SAMPLING)[1]
            for prompt, tier in zip(asked, tiers, strict=True)
        ]
        assert [stream.wait().tokens() for stream in streams] == expected
        preempted = running.stats().preemptions
    assert accepted(recorder.steps) > 10 and preempted


@pytest.mark.usefixtures("eager")
def test_what_was_drafted_is_found_again(
    shapes: dict[str, Path],
    roomy: Engine,
    alone: Texts,
    proposing: Callable[[Known], None],
) -> None:
    """A block that accepted drafts fill is a page as any other, and has what it should."""
    prompt, text = prompts()[4], alone("opt")[4]
    proposing({tuple(prompt): text, (*prompt, *text): []})
    with engine(shapes["opt"], **SPEC, cache__prefix_caching=True) as running:
        assert send(running, prompt, **SAMPLING)[1].wait().tokens() == text
        again = send(running, (*prompt, *text), max_tokens=4, ignore_eos=True)[1].wait()
    usage = again.last().usage
    assert usage is not None
    assert usage.cached_tokens == (len(prompt) + len(text) - 1) // 4 * 4
    fresh = send(roomy, (*prompt, *text), max_tokens=4, ignore_eos=True)[1].wait()
    assert again.tokens() == fresh.tokens()


@pytest.fixture(scope="module")
def boxes(boxed: Engine) -> Iterator[tuple[Engine, Engine]]:
    """The model in the box, without drafts and with."""
    with box(**SPEC) as drafting:
        yield boxed, drafting


def said(on: Engine, text: str, prediction: str = "", **sampling: Any) -> Stream:
    params = SamplingParams(**{"max_tokens": 60, **sampling})
    stream = Stream()
    request = Request(
        f"said-{random.random()}",
        tuple(on.encode(text)),
        params,
        prediction=tuple(on.encode(prediction, special=False)) if prediction else (),
    )
    on.check(request)
    on.submit(request, stream)
    return stream.wait()


SCHEMA = '{"type": "object", "properties": {"long_enough_a_name": {"enum": ["tea", "cake"]}, \
"another_name": {"type": "integer", "maximum": 99}}, "required": ["long_enough_a_name", \
"another_name"], "additionalProperties": false}'
CALL = """%llguidance {}
start: "<call>" @it "</call>" """
ASKED: dict[str, dict[str, Any]] = {
    "text": {},
    "stop string": {"stop": (" the",)},
    "schema": {"grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)},
    "call": {"grammar": Grammar.lark(CALL, {"it": json.loads(SCHEMA)})},
    "seeded schema": {
        "grammar": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA),
        "temperature": 1.0,
        "seed": 3,
    },
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("asked", ASKED)
def test_real_drafters_on_real_text(boxes: tuple[Engine, Engine], asked: str) -> None:
    plain, drafting = boxes
    text = "Once upon a time there was a little dog. The dog was happy. Once upon a time"
    expected = said(plain, text, **ASKED[asked])
    for prediction in ("", expected.text(), "something else altogether " + expected.text()):
        got = said(drafting, text, prediction, **ASKED[asked])
        assert got.text() == expected.text() and got.tokens() == expected.tokens()
        assert got.reason == expected.reason
        usage = got.last().usage
        assert usage is not None
        assert usage.accepted_draft_tokens > 0 or len(expected.tokens()) < 4 or not prediction


@pytest.mark.usefixtures("eager")
def test_a_grammar_drafts_what_it_forces(boxes: tuple[Engine, Engine]) -> None:
    recorder = StepRecorder()
    boxes[1].add_observer(recorder)
    said(boxes[1], "A name:", **ASKED["schema"])
    wait_until_idle(boxes[1])
    right = sum(step.accepted.get("grammar", 0) for step in recorder.steps)
    wrong = sum(step.rejected.get("grammar", 0) for step in recorder.steps)
    assert right > 0 and not wrong
