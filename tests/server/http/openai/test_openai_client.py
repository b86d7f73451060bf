"""OpenAI's own client against the server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxserve.client import Client
from jaxserve.sched.cost.reachability import SloProblem, SloProblemKind
from jaxserve.sched.request import SLO, Tier
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

TEXT = " w0 w1 w2 w3"
CHAT = [{"role": "user", "content": "Hello"}]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == INFO.model
    assert client.models.retrieve(INFO.model).id == INFO.model
    vllms = {"root": INFO.model, "parent": None, "max_model_len": INFO.max_model_len}
    ours = {"sampling_defaults": {}}
    assert model.model_extra == vllms | ours


def test_a_completion_is_what_grpc_says(
    client: openai.OpenAI, running: FakeEngine, server: Server
) -> None:
    answer = client.completions.create(model=INFO.model, prompt="Hello", max_tokens=4)
    (choice,) = answer.choices
    with Client(server.address) as grpc:
        (same,) = grpc.complete("Hello", max_tokens=4)
    assert choice.text == same.text == TEXT
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)
    assert running.requests[0].prompt == tuple(map(ord, "Hello"))
    assert running.requests[0].sampling.temperature == 1  # OpenAI's default, not ours


def test_several_prompts_and_continuations_have_numbers(
    client: openai.OpenAI, running: FakeEngine
) -> None:
    for prompt in (["a", "bc"], [[97], [98, 99]]):
        running.requests.clear()
        answer = client.completions.create(model=INFO.model, prompt=prompt, max_tokens=2, n=3)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert {choice.text for choice in answer.choices} == {" w0 w1"}
        assert sorted(request.prompt for request in running.requests) == [(97,), (98, 99)]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)


def test_streamed_pieces_are_the_whole(client: openai.OpenAI, running: FakeEngine) -> None:
    stream = client.completions.create(
        model=INFO.model,
        prompt=["a", "b"],
        max_tokens=4,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, ends = [""] * 4, {}
    *chunks, last = stream
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert chunk.usage is None
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert texts == [TEXT] * 4
    assert ends == dict.fromkeys(range(4), "length")
    assert last.choices == []
    assert last.usage is not None and last.usage.total_tokens == 2 + 16


def test_usage_in_every_chunk_if_asked_for(client: openai.OpenAI, engine: FakeEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model=INFO.model,
        prompt="ab",
        max_tokens=2,
        stream=True,
        stream_options=options,  # type: ignore[arg-type]
    )
    engine.step()
    first = next(stream)
    assert first.usage is not None and first.usage.completion_tokens == 1
    engine.step()
    second = next(stream)
    assert second.usage is not None and second.usage.completion_tokens == 2


def test_echo_puts_the_prompt_before(client: openai.OpenAI, running: FakeEngine) -> None:
    for prompt in ("Hey", [72, 101, 121]):
        stream = client.completions.create(
            model=INFO.model, prompt=prompt, max_tokens=3, echo=True, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == "Hey w0 w1 w2"


def test_a_chat_goes_through_the_template(client: openai.OpenAI, running: FakeEngine) -> None:
    answer = client.chat.completions.create(
        model=INFO.model,
        messages=[{"role": "system", "content": "Be kind."}, *CHAT],  # type: ignore[list-item]
        max_tokens=4,
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    prompt = "".join(map(chr, running.requests[0].prompt))
    assert prompt == "system: Be kind.\nuser: Hello\nassistant:"


def test_a_chat_without_a_length_may_fill_the_model(
    client: openai.OpenAI, engine: FakeEngine, running: FakeEngine
) -> None:
    client.chat.completions.create(model=INFO.model, messages=CHAT, stop=[" w3"])  # type: ignore[arg-type]
    (request,) = engine.requests
    assert len(request.prompt) + request.sampling.max_tokens == INFO.max_model_len


def test_a_streamed_chat(client: openai.OpenAI, running: FakeEngine) -> None:
    stream = client.chat.completions.create(
        model=INFO.model,
        messages=CHAT,  # type: ignore[arg-type]
        max_completion_tokens=4,
        stream=True,
        logprobs=True,
        top_logprobs=1,
    )
    first, *rest = stream
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == TEXT
    assert rest[-1].choices[0].finish_reason == "length"
    entries = [e for c in rest for e in (c.choices[0].logprobs.content or ())]  # type: ignore[union-attr]
    assert [entry.token for entry in entries] == ["d", "e", "f", "g"]
    assert entries[0].bytes == [100]
    assert [top.token for top in entries[0].top_logprobs] == ["d"]


def test_the_system_s_fingerprint_is_in_answers_and_chunks(
    client: openai.OpenAI, running: FakeEngine
) -> None:
    for stream in (False, True):
        usual: dict[str, Any] = {"model": INFO.model, "max_tokens": 2, "stream": stream}
        for made in (
            client.completions.create(prompt="a", **usual),
            client.chat.completions.create(messages=CHAT, **usual),
        ):
            told = {one.system_fingerprint for one in (made if stream else [made])}
            assert told == {INFO.system_fingerprint}


def test_targets_and_tiers_reach_the_engine(client: openai.OpenAI, running: FakeEngine) -> None:
    def request(**further: object) -> tuple[SLO, Tier]:
        client.completions.create(
            model=INFO.model, prompt="a", max_tokens=1, extra_body={**further}
        )
        return running.requests[-1].slo, running.requests[-1].tier

    assert request() == (SLO(), Tier.REALTIME)
    assert request(slo={"ttft_ms": 500, "tbt_ms": 50}) == (SLO(ttft=0.5, tbt=0.05), Tier.REALTIME)
    assert request(slo={"max_tbt_ms": 700}) == (SLO(max_tbt=0.7), Tier.REALTIME)
    assert request(slo={"jct_ms": 9000}, tier="best_effort") == (SLO(jct=9.0), Tier.BEST_EFFORT)
    assert request(slo="offline") == (SLO(jct=60.0), Tier.BEST_EFFORT)
    assert request(slo="offline", tier="realtime") == (SLO(jct=60.0), Tier.REALTIME)
    assert request(slo_class="offline", slo={"ttft_ms": 100}) == (
        SLO(ttft=0.1, jct=60.0),
        Tier.BEST_EFFORT,
    )
    assert running.requests[-1].slo_class == "offline"
    assert request(service_tier="auto", slo="offline")[1] is Tier.BEST_EFFORT
    assert request(service_tier="flex")[1] is Tier.BEST_EFFORT
    assert request(service_tier="priority")[1] is Tier.REALTIME


def test_named_targets_and_what_came_of_them(engine: FakeEngine) -> None:
    chat = ServiceLevel(SLO(ttft=0.25), Tier.BEST_EFFORT, "chat")
    engine.problems = (SloProblem(SloProblemKind.TBT_UNREACHABLE, 0.05, 0.06),)
    server = Server(engine.run(), grace_s=0.0, http=SETTINGS, slo_classes={"chat": chat})
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 4, "slo_class": "chat"}
    with server:
        plain = Plain(server)
        status, answer, _ = plain.call("POST", "/v1/completions", {**body, "slo": {"tbt_ms": 50}})
        refused, problem, _ = plain.call("POST", "/v1/completions", {**body, "slo_class": "gold"})
        _, auto, _ = plain.call("POST", "/v1/completions", {**body, "service_tier": "auto"})
        _, prio, _ = plain.call("POST", "/v1/completions", {**body, "service_tier": "priority"})
    assert status == 200
    (choice,) = answer["choices"]
    # The fake engine's tokens come after 200, 220, 240 and 300 ms.
    assert choice["timings"]["tbt_ms"] == pytest.approx(59.2)
    assert choice["timings"]["max_tbt_ms"] == pytest.approx(60.0)
    assert choice["slo"] == {
        "class": "chat",
        "tier": "best_effort",
        "targets": {"ttft_ms": 250.0, "tbt_ms": 50.0, "max_tbt_ms": 2000.0},
        "targets_met": {"ttft_ms": True, "tbt_ms": False, "max_tbt_ms": True},
        "met": False,
        "problems": [{"kind": "tbt_unreachable", "target_ms": 50.0, "limit_ms": 60.0}],
    }
    assert refused == 400 and problem["error"]["param"] == "slo_class"
    assert "this server has chat" in problem["error"]["message"]
    assert (auto["service_tier"], prio["service_tier"]) == ("flex", "default")


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_once_that_targets_are_given_up(
    client: openai.OpenAI, engine: FakeEngine, chat: bool
) -> None:
    asked: dict[str, Any] = {"model": INFO.model, "max_tokens": 3, "stream": True}
    asked["extra_body"] = {"slo": {"ttft_ms": 250}}
    if chat:
        message = {"role": "user", "content": "a"}
        stream: Any = client.chat.completions.create(messages=[message], **asked)
    else:
        stream = client.completions.create(prompt="a", **asked)
    chunks = iter(stream)
    if chat:
        next(chunks)  # whose turn it is
    engine.give_up()
    (choice,) = next(chunks).choices
    assert choice.model_extra["slo"] == {"expected": "missed"} and choice.finish_reason is None
    engine.step(3)
    told = [
        c.model_extra["slo"] for chunk in chunks for c in chunk.choices if "slo" in c.model_extra
    ]
    (last,) = told
    assert last["targets_met"] == {"ttft_ms": True} and last["met"], "what came of it"


def test_further_sampling_fields_reach_the_engine(
    client: openai.OpenAI, running: FakeEngine
) -> None:
    client.completions.create(
        model=INFO.model,
        prompt="a",
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["x", "yz"],
        logit_bias={"5": -3},
        presence_penalty=0.1,
        frequency_penalty=0.2,
        extra_body={
            "top_k": -1,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "deterministic": True,
            "stop_token_ids": [9],
        },
    )
    sampling = running.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0, 0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.deterministic) == (2, True, True)
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "yz"), (9,))
    assert sampling.logit_bias == ((5, -3.0),)


def test_errors_are_the_clients_own(client: openai.OpenAI, engine: FakeEngine) -> None:
    def create(**fields: object) -> None:
        client.completions.create(**{"model": INFO.model, "prompt": "a", **fields})  # type: ignore[call-overload]

    with pytest.raises(openai.BadRequestError, match="temperature: must be") as bad:
        create(temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        create(model="other")
    engine.max_requests = 0
    with pytest.raises(openai.RateLimitError, match="try again later") as full:
        create()
    assert int(full.value.response.headers["Retry-After"]) >= 1
    engine.drain(0.0)
    with pytest.raises(openai.InternalServerError, match="shutting down") as closed:
        create()
    assert closed.value.status_code == 503
