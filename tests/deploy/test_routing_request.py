"""What a router is told of a call: its prompt's tokens and its targets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.client.messages import make_embed_request, make_request
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.replicas import NOTHING
from jaxserve.deploy.routing_request import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    RoutingRequestBuilder,
)
from jaxserve.engine.block_keys import BlockKeys
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.sched.cache.prefix_sketch import marks_of
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.server.access.key_file import ApiKey, digest_of
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.templates.chat_template import load_chat_template

CONFIG = replica_config(["--config.server.slo_classes.mine=ttft=2s:tier=best_effort:program=7s"])
TEXT = "Once upon a time there was a cat"
TOKENS = len(load_tokenizer(CONFIG.model.path).encode(TEXT))


@pytest.fixture(scope="module")
def builder() -> RoutingRequestBuilder:
    return RoutingRequestBuilder(CONFIG)


def http(builder: RoutingRequestBuilder, path: str, **body: Any) -> RoutingRequest:
    return asyncio.run(builder.from_http(path, json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("prompt", "tokens", "count"),
    [
        (TEXT, TOKENS, 1),
        ([TEXT] * 8, TOKENS, 8),
        ([1, 2, 3], 3, 1),
        ([[1, 2, 3], [4, 5]], 3, 2),  # the mean, rounded up
        (" cat" * 5000, 5000, 1),  # beside the event loop
    ],
)
def test_prompts_of_completions_in_tokens(
    builder: RoutingRequestBuilder, prompt: Any, tokens: int, count: int
) -> None:
    found = http(builder, COMPLETIONS, prompt=prompt)
    assert abs(found.prompt_len - tokens) <= 1  # a special token in front, or not
    assert found.sequences == count
    assert (found.tier, found.ttft, found.tbt, found.jct) == (0, np.inf, np.inf, np.inf)


def test_prompts_of_embeddings_in_tokens(builder: RoutingRequestBuilder) -> None:
    for count in (1, 300):
        found = http(builder, EMBEDDINGS, input=[TEXT] * count, slo={"ttft_ms": 50})
        assert abs(found.prompt_len - TOKENS) <= 1
        assert (found.sequences, found.ttft) == (count, 0.05)
        message = make_embed_request([TEXT] * count, slo={"ttft_ms": 50})
        assert asyncio.run(builder.from_grpc(message)) == found
    assert http(builder, EMBEDDINGS, input=[TEXT] * 3000) is NOTHING
    for inputs in ([TEXT] * 3000, []):
        assert asyncio.run(builder.from_grpc(make_embed_request(inputs))) is NOTHING


def test_a_model_in_the_home_folder_has_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(CONFIG.model.path)
    monkeypatch.setenv("HOME", str(model.parent))
    config = replica_config([f"--model=~/{model.name}"])
    assert (
        abs(http(RoutingRequestBuilder(config), COMPLETIONS, prompt=TEXT).prompt_len - TOKENS) <= 1
    )


def test_each_continuation_of_each_prompt_counts(builder: RoutingRequestBuilder) -> None:
    assert http(builder, COMPLETIONS, prompt=[[1, 2], [3, 4]], n=16).sequences == 32
    messages = [{"role": "user", "content": TEXT}]
    assert http(builder, CHAT, messages=messages, n=3).sequences == 3
    message = pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(n=4))
    assert asyncio.run(builder.from_grpc(message)).sequences == 4


def test_a_prompt_counts_once_where_its_continuations_find_it(
    monkeypatch: pytest.MonkeyPatch, builder: RoutingRequestBuilder
) -> None:
    made = finding(monkeypatch)
    asked = {"prompt": [[1, 2], [3, 4]], "n": 16}
    assert http(made, COMPLETIONS, **asked)[5:7] == (32, 2)
    assert http(builder, COMPLETIONS, **asked)[5:7] == (32, 32), "no replica caches prompts"
    told = http(made, COMPLETIONS, **asked, echo=True, logprobs=1)
    assert told[5:7] == (32, 32), "whose tokens are told are computed"
    for more, many in (({}, 1), ({"prompt_logprobs": 1}, 4)):
        message = pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(n=4, **more))
        assert asyncio.run(made.from_grpc(message))[5:7] == (4, many)


@pytest.mark.parametrize("own", [True, False])
def test_chats_are_encoded_as_the_server_encodes_them(tmp_path: Path, own: bool) -> None:
    """A checkpoint's template writes the special tokens itself, and no others are added."""
    model = Path(CONFIG.model.path)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(model / name)
    if own:
        source = "{{ bos_token }}{% for each in messages %}{{ each.content }}{% endfor %}"
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": source}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    template, tokenizer = load_chat_template(str(tmp_path)), load_tokenizer(tmp_path)
    text = template.render([{"role": "user", "content": TEXT}])
    builder = RoutingRequestBuilder(replica_config([f"--model={tmp_path}"]))
    found = http(builder, CHAT, messages=[{"role": "user", "content": TEXT}])
    assert found.prompt_len == len(tokenizer.encode(text, special=not own))


def test_targets_and_tiers_are_the_requests_own_or_its_class(
    builder: RoutingRequestBuilder,
) -> None:
    own = http(builder, COMPLETIONS, prompt=TEXT, slo={"ttft_ms": 500, "tbt_ms": 50})
    assert (own.ttft, own.tbt, own.jct, own.tier) == (0.5, 0.05, np.inf, 0)
    named = http(builder, COMPLETIONS, prompt=TEXT, slo_class="mine")
    assert (named.ttft, named.tier) == (2.0, 1)
    message = pb.GenerateRequest(text=TEXT, slo=pb.Slo(ttft_ms=500), slo_class="mine")
    said = asyncio.run(builder.from_grpc(message))
    assert (said.prompt_len, said.ttft, said.tier) == (own.prompt_len, 0.5, 1)
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), tier=pb.TIER_BEST_EFFORT)
    assert asyncio.run(builder.from_grpc(ids)) == RoutingRequest(3, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b""),
        (COMPLETIONS, b"{"),
        (COMPLETIONS, b'{"prompt": 3}'),
        (COMPLETIONS, b'{"prompt": "a", "slo_class": "nobodys"}'),
        (COMPLETIONS, b'{"prompt": "a", "n": 17}'),
        (COMPLETIONS, b'{"prompt": []}'),
        (COMPLETIONS, b'{"prompt": "a", "slo": {"ttft_ms": -1}}'),
        (COMPLETIONS, b'{"prompt": "\\ud800"}'),
        (COMPLETIONS, b'{"prompt": "a", "top_k": 1' + b"0" * 400 + b"}"),
        (CHAT, b'{"messages": [' + b"1," * 2_000_000 + b"1]}"),
    ],
)
def test_of_what_will_be_refused_nothing_is_said(
    builder: RoutingRequestBuilder, path: str, body: bytes
) -> None:
    assert asyncio.run(builder.from_http(path, body)) == NOTHING


SECRET, KEYS = b"s" * 32, "JAXSERVE_API_KEYS"
LONG = [7, *range(10, 90)]


def finding(monkeypatch: pytest.MonkeyPatch, keys: str = "", **cache: Any) -> RoutingRequestBuilder:
    """A builder that knows the replicas' secret, where these have prefix caches."""
    if keys:
        monkeypatch.setenv(KEYS, keys)
    flags = [f"--config.cache.{name}={value}" for name, value in cache.items()]
    made = RoutingRequestBuilder(replica_config(flags), SECRET)
    made.find_prefixes(16)
    return made


def asked(
    builder: RoutingRequestBuilder, authorization: bytes | None = None, **body: Any
) -> RoutingRequest:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    return asyncio.run(builder.from_http(COMPLETIONS, json.dumps(body).encode(), headers))


def test_marks_are_the_replicas_own_keys(
    monkeypatch: pytest.MonkeyPatch, builder: RoutingRequestBuilder
) -> None:
    made = finding(monkeypatch)
    keys = BlockKeys(16, secret=SECRET).of(LONG, "", "s").keys
    found = asked(made, prompt=LONG, cache_salt="s")
    assert found.marks == marks_of(keys, 5) and len(found.marks) == 5 * 16
    assert asked(made, prompt=LONG[:80], cache_salt="s").marks == found.marks[: 4 * 16], "the last"
    text = "Once upon a time " * 20
    (tokens,) = [load_tokenizer(CONFIG.model.path).encode(text)]
    by_text = asked(made, prompt=text)
    assert by_text.marks == marks_of(
        BlockKeys(16, secret=SECRET).of(tokens).keys, len(tokens) // 16
    )
    message = pb.GenerateRequest(text=text)
    assert asyncio.run(made.from_grpc(message)).marks == by_text.marks
    assert builder._block_keys is None and asked(builder, prompt=LONG).marks == b""


def test_prompts_of_a_call_are_known_by_what_they_have_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = finding(monkeypatch)
    one = asked(made, prompt=LONG).marks
    assert asked(made, prompt=[LONG, LONG[:40] + [1] * 60]).marks == one[: 2 * 16]
    assert asked(made, prompt=[LONG, [1] * 60]).marks == b""


def test_what_is_computed_anyway_is_found_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    made = finding(monkeypatch)
    assert asked(made, prompt=LONG, echo=True, logprobs=1).marks == b""
    assert asked(made, prompt=LONG, echo=True).marks and asked(made, prompt=LONG, logprobs=1).marks
    told = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=LONG), sampling=pb.SamplingParams(prompt_logprobs=1)
    )
    assert asyncio.run(made.from_grpc(told)).marks == b""


def test_nobody_has_the_marks_or_hints_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another key, of another salt, or of a text that is made to look like another's."""
    secrets = {name: f"{name * 3}-long-enough-{name}".encode() for name in "ab"}
    lines = "\n".join(f"{name}-is sha256:{digest_of(secret)}" for name, secret in secrets.items())
    made = finding(monkeypatch, lines)
    seen = set()
    for secret in secrets.values():
        for salt in ("", "x", "b-is"):
            for key in ("", "x", "\x00", "b-is", "x" * 256):
                body = {"prompt": LONG, "cache_salt": salt, "prompt_cache_key": key}
                found = asked(made, b"Bearer " + secret, **body)
                message = make_request(**{"prompt": LONG, **body})
                metadata = [("authorization", f"Bearer {secret.decode()}")]
                by_grpc = asyncio.run(made.from_grpc(message, metadata))
                assert (by_grpc.marks, by_grpc.hint) == (found.marks, found.hint)
                assert len(found.hint) == (16 if key else 0)
                seen |= {found.marks[:16], found.hint}
    assert len(seen) == 1 + 2 * 3 * (1 + 4), "each its own, and one for no hint"
    assert asked(made, b"Bearer nobody", prompt=LONG) == NOTHING
    assert asked(made, None, prompt=LONG) == NOTHING


def test_calls_of_a_program_have_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their cache keys and salts, at either door, and no other calls."""
    made = finding(monkeypatch)
    first = asked(made, prompt=LONG, program="a", prompt_cache_key="x")
    other = asked(made, prompt="short", program="a", program_over=True, cache_salt="s")
    message = make_request(LONG, program={"id": "a"}, prompt_cache_key="y")
    by_grpc = asyncio.run(made.from_grpc(message))
    assert first.of_program and first.hint == other.hint == by_grpc.hint and by_grpc.of_program
    keyed = asked(made, prompt=LONG, prompt_cache_key="a")
    assert not keyed.of_program and keyed.hint != first.hint
    assert asked(made, prompt=LONG, program="b").hint not in (first.hint, keyed.hint)
    metadata = [("x-program-id", "a")]
    by_header = asyncio.run(made.from_grpc(make_request(LONG), metadata))
    assert by_header.of_program and by_header.hint == first.hint
    assert asked(made, prompt=LONG, program="x" * 129) == NOTHING
    assert asked(made, prompt=LONG, program_over=True) == NOTHING


def test_what_headers_and_keys_say_of_targets_counts(
    monkeypatch: pytest.MonkeyPatch, builder: RoutingRequestBuilder
) -> None:
    said = [(b"x-slo-ttft-ms", b"500"), (b"x-llm-d-slo-tpot-ms", b"50")]
    body = json.dumps({"prompt": [1, 2], "slo": {"tbt_ms": 70}}).encode()
    found = asyncio.run(builder.from_http(COMPLETIONS, body, said))
    assert (found.ttft, found.tbt, found.tier) == (0.5, 0.07, 0)
    message = make_request([1, 2], slo={"tbt_ms": 70})
    assert asyncio.run(builder.from_grpc(message, [("x-slo-ttft-ms", "500")])) == found
    assert http(builder, COMPLETIONS, prompt=[1, 2], priority=1).tier == 1
    bad = [(b"x-slo-ttft-ms", b"nan")]
    assert asyncio.run(builder.from_http(COMPLETIONS, body, bad)) == NOTHING
    hers = ApiKey("alice", digest_of(b"alice"), slo_class="offline", min_ttft_ms=400)
    monkeypatch.setenv(KEYS, hers.line())
    keyed = RoutingRequestBuilder(replica_config([]))
    asking = (b"authorization", b"Bearer alice")
    found = asyncio.run(keyed.from_http(COMPLETIONS, b'{"prompt": [1, 2]}', [asking]))
    assert (found.tier, found.jct) == (1, 600.0), "the class of the key"
    tight = [asking, (b"x-slo-ttft-ms", b"399")]
    assert asyncio.run(keyed.from_http(COMPLETIONS, body, tight)) == NOTHING


def test_deadlines_of_programs_are_told(builder: RoutingRequestBuilder) -> None:
    """By body, message, header or class, at every door."""
    said = {"program": "a", "program_deadline_ms": 9000, "expected_calls": 3}
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    for path, body in ((COMPLETIONS, {"prompt": TEXT}), (CHAT, chat), (RESPONSES, {"input": TEXT})):
        found = http(builder, path, **body, **said)
        assert (found.program_deadline, found.calls_left) == (9.0, 3)
        assert http(builder, path, **body).program_deadline == np.inf
        assert http(builder, path, **body, program="a", slo_class="mine").program_deadline == 7.0
        assert http(builder, path, **body, **said, slo_class="mine").program_deadline == 9.0
    program = {"id": "a", "deadline_ms": 9000, "expected_calls": 3}
    by_grpc = asyncio.run(builder.from_grpc(make_request(TEXT, program=program)))
    assert (by_grpc.program_deadline, by_grpc.calls_left) == (9.0, 3)
    metadata = [("x-program-id", "a"), ("x-program-deadline-ms", "500")]
    assert asyncio.run(builder.from_grpc(make_request(TEXT), metadata)).program_deadline == 0.5


def test_responses_are_counted_like_the_chats_that_they_are(
    builder: RoutingRequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "yes"}]
    turns: dict[str, Any] = {"input": [*items, {"role": "user", "content": "go on"}]}
    chat = {"messages": [{"role": "system", "content": "be kind"}, *turns["input"]]}
    found = http(builder, RESPONSES, **turns, instructions="be kind", slo={"ttft_ms": 50})
    assert found == http(builder, CHAT, **chat, slo={"ttft_ms": 50})
    assert http(builder, RESPONSES, input=TEXT, previous_response_id="resp_1").prompt_len > 1
    assert http(builder, RESPONSES, input=[{"type": "unknown"}]) is NOTHING
    made = finding(monkeypatch)
    known = http(made, RESPONSES, input=TEXT, program="a")
    assert known.of_program and known.hint == asked(made, prompt=LONG, program="a").hint


def test_messages_are_counted_like_the_chats_that_they_are(
    builder: RoutingRequestBuilder,
) -> None:
    turns = [{"role": "user", "content": TEXT}]
    found = http(builder, CHAT, messages=[{"role": "system", "content": "be kind"}, *turns])
    assert http(builder, MESSAGES, messages=turns, system="be kind", max_tokens=5) == found
    system = {"role": "system", "content": "be kind"}
    assert http(builder, OLLAMA, messages=[system, *turns], slo={"ttft_ms": 50}) == http(
        builder, CHAT, messages=[system, *turns], slo={"ttft_ms": 50}
    )
    assert http(builder, MESSAGES, messages=turns) is NOTHING, "without max_tokens"


@pytest.mark.parametrize("key", ["x" * 257, "x" * (8 << 20), "\ud800", ["k"]])
def test_of_a_hint_that_will_be_refused_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, key: Any
) -> None:
    made = finding(monkeypatch)
    assert asked(made, prompt=LONG, prompt_cache_key=key) == NOTHING
    if isinstance(key, str) and key.isascii():
        message = make_request(LONG, prompt_cache_key=key)
        assert asyncio.run(made.from_grpc(message)) == NOTHING


def test_keys_that_cannot_be_read_here_have_routers_look_at_no_prefixes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(KEYS, "not keys")
    made = RoutingRequestBuilder(CONFIG, SECRET)
    made.find_prefixes(16)
    assert asked(made, prompt=LONG).marks == b""
