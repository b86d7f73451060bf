"""What goes through unharmed: prompts, parameters, tokens, text, logprobs, usage."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import __version__
from jaxserve.client import Client, make_request
from jaxserve.engine.stats import EngineInfo
from jaxserve.sched.request import SLO, SamplingParams, Tier
from jaxserve.server.grpc import message_conversion
from jaxserve.server.proto import generation_pb2 as pb
from tests.server.fake_engine import FIRST, INFO, FakeEngine


def test_each_step_is_one_message_for_a_client_that_reads(
    client: Client, engine: FakeEngine
) -> None:
    stream = client.generate("hi", max_tokens=3)
    seen = []
    for _ in range(3):
        engine.wait(lambda: engine.live)
        engine.step()
        seen.append(next(stream))
    assert [list(message.token_ids) for message in seen] == [[FIRST], [FIRST + 1], [FIRST + 2]]
    assert "".join(message.text for message in seen) == " w0 w1 w2"
    assert not any(message.HasField("finish") for message in seen[:2])
    finish = seen[2].finish
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.output_tokens) == (2, 3)
    assert finish.usage.preemptions == 1
    timings = finish.timings
    assert (timings.queue_ms, timings.ttft_ms, timings.total_ms) == (100, 200, 300)
    assert next(stream, None) is None
    assert engine.cancelled == []


def test_text_is_encoded_and_token_ids_are_taken_as_they_are(
    client: Client, engine: FakeEngine
) -> None:
    engine.run()
    client.complete("ab", max_tokens=1)
    client.complete([7, 8, 9], max_tokens=1)
    long_text = "x" * 3000  # encoded off the event loop
    client.complete(long_text, max_tokens=1)
    prompts = [request.prompt for request in engine.requests]
    assert prompts == [(97, 98), (7, 8, 9), (120,) * 3000]


def test_defaults_are_those_of_sampling_params(client: Client, engine: FakeEngine) -> None:
    engine.run()
    client.complete("hi")
    (request,) = engine.requests
    assert request.sampling == SamplingParams()
    assert request.slo == SLO()
    assert request.tier is Tier.REALTIME
    assert len(request.id) == 32


def test_default_length_shrinks_to_what_fits(client: Client, engine: FakeEngine) -> None:
    engine.run()
    room = min(engine.info().max_model_len, engine.info().pool_tokens)
    client.complete([7] * (room - 10))
    client.complete([7] * (room - 10), max_tokens=5)
    assert [request.sampling.max_tokens for request in engine.requests] == [10, 5]


def test_logprobs_of_the_prompt(client: Client, engine: FakeEngine) -> None:
    """Of every token but the first, in as many messages as it takes."""
    engine.run()
    (completion,) = client.complete([70, 71, 72], max_tokens=1, prompt_logprobs=2)
    found = [(entry.token_id, entry.logprob) for entry in completion.prompt_logprobs]
    assert found == [(71, -71 / 8), (72, -72 / 8)]
    top = [(entry.token_id, entry.logprob) for entry in completion.prompt_logprobs[1].top]
    assert top == [(73, -73 / 8), (74, -74 / 8)]
    assert not completion.logprobs
    messages = list(client.generate([5] * 2000, max_tokens=1, prompt_logprobs=20))
    assert sum(len(message.prompt_logprobs) for message in messages) == 1999


def test_salts_and_predictions_arrive_and_what_came_of_them_is_told(
    client: Client, engine: FakeEngine
) -> None:
    engine.served = dataclasses.replace(INFO, speculates=True)
    engine.cached_tokens, engine.drafts = 3, (5, 2)
    engine.run()
    for salt in ("", "s" * 256, "\0"):
        asked = {"cache_salt": salt, "prompt_cache_key": 2 * salt[:128], "prediction": "as ever"}
        (found,) = client.complete("hello", max_tokens=1, **asked)
        assert engine.requests[-1].cache_salt == salt
        assert engine.requests[-1].prediction == tuple(map(ord, "as ever"))
        usage = found.usage
        assert (usage.cached_tokens, usage.accepted_draft_tokens) == (3, 5)
        assert usage.rejected_draft_tokens == 2


def test_an_engine_without_hidden_caches_says_so() -> None:
    said = message_conversion.server_info_message(
        dataclasses.replace(INFO, hidden_read=None, rho=None), {}
    )
    assert said.hidden_read == "" and not said.HasField("rho")


def test_server_info_is_the_engines(client: Client) -> None:
    info = client.info()
    assert info.version == __version__
    assert (info.pooling, info.normalize) == (pb.POOLING_TYPE_LAST, True)
    for name in {field.name for field in dataclasses.fields(EngineInfo)} - {"pooling"}:
        assert getattr(info, name) == getattr(INFO, name)


def test_the_wire_has_every_sampling_parameter_and_no_other() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    ours -= {"shown_token_ids", "thinking"}  # which only the server itself sets
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == ours


_fraction = st.floats(0.0, 1.0)
_penalty = st.floats(-100.0, 100.0)
_token = st.integers(0, 2**31 - 1)
_sampling = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(10, 1000),
        "min_tokens": st.integers(0, 10),
        "temperature": st.floats(0.0, 100.0),
        "top_k": st.integers(0, 1000),
        "top_p": _fraction,
        "min_p": st.floats(0.0, 1.0),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "repetition_penalty": st.floats(0.01, 100.0),
        "presence_penalty": _penalty,
        "frequency_penalty": _penalty,
        "logit_bias": st.dictionaries(_token, _penalty, max_size=5),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "stop_token_ids": st.lists(_token, max_size=5),
        "stop": st.lists(st.text(min_size=1), max_size=5),
        "ignore_eos": st.booleans(),
        "deterministic": st.booleans(),
        "n": st.integers(1, 16),
    },
)


@settings(deadline=None)
@given(_sampling)
def test_sampling_parameters_survive_the_wire(options: dict) -> None:
    wire = make_request("hi", **options).SerializeToString()
    received = SamplingParams(
        **message_conversion.sampling_from_message(pb.GenerateRequest.FromString(wire).sampling)
    )
    expected = dict(options)
    if "logit_bias" in expected:
        expected["logit_bias"] = tuple(sorted(expected["logit_bias"].items()))
    for name in ("stop", "stop_token_ids"):
        if name in expected:
            expected[name] = tuple(expected[name])
    assert received == SamplingParams(**expected)
