"""Log-probabilities of prompts are the model's own, whatever becomes of a request on the way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.device.batch_layout import NO_TARGET, Layout, Rows
from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.engine.device.prompt_logprobs_step import make_prompt_step
from jaxserve.engine.device.step_model import StepModel
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import TokenLogprobs
from jaxserve.engine.prompt_logprobs import TOLD_AT_ONCE, PromptLogprobs, prompt_logprob_pieces
from jaxserve.engine.sequence import Continuation
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.stats import StepRecorder
from jaxserve.models.dense import sequence_logits
from jaxserve.models.forward import logits
from jaxserve.sched.request import Request, SamplingParams
from tests.engine import mixed_caches
from tests.engine.conftest import Texts
from tests.engine.harness import (
    SAMPLING,
    SCARCE,
    Stream,
    engine,
    generate,
    prompts,
    send,
    wait_until_idle,
)

LONGEST = 30  # of `prompts()`
# The bits by other ways of K and V are in tests/exact.
TREATMENTS: dict[str, dict[str, Any]] = {
    "preempted in chunks": {**SCARCE, "scheduler__max_prefill_tokens": 7},
    "hybrid": {
        **SCARCE,
        "scheduler__policy": "mixed_chunks",
        "scheduler__max_prefill_tokens": 7,
        "cache__rho": "0",
    },
}


def step_model(executor: JaxExecutor) -> StepModel:
    """What it runs."""
    model: StepModel = executor._scores[False].__wrapped__.args[0]  # type: ignore[attr-defined]
    return model


def reference(executor: Any, wanted: list[list[int]]) -> list[np.ndarray]:
    """float64 [len(prompt) - 1, V] of each: row i is of token i + 1, by a pass without a cache."""
    model = step_model(executor)

    @jax.jit
    def whole(tokens: jax.Array) -> jax.Array:
        return sequence_logits(model.family, executor.params, model.config, tokens)

    found = []
    for prompt in wanted:
        padded = jnp.array(prompt + [0] * (LONGEST - len(prompt)), jnp.int32)
        raw = np.asarray(whole(padded), np.float64)[: len(prompt) - 1]
        found.append(raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True)))
    return found


def told(stream: Stream, index: int = 0) -> list[TokenLogprobs]:
    """All of it, none of which comes after the first token."""
    outputs = [output for output in stream.outputs if output.index == index]
    begun = next(i for i, output in enumerate(outputs) if output.token_ids)
    assert not any(output.prompt_logprobs for output in outputs[begun:])
    assert max(len(output.prompt_logprobs) for output in outputs) <= TOLD_AT_ONCE
    return [entry for output in outputs[:begun] for entry in output.prompt_logprobs]


def check(entries: list[TokenLogprobs], prompt: list[int], expected: np.ndarray, k: int) -> None:
    assert [entry.token_id for entry in entries] == prompt[1:]
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:k].tolist()
        assert [value for _, value in entry.top] == pytest.approx(-np.sort(-row)[:k], abs=1e-4)
        for token, value in entry.top:  # the very same number: evaluations compare them
            assert token != entry.token_id or value == entry.logprob


def check_all(on: Engine, texts: list[list[int]]) -> None:
    """Every other request asks, for 0 to 20 alternatives, beside others that do not."""
    asks = [number % 21 if number % 2 else None for number in range(len(prompts()))]
    streams = [
        send(on, prompt, **SAMPLING, prompt_logprobs=k)[1]
        for prompt, k in zip(prompts(), asks, strict=True)
    ]
    assert [stream.wait().tokens() for stream in streams] == texts
    expected = reference(on.executor, prompts())
    for stream, prompt, rows, k in zip(streams, prompts(), expected, asks, strict=True):
        if k is None:
            assert told(stream) == []
        else:
            check(told(stream), prompt, rows, k)


def test_of_every_token_but_the_first(roomy: Engine, alone: Texts) -> None:
    check_all(roomy, alone("opt"))


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_whatever_becomes_of_the_cache(
    shapes: dict[str, Path], alone: Texts, monkeypatch: pytest.MonkeyPatch, treatment: str
) -> None:
    """A prompt that is computed again says nothing twice; one that is not leaves nothing out."""
    expected = alone("opt")
    monkeypatch.setattr(policy_choice, "make_policy", mixed_caches.make)
    with engine(shapes["opt"], **TREATMENTS[treatment]) as running:
        check_all(running, expected)
        assert running.stats().preemptions


def test_each_continuation_says_it(roomy: Engine) -> None:
    prompt = prompts()[1]
    sampling = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 4, "logprobs": 2}
    _, stream = send(roomy, prompt, **sampling, prompt_logprobs=2)
    stream.wait()
    (expected,) = reference(roomy.executor, [prompt])
    for index in range(3):
        check(told(stream, index), prompt, expected, 2)
    assert stream.last().usage is not None
    assert generate(roomy, [prompt], **sampling) == [stream.tokens()]


def test_others_take_the_step_that_they_always_take(
    roomy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed for prompts is so only where somebody asks, and of his tokens alone."""
    executor, scored = cast(JaxExecutor, roomy.executor), []
    score = executor._scores[False]

    def counted(params: Any, hidden: Any, targets: Any, *, rows: int) -> Any:
        scored.append(np.asarray(targets))
        return score(params, hidden, targets, rows=rows)

    monkeypatch.setitem(executor._scores, False, counted)
    steps = StepRecorder()
    roomy.add_observer(steps)
    generate(roomy, prompts(8), **SAMPLING)
    assert not scored
    asked, beside = prompts(2)
    streams = [
        send(roomy, asked, **SAMPLING, prompt_logprobs=0)[1],
        send(roomy, beside, **SAMPLING)[1],
    ]
    for stream in streams:
        stream.wait()
    targets = np.concatenate(scored)
    assert targets[targets != NO_TARGET].tolist() == asked[1:]
    assert len(scored) < len(steps.steps)


def test_the_cost_model_is_not_told_of_such_steps(
    roomy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[Any] = []
    watch = roomy._step_loop.watch
    monkeypatch.setattr(watch.model, "observe", lambda *of: learned.append(of))
    _, stream = send(roomy, prompts()[0], max_tokens=1, prompt_logprobs=1)
    stream.wait()
    wait_until_idle(roomy)
    assert not learned
    generate(roomy, prompts(1), max_tokens=1)
    wait_until_idle(roomy)
    assert learned


@pytest.mark.parametrize(("tokens", "rows"), [(16, 16), (70, 8)])
def test_slices(roomy: Engine, tokens: int, rows: int) -> None:
    """However many there are, whether or not slices divide them; there are never logits of more
    tokens than of a slice, and none of a slice without a target."""
    executor = cast(JaxExecutor, roomy.executor)
    model, size = step_model(executor), min(rows, tokens, 64)
    rng = np.random.default_rng(tokens)
    hidden = jnp.asarray(rng.normal(size=(tokens, model.config.d_model)), jnp.float32)
    targets = np.where(rng.random(tokens) < 0.3, rng.integers(0, 96, tokens), NO_TARGET)
    targets[:size] = targets[:size] if size == tokens else NO_TARGET
    step: Any = make_prompt_step(model)
    given = (executor.params, hidden, jnp.asarray(targets, jnp.int32))
    found = jax.tree.map(np.asarray, step(*given, rows=rows))
    raw = logits(model.family, executor.params, model.config, hidden)
    expected, wanted = np.asarray(jax.nn.log_softmax(raw)), np.flatnonzero(targets != NO_TARGET)
    assert found.chosen_logprob.shape == (tokens,) and found.top_ids.shape == (tokens, 20)
    assert len(wanted)
    chosen = expected[wanted, targets[wanted]]
    assert found.chosen_logprob[wanted] == pytest.approx(chosen, abs=1e-5)
    best = np.argmax(expected[wanted], axis=-1)
    assert found.top_ids[wanted, 0].tolist() == best.tolist()
    if size < tokens:
        assert not found.top_logprobs[:size].any()
    text = step.lower(*given, rows=rows).as_text()
    assert f"tensor<{size}x96xf32>" in text
    assert size == tokens or f"tensor<{tokens}x96xf32>" not in text


@given(st.data())
def test_each_token_is_told_once(data: st.DataObject) -> None:
    """However the prompt is cut into steps, and however often some of its cache is lost."""
    length = data.draw(st.integers(1, 12))
    prompt = tuple(range(100, 100 + length))
    request = Request("a", prompt, SamplingParams(prompt_logprobs=1))
    text: Any = None
    row: Any = None
    member = Continuation(request, 0, 0, 0, text, row, lambda _: None)
    cached, found = 0, list[int]()
    while cached < length:
        if cached and data.draw(st.booleans()):
            cached = data.draw(st.integers(0, cached - 1))
        end = data.draw(st.integers(cached + 1, length))
        layout, other = Layout(32, 4, 1, 4, False), data.draw(st.integers(1, 9))
        step: Any = SimpleNamespace(start=np.array([0, cached]), end=np.array([other, end]))
        rows = Rows(np.array([other, end - cached]), np.array([0, cached]), np.zeros((2, 2, 1)))
        batch = layout.pack(rows)
        nobody = Continuation(Request("b", (1, 2)), 0, 1, 1, text, row, lambda _: None)
        scored = PromptLogprobs.of_step(
            prompt_logprob_pieces([nobody, member], step), step, layout, batch
        )
        if scored is not None:
            begin = int(layout.views(batch.buffer)["query_start"][batch.order.tolist().index(1)])
            for at in np.flatnonzero(scored.targets != NO_TARGET).tolist():
                place = cached + at - begin  # of the token that is computed there
                assert scored.targets[at] == prompt[place + 1]
                found.append(place + 1)
        cached = end
    assert found == list(range(1, length))
    assert member.next_prompt_logprob is None
