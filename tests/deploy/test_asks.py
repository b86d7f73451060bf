"""What a router is told of a call: its prompt's tokens and its targets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.deploy.asks import CHAT, COMPLETIONS, Asks
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.replicas import NOTHING
from jaxserve.engine.detokenize import load_tokenizer
from jaxserve.engine.model_options import tokenizer_path
from jaxserve.sched.routing.fleet import Ask
from jaxserve.server.proto import generation_pb2 as pb

CONFIG = replica_config(["--config.server.slo_classes.mine=ttft=2s:tier=best_effort"])
TEXT = "Once upon a time there was a cat"
TOKENS = len(load_tokenizer(CONFIG.model.path).encode(TEXT))


@pytest.fixture(scope="module")
def asks() -> Asks:
    return Asks(CONFIG)


def http(asks: Asks, path: str, **body: Any) -> Ask:
    return asyncio.run(asks.of_http(path, json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (TEXT, TOKENS),
        ([TEXT, TEXT], 2 * TOKENS),
        ([1, 2, 3], 3),
        ([[1, 2, 3], [4, 5]], 5),
        (" cat" * 5000, 5000),  # beside the event loop
    ],
)
def test_prompts_of_completions_in_tokens(asks: Asks, prompt: Any, tokens: int) -> None:
    found = http(asks, COMPLETIONS, prompt=prompt)
    assert abs(found.prompt_len - tokens) <= 1  # a special token in front, or not
    assert (found.tier, found.ttft, found.tbt, found.jct) == (0, np.inf, np.inf, np.inf)


def test_a_model_in_the_home_folder_has_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(CONFIG.model.path)
    monkeypatch.setenv("HOME", str(model.parent))
    config = replica_config([f"--model=~/{model.name}"])
    assert abs(http(Asks(config), COMPLETIONS, prompt=TEXT).prompt_len - TOKENS) <= 1
    assert tokenizer_path(config) == str(model)


def test_chats_are_counted_as_their_template_writes_them(asks: Asks) -> None:
    found = http(asks, CHAT, messages=[{"role": "user", "content": TEXT}])
    assert TOKENS < found.prompt_len < TOKENS + 20


def test_targets_and_tiers_are_the_requests_own_or_its_class(asks: Asks) -> None:
    own = http(asks, COMPLETIONS, prompt=TEXT, slo={"ttft_ms": 500, "tbt_ms": 50})
    assert (own.ttft, own.tbt, own.jct, own.tier) == (0.5, 0.05, np.inf, 0)
    named = http(asks, COMPLETIONS, prompt=TEXT, slo_class="mine")
    assert (named.ttft, named.tier) == (2.0, 1)
    message = pb.GenerateRequest(text=TEXT, slo=pb.Slo(ttft_ms=500), slo_class="mine")
    said = asyncio.run(asks.of_grpc(message))
    assert (said.prompt_len, said.ttft, said.tier) == (own.prompt_len, 0.5, 1)
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), tier=pb.TIER_BEST_EFFORT)
    assert asyncio.run(asks.of_grpc(ids)) == Ask(3, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models", b""),
        (COMPLETIONS, b"{"),
        (COMPLETIONS, b'{"prompt": 3}'),
        (COMPLETIONS, b'{"prompt": "a", "slo_class": "nobodys"}'),
        (COMPLETIONS, b'{"prompt": "a", "slo": {"ttft_ms": -1}}'),
        (COMPLETIONS, b'{"prompt": "\\ud800"}'),
        (COMPLETIONS, b'{"prompt": "a", "top_k": 1' + b"0" * 400 + b"}"),
        (CHAT, b'{"messages": [' + b"1," * 2_000_000 + b"1]}"),
    ],
)
def test_of_what_will_be_refused_nothing_is_said(asks: Asks, path: str, body: bytes) -> None:
    assert asyncio.run(asks.of_http(path, body)) == NOTHING
