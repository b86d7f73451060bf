"""What a router needs to know of a call before it is sent anywhere: how long its prompts are, and
what it was promised."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.deploy.replicas import NOTHING
from jaxserve.engine.detokenize import FILE_NAME, load_tokenizer
from jaxserve.engine.errors import QueueFull
from jaxserve.sched.request import SLO, InvalidRequest, Tier
from jaxserve.sched.routing.fleet import Ask
from jaxserve.server import convert
from jaxserve.server.http import options
from jaxserve.server.http.bodies import parse
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.schema import ChatRequest, CompletionRequest, Generation
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.chat_template import load_chat_template
from jaxserve.server.requests.slo_classes import named, slo_classes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_INLINE_CHARS = 2000  # encoding takes about a microsecond a character
_MANY_TOKENS = 1 << 30  # of a text that is too long to be served, and will be refused


class Asks:
    """By the tokenizer, the chat template and the SLO classes of a config."""

    def __init__(self, config: Any) -> None:
        path = Path(config.model.path).expanduser()
        there = bool(config.model.path) and (path / FILE_NAME).is_file()
        self._tokenizer = load_tokenizer(path if there else None)
        self._template = load_chat_template(config.model.path)
        self._classes = slo_classes(config)

    async def of_http(self, path: str, body: bytes) -> Ask:
        """Of a body sent to a path of the HTTP door."""
        kind: type[Generation] | None = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}.get(
            path
        )  # type: ignore[assignment]
        if kind is None:
            return NOTHING
        if len(body) > _INLINE_CHARS or (kind is ChatRequest and self._template.own):
            return await asyncio.to_thread(self._of_body, kind, body)
        return self._of_body(kind, body)

    async def of_grpc(self, message: pb.GenerateRequest) -> Ask:
        """Of a message of Generate."""
        if len(message.text) > _INLINE_CHARS:
            return await asyncio.to_thread(self._of_message, message)
        return self._of_message(message)

    def _of_body(self, kind: type[Generation], body: bytes) -> Ask:
        try:
            call = parse(body, kind)
            slo, slo_class = options.targets(call)
            return self._ask(self._tokens(call), slo, options.tier(call), slo_class)
        except (ApiError, InvalidRequest, QueueFull):  # the replica will say what is wrong
            return NOTHING

    def _of_message(self, message: pb.GenerateRequest) -> Ask:
        try:
            tokens = self._length(message.text) if message.text else len(message.token_ids.ids)
            tier = convert.TIERS.get(message.tier)
            return self._ask(tokens, convert.slo(message.slo), tier, message.slo_class)
        except InvalidRequest:
            return NOTHING

    def _ask(self, tokens: int, slo: SLO, tier: Tier | None, slo_class: str) -> Ask:
        level = named(self._classes, slo_class).with_own(slo, tier)
        of = {name: getattr(level.slo, name) for name in ("ttft", "tbt", "jct")}
        targets: Mapping[str, float] = {
            name: np.inf if target is None else target for name, target in of.items()
        }
        return Ask(max(tokens, 1), int(level.tier), **targets)

    def _tokens(self, call: Generation) -> int:
        if isinstance(call, ChatRequest):
            messages = [message.plain() for message in call.messages]
            generation = call.add_generation_prompt
            text = self._template.render(
                messages, add_generation_prompt=generation, kwargs=call.chat_template_kwargs
            )
            return self._length(text)
        assert isinstance(call, CompletionRequest)
        given = call.prompt
        if isinstance(given, str):
            return self._length(given)
        return sum(
            1 if isinstance(one, int) else self._length(one) if isinstance(one, str) else len(one)
            for one in given
        )

    def _length(self, text: str) -> int:
        """Its tokens; one a character where nobody knows."""
        try:
            return len(self._tokenizer.encode(text, _MANY_TOKENS))
        except InvalidRequest:
            return len(text)
