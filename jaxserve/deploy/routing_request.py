"""What a router needs to know of a call before it is sent to a replica: how much it has to compute,
and its targets."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxserve.config import Config
from jaxserve.deploy.replicas import NOTHING
from jaxserve.engine.errors import QueueFull
from jaxserve.engine.text.detokenizer import FILE_NAME, load_tokenizer
from jaxserve.sched.request import MAX_N, SLO, InvalidRequest, Tier
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.server.grpc import message_conversion
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.body_limits import parse_body
from jaxserve.server.http.openai.chat import render_chat
from jaxserve.server.http.openai.completions import prompts_of
from jaxserve.server.http.openai.schema import ChatRequest, CompletionRequest, Generation
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.slo_classes import find_slo_class, slo_classes
from jaxserve.server.requests.templates.chat_template import load_chat_template

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_KINDS: Mapping[str, type[Generation]] = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
_INLINE_CHARS = 2000  # encoding takes about a microsecond a character
_MANY_TOKENS = 1 << 30  # of a text that is too long to be served, and will be refused


class RoutingRequestBuilder:
    """Makes them of calls, by the tokenizer, the chat template and the SLO classes of a config. For
    a call that a replica will refuse it makes NOTHING: the replica says what is wrong."""

    def __init__(self, config: Config) -> None:
        path = Path(config.model.path).expanduser()
        there = bool(config.model.path) and (path / FILE_NAME).is_file()
        self._tokenizer = load_tokenizer(path if there else None)
        self._template = load_chat_template(config.model.path)
        self._classes = slo_classes(config.server.slo_classes)

    async def from_http(self, path: str, body: bytes) -> RoutingRequest:
        """For a body that was sent to a path of the HTTP frontend."""
        kind = _KINDS.get(path)
        if kind is None:
            return NOTHING
        slow = len(body) > _INLINE_CHARS or (kind is ChatRequest and self._template.own)
        return await _made(functools.partial(self._from_body, kind, body), slow=slow)

    async def from_grpc(self, message: pb.GenerateRequest) -> RoutingRequest:
        """For a message of Generate."""
        slow = len(message.text) > _INLINE_CHARS
        return await _made(functools.partial(self._from_message, message), slow=slow)

    def _from_body(self, kind: type[Generation], body: bytes) -> RoutingRequest:
        call = parse_body(body, kind)
        slo, slo_class = request_options.requested_targets(call)
        n = 1 if call.n is None else call.n
        return self._request(
            self._lengths(call), n, slo, request_options.requested_tier(call), slo_class
        )

    def _from_message(self, message: pb.GenerateRequest) -> RoutingRequest:
        length = self._length(message.text) if message.text else len(message.token_ids.ids)
        n = message.sampling.n if message.sampling.HasField("n") else 1
        tier = message_conversion.TIERS.get(message.tier)
        return self._request(
            [length], n, message_conversion.slo_from_message(message.slo), tier, message.slo_class
        )

    def _request(
        self, lengths: Sequence[int], n: int, slo: SLO, tier: Tier | None, slo_class: str
    ) -> RoutingRequest:
        """lengths: tokens of each prompt. n: continuations of each."""
        if not 1 <= n <= MAX_N:
            return NOTHING
        level = find_slo_class(self._classes, slo_class).with_own(slo, tier)
        asked = ((name, getattr(level.slo, name)) for name in TARGETS)
        targets: dict[str, float] = {name: np.inf if t is None else t for name, t in asked}
        mean = math.ceil(sum(lengths) / len(lengths))
        return RoutingRequest(max(mean, 1), int(level.tier), **targets, sequences=n * len(lengths))

    def _lengths(self, call: Generation) -> list[int]:
        if isinstance(call, ChatRequest):
            text = render_chat(self._template, call).result()
            return [self._template.encode(text, self._length)]
        assert isinstance(call, CompletionRequest)
        return [
            self._length(prompt) if isinstance(prompt, str) else len(prompt)
            for prompt in prompts_of(call)
        ]

    def _length(self, text: str, *, special: bool = True) -> int:
        """Its tokens; one a character where nobody knows."""
        try:
            return len(self._tokenizer.encode(text, _MANY_TOKENS, special=special))
        except InvalidRequest:
            return len(text)


async def _made(make: Callable[[], RoutingRequest], *, slow: bool) -> RoutingRequest:
    """slow: beside the event loop."""
    try:
        return await asyncio.to_thread(make) if slow else make()
    except (ApiError, InvalidRequest, QueueFull):
        return NOTHING
