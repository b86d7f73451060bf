"""The engine without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jaxserve
from jaxserve import LLM, SLO, SamplingParams
from jaxserve.config import ConfigError
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import StepStats
from jaxserve.sched.request import InvalidRequest, Request, Tier
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from tests.engine.harness import SCARCE, generate, wait_until_idle, write_shape
from tests.engine.harness import engine as small_engine
from tests.server.fake_engine import FakeEngine

TEN = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    shape = write_shape(tmp_path_factory.mktemp("shape"), "opt")
    with small_engine(shape, scheduler__max_queue=0, **SCARCE) as engine:
        yield engine


@pytest.fixture(scope="module")
def llm(engine: Engine) -> LLM:
    return LLM.over(engine, ChatTemplate())


def test_tokens_are_the_engines_however_many_prompts(llm: LLM, engine: Engine) -> None:
    """The queue takes 8 at once."""
    prompts = [[5 + k % 7, 6, 7] for k in range(30)]
    found = llm.generate(prompts, TEN, progress=False)
    expected = generate(engine, prompts[:7], max_tokens=10, ignore_eos=True)
    assert [request.prompt_token_ids for request in found] == [tuple(p) for p in prompts]
    for k, request in enumerate(found):
        (output,) = request.outputs
        assert output.token_ids == list(expected[k % 7])
        assert output.finish_reason is FinishReason.LENGTH
        assert output.usage is not None and output.usage.output_tokens == 10


def test_an_observer_sees_steps_and_the_pool_of_each(llm: LLM) -> None:
    """Which belongs to whom is by number, in the order of arrival."""
    recorder, numbers, held = jaxserve.StepRecorder(), [], []

    class Looking(jaxserve.Observer):
        def on_arrival(self, number: int, request: Request) -> None:
            numbers.append(number)

        def on_step(self, stats: StepStats) -> None:
            held.append(llm.pool_view().used.sum())

    llm.add_observer(recorder)
    llm.add_observer(Looking())
    llm.generate([[5, 6, 7], [8, 9]], TEN, progress=False)
    llm.generate([5], TEN, progress=False)  # by now it has been told of all steps before
    received = [number for step in tuple(recorder.steps) for number in step.received]
    assert [received.count(number) for number in numbers[:2]] == [10, 10]
    assert max(held) >= 4


def test_whoever_waits_for_all_texts_is_best_effort_unless_it_has_targets(llm: LLM) -> None:
    seen: list[Request] = []

    class Looking(jaxserve.Observer):
        def on_arrival(self, number: int, request: Request) -> None:
            seen.append(request)

    llm.add_observer(Looking())
    llm.generate([5], TEN, progress=False)
    asyncio.run(llm.agenerate([5], TEN))
    llm.generate([5], TEN, slo=SLO(ttft=9.0), progress=False)
    llm.generate([5], TEN, tier=Tier.REALTIME, progress=False)
    list(llm.stream([5], TEN))
    assert [request.tier for request in seen] == [Tier.BEST_EFFORT] * 2 + [Tier.REALTIME] * 3


def test_one_prompt_and_several_continuations(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=1, logprobs=2)
    (request,) = llm.generate([5, 6, 7], sampling, slo=SLO(ttft=1.0), progress=False)
    assert [output.index for output in request.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in request.outputs}) > 1
    for output in request.outputs:
        assert len(output.logprobs) == len(output.token_ids)


def test_a_stream_says_what_generate_says(llm: LLM) -> None:
    pieces = list(llm.stream([8, 9], TEN))
    (whole,) = llm.generate([[8, 9]], TEN, progress=False)
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == whole.outputs[0].token_ids
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_a_stream_says_once_that_targets_are_given_up(
    llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    def given_up(request: Request, on_output: Callable[[Output], None]) -> None:
        on_output(Output(request.id, 0, expected_missed=True))
        submit(request, on_output)

    monkeypatch.setattr(engine, "submit", given_up)
    pieces = list(llm.stream([8, 9], TEN, slo=SLO(ttft=1e-9)))
    assert [piece.expected_missed for piece in pieces].count(True) == 1
    assert sum(len(piece.token_ids) for piece in pieces) == 10


def test_log_probabilities_of_prompts(llm: LLM) -> None:
    """One a token, the first without: nothing comes before it."""
    sampling = SamplingParams(max_tokens=3, n=2, prompt_logprobs=2, logprobs=0, ignore_eos=True)
    (asked,) = llm.generate([[8, 9, 10]], sampling, progress=False)
    assert asked.prompt_logprobs is not None
    first, *rest = asked.prompt_logprobs
    assert first is None
    assert [(entry.token_id, len(entry.top)) for entry in rest if entry] == [(9, 2), (10, 2)]
    pieces = list(llm.stream([8, 9, 10], dataclasses.replace(sampling, n=1)))
    assert [entry for piece in pieces for entry in piece.prompt_logprobs] == rest
    assert sum(len(piece.logprobs) for piece in pieces) == 3
    (other,) = llm.generate([[8, 9, 10]], TEN, progress=False)
    assert other.prompt_logprobs is None


def test_each_prompt_has_its_prediction(
    llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoded where the policy drafts; which has no part in the text."""
    info, submit, found = engine.info(), engine.submit, []

    def noted(request: Request, *rest: Any) -> Any:
        found.append(request.prediction)
        return submit(request, *rest)

    monkeypatch.setattr(engine, "info", lambda: dataclasses.replace(info, speculates=True))
    monkeypatch.setattr(engine, "encode", lambda text, special=True: [ord(c) % 32 for c in text])
    monkeypatch.setattr(engine, "submit", noted)
    likely = llm.generate([[5], [6]], TEN, prediction=["a", "bc"], progress=False)
    list(llm.stream([5], TEN, prediction="d"))
    llm.generate([[5], [6]], TEN, prediction="e", progress=False)
    assert sorted(found) == [(1,), (2, 3), (4,), (5,), (5,)]
    plain = llm.generate([[5], [6]], TEN, progress=False)
    texts = [[one.outputs[0].token_ids for one in some] for some in (likely, plain)]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="prediction: 2 of them for 1 prompts"):
        llm.generate([5], prediction=["a", "b"], progress=False)


def test_who_stops_asking_cancels(llm: LLM, engine: Engine) -> None:
    stream = llm.stream([8, 9], SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(engine)


def test_on_an_event_loop_of_ones_own(llm: LLM) -> None:
    async def both() -> list[list[int]]:
        found = await asyncio.gather(llm.agenerate([[5]], TEN), llm.agenerate([[6]], TEN))
        return [request.outputs[0].token_ids for (request,) in found]

    one, other = asyncio.run(both())
    assert one == llm.generate([5], TEN, progress=False)[0].outputs[0].token_ids
    assert other == llm.generate([6], TEN, progress=False)[0].outputs[0].token_ids


def test_one_bad_prompt_and_none_is_served(llm: LLM, engine: Engine) -> None:
    wait_until_idle(engine)
    steps = engine.stats().steps
    with pytest.raises(InvalidRequest, match="token id 999"):
        llm.generate([[5], [999]], TEN, progress=False)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        llm.generate("text", TEN, progress=False)
    with pytest.raises(ValueError, match="2 of them for 1 prompts"):
        llm.generate([[5]], [TEN, TEN], progress=False)
    assert engine.stats().steps == steps
    assert llm.generate([], TEN, progress=False) == []


def test_a_salt_is_limited_and_may_be_any_text(llm: LLM) -> None:
    for salt in ("me", "\0\ud800", "s" * 256):
        (whole,) = llm.generate([8, 9], TEN, cache_salt=salt, progress=False)
        pieces = list(llm.stream([8, 9], TEN, cache_salt=salt))
        assert [t for piece in pieces for t in piece.token_ids] == whole.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="cache_salt: has 257"):
        llm.generate([8, 9], TEN, cache_salt="s" * 257)
    with pytest.raises(InvalidRequest, match="cache_salt: has 257"):
        list(llm.stream([8, 9], TEN, cache_salt="s" * 257))


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_chats_with_tools() -> None:
    fake: Any = FakeEngine().run()
    fake.text, fake.ends_at = lambda k: ("So. ", CALL)[k], 2
    asked = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    chat: Any = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "assistant", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "a", "content": "Sunny."},
    ]
    with LLM.over(fake, ChatTemplate()) as llm:
        (found,) = llm.chat(chat, tools=[WEATHER], progress=False)
        assert found.prompt is not None
        assert found.prompt.startswith("system: You can call these functions:\n")
        assert "The function weather returned:\nSunny." in found.prompt
        content, (call,) = llm.parse_calls(found.outputs[0].text, [WEATHER])
        assert (content, call.name) == ("So.", "weather")
        assert call.arguments == '{"city": "Rome"}'
        (plain,) = llm.chat(chat[:1], progress=False)
        assert plain.prompt == "user: How is it?\nassistant:"
        with pytest.raises(InvalidRequest, match=r"tools\.1: must be"):
            llm.chat(chat, tools=[WEATHER, 1], progress=False)
    assert len(fake.requests) == 2


def test_markers_that_are_special_tokens_are_shown() -> None:
    """Else nobody would find the calls."""
    fake: Any = FakeEngine().run()
    encode, decode = fake.encode, fake.decode
    fake.encode = lambda text, **how: [7] if text == "[TOOL_CALLS]" else encode(text, **how)
    fake.decode = lambda ids: "" if list(ids) == [7] else decode(ids)
    with LLM.over(fake, ChatTemplate(tool_format="mistral")) as llm:
        chat = [{"role": "user", "content": "Hi"}]
        one = SamplingParams(max_tokens=1)
        llm.chat(chat, [one], tools=[WEATHER], progress=False)
        llm.chat(chat, tools=[WEATHER], progress=False)
        llm.chat(chat, one, progress=False)
    shown = [request.sampling.shown_token_ids for request in fake.requests]
    assert shown == [(7,), (7,), ()]


def test_what_it_cannot_start_with() -> None:
    with pytest.raises(ConfigError, match="scheduler__rows: there is no such field"):
        LLM(scheduler__rows=3)
    with pytest.raises(ConfigError, match=r"scheduler\.max_rows: must be int"):
        LLM(scheduler__max_rows="3")
    with pytest.raises(ConfigError, match="opt-999b"):  # not the model in the box
        LLM(model__preset="opt-999b", model__load_format="random")
    with pytest.raises(AttributeError, match="LLMs"):
        jaxserve.LLMs  # noqa: B018


def test_vectors(llm: LLM) -> None:
    """However many there are, for a queue of 8."""
    prompts = [[5 + k, 6, 7] for k in range(20)]
    found = llm.embed(prompts, pooling="mean", progress=False)
    (alone,) = llm.embed(prompts[3], pooling="mean", progress=False)
    assert (found[3].embedding == alone.embedding).all()
    assert found[3].usage is not None and found[3].usage.prompt_tokens == 3
    (short,) = llm.embed(prompts[3], pooling="mean", dimensions=4, normalize=False, progress=False)
    scaled = short.embedding / alone.embedding[:4]
    assert scaled == pytest.approx([scaled[0]] * 4, rel=1e-4)
    for field_, wrong in (("pooling", {"pooling": "max"}), ("dimensions", {"dimensions": 33})):
        with pytest.raises(InvalidRequest, match=f"^{field_}: "):
            llm.embed(prompts[3], **wrong, progress=False)  # type: ignore[arg-type]


def test_scores(llm: LLM, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair's is its vectors' cosine, or what the model says of it."""

    def encode(text: str, *, special: bool = True) -> list[int]:
        return [ord(character) % 96 for character in text]

    monkeypatch.setattr(engine, "encode", encode)
    vectors = llm.embed(["ab", "ba", "abc"], progress=False)
    near = [float(vectors[0].embedding @ each.embedding) for each in vectors]
    assert llm.score("ab", ["ab", "ba", "abc"], progress=False) == pytest.approx(near, abs=1e-5)
    given = {"template": "{document}|{query}", "progress": False}
    (score,) = llm.score("b{document}", "a", tokens=["y", 7], **given)
    (logprobs,) = llm.generate(
        ["a|b{document}"], SamplingParams(max_tokens=1, logprobs=20), progress=False
    )
    top = dict(logprobs.outputs[0].logprobs[0].top)
    (other,) = llm.score("b{document}", "a", tokens=list(top)[:2], **given)
    first, second = list(top.values())[:2]
    assert other == pytest.approx(1 / (1 + math.exp(second - first)), abs=1e-5)
    assert 0 < score < 1
    for wrong in ({"tokens": ["yes"]}, {"tokens": [96]}, {"tokens": []}):
        with pytest.raises(InvalidRequest):
            llm.score("a", "b", **wrong, **given)
    with pytest.raises(ValueError, match="2 of them"):
        llm.score(["a", "b"], ["a"], progress=False)


def test_chats_as_clients_have_them() -> None:
    source = (
        "{% if messages[0].role == 'system' %}<S>{{ messages[0].content }}{% endif %}"
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments|tojson }}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat: Any = [
        {"role": "system", "content": "A"},
        {"role": "developer", "content": [{"type": "text", "text": "B"}], "name": None},
        {"role": "user", "content": "C", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "D"}]},
    ]
    with LLM.over(FakeEngine().run(), ChatTemplate(source)) as llm:
        (found,) = llm.chat(chat, progress=False)
        assert found.prompt == '<S>A\n\nB<user>C<assistant>{"a": 1}<tool>D'
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        with pytest.raises(InvalidRequest, match="only parts of text"):
            llm.chat(picture, progress=False)
