"""What a router is told of a call: its prompt's tokens and its targets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.replicas import NOTHING
from jaxserve.deploy.routing_request import CHAT, COMPLETIONS, RoutingRequestBuilder
from jaxserve.engine.startup.model_options import tokenizer_path
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.templates.chat_template import load_chat_template

CONFIG = replica_config(["--config.server.slo_classes.mine=ttft=2s:tier=best_effort"])
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
        ([TEXT, TEXT], TOKENS, 2),
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


def test_a_model_in_the_home_folder_has_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(CONFIG.model.path)
    monkeypatch.setenv("HOME", str(model.parent))
    config = replica_config([f"--model=~/{model.name}"])
    assert (
        abs(http(RoutingRequestBuilder(config), COMPLETIONS, prompt=TEXT).prompt_len - TOKENS) <= 1
    )
    assert tokenizer_path(config.model) == str(model)


def test_chats_are_counted_as_their_template_writes_them(builder: RoutingRequestBuilder) -> None:
    found = http(builder, CHAT, messages=[{"role": "user", "content": TEXT}])
    assert TOKENS < found.prompt_len < TOKENS + 20


def test_each_continuation_of_each_prompt_counts(builder: RoutingRequestBuilder) -> None:
    assert http(builder, COMPLETIONS, prompt=[[1, 2], [3, 4]], n=16).sequences == 32
    messages = [{"role": "user", "content": TEXT}]
    assert http(builder, CHAT, messages=messages, n=3).sequences == 3
    message = pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(n=4))
    assert asyncio.run(builder.from_grpc(message)).sequences == 4


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
        (COMPLETIONS, b'{"prompt": "a", "n": 0}'),
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
