"""What a router needs to know of a call before it is sent to a replica: its amount of work and its
targets."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.config import Config, ConfigError
from jaxserve.deploy.replicas import NOTHING
from jaxserve.engine.block_keys import BlockKeys
from jaxserve.engine.errors import QueueFull
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.sched.cache.prefix_sketch import KEY_BYTES, marks_of
from jaxserve.sched.request import MAX_N, InvalidRequest, Program
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.server.access.api_keys import Caller, Keys, Unauthenticated, authorization
from jaxserve.server.access.options import access_settings
from jaxserve.server.grpc import message_conversion
from jaxserve.server.grpc.pooling_conversion import inputs_of
from jaxserve.server.http.anthropic.chat_request import as_chat as messages_as_chat
from jaxserve.server.http.anthropic.schema import MessagesRequest
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.ollama.chat_request import chat_of
from jaxserve.server.http.ollama.schema import OllamaChatRequest
from jaxserve.server.http.openai import request_options
from jaxserve.server.http.openai.body_limits import parse_body
from jaxserve.server.http.openai.chat import render_chat
from jaxserve.server.http.openai.completions import prompts_in, prompts_of
from jaxserve.server.http.openai.pooling.pooling_schema import EmbeddingRequest
from jaxserve.server.http.openai.responses.chat_request import as_chat
from jaxserve.server.http.openai.responses.input_items import kept_items, messages_of
from jaxserve.server.http.openai.responses.schema import ResponseRequest
from jaxserve.server.http.openai.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Targeted,
)
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.pooling.pooled_call import MAX_INPUTS
from jaxserve.server.requests.slo_classes import ServiceLevel, requested_level, slo_classes
from jaxserve.server.requests.target_headers import header_program, target_headers
from jaxserve.server.requests.templates.chat_template import load_chat_template

log = logging.getLogger(__name__)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
EMBEDDINGS, POOLING = "/v1/embeddings", "/pooling"
_KINDS: Mapping[str, type[Targeted]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    RESPONSES: ResponseRequest,
    MESSAGES: MessagesRequest,
    OLLAMA: OllamaChatRequest,
    EMBEDDINGS: EmbeddingRequest,
    POOLING: EmbeddingRequest,
}
_INLINE_CHARS = 2000  # encoding takes about a microsecond a character
_PROGRAM = "\0"  # before a program's id, which cannot have it, to tell it from other hints
_MANY_TOKENS = 1 << 30  # for a text that is too long and will be refused


_Message = pb.GenerateRequest | pb.EmbedRequest
_Prompt = tuple[int, Sequence[int]]  # number of tokens, and their ids; empty if unknown


class RoutingRequestBuilder:
    """Makes routing requests of calls, with the tokenizer, the chat template and the SLO classes of
    a config. A call that a replica will refuse becomes NOTHING: the replica says what is wrong.

    Args:
        config: Configuration of the replicas.
        secret: Secret of their keys of prompts; None if routers do not use these.
    """

    def __init__(self, config: Config, secret: bytes | None = None) -> None:
        self._tokenizer = load_tokenizer(config.model.path, needed=False)
        self._template = load_chat_template(config.model.path, config.server)
        self._classes = slo_classes(config.server.slo_classes)
        self._secret, self._shared = secret, config.cache.share_between_keys
        self._callers = _callers(config)
        self._block_keys: BlockKeys | None = None
        self._block_size = 0

    def find_prefixes(self, block_size: int) -> None:
        """Sets the block size of the replicas' prefix caches, in tokens; 0 for none."""
        self._block_size = block_size
        if self._secret is not None and self._callers is not None and block_size:
            self._block_keys = BlockKeys(block_size, shared=self._shared, secret=self._secret)

    async def from_http(
        self, path: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> RoutingRequest:
        """The routing request of a body that was sent to a path of the HTTP frontend."""
        kind = _KINDS.get(path)
        if kind is None:
            return NOTHING
        rendered = kind in (ChatRequest, ResponseRequest, MessagesRequest, OllamaChatRequest)
        slow = len(body) > _INLINE_CHARS or (rendered and self._template.own)
        return await _made(functools.partial(self._from_body, kind, body, headers), slow=slow)

    async def from_grpc(
        self, message: _Message, metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> RoutingRequest:
        """The routing request of a message of Generate or Embed."""
        slow = message.ByteSize() > _INLINE_CHARS
        return await _made(functools.partial(self._from_message, message, metadata), slow=slow)

    def _from_body(
        self, kind: type[Targeted], body: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> RoutingRequest:
        call = parse_body(body, kind)
        slo, slo_class = request_options.requested_targets(call)
        n = 1
        if isinstance(call, Generation) and call.n is not None:
            n = call.n
        prompts = self._prompts(call)
        told = isinstance(call, CompletionRequest) and bool(call.echo) and call.logprobs is not None
        tier = request_options.requested_tier(call)
        caller = self._caller(headers)
        level = requested_level(self._classes, slo, tier, slo_class, caller)
        made = self._request(prompts, n, level, told=told)
        program = _program_of(request_options.requested_program(call), caller)
        made = _with_deadline(made, program, level)
        hint = call.prompt_cache_key or ""
        salt = call.cache_salt or ""
        return self._with_keys(made, [] if told else prompts, caller, salt, hint, program)

    def _from_message(
        self, message: _Message, metadata: Iterable[tuple[str, str | bytes]]
    ) -> RoutingRequest:
        n, told = 1, False
        if isinstance(message, pb.EmbedRequest):
            given = inputs_of(message)
        else:
            given = [message_conversion.prompt_from_message(message)]
            n = message.sampling.n if message.sampling.HasField("n") else 1
            told = message.sampling.HasField("prompt_logprobs")
        prompts = list(map(self._counted, given))
        tier = message_conversion.TIERS.get(message.tier)
        slo = message_conversion.slo_from_message(message.slo)
        caller = self._caller(metadata)
        level = requested_level(self._classes, slo, tier, message.slo_class, caller)
        made = self._request(prompts, n, level, told=told)
        salt, hint = message.cache_salt, message_conversion.cache_key_of(message)
        program = None
        if isinstance(message, pb.GenerateRequest):
            program = message_conversion.program_from_message(message)
        program = _program_of(program, caller)
        made = _with_deadline(made, program, level)
        return self._with_keys(made, [] if told else prompts, caller, salt, hint, program)

    def adapters_of(
        self, headers: Iterable[tuple[str | bytes, str | bytes]]
    ) -> Callable[[str], bool]:
        """Whether a call's key may use an adapter; false for all if this host does not know the
        key."""
        try:
            return (lambda _: False) if self._callers is None else self._caller(headers).may_use
        except Unauthenticated:
            return lambda _: False

    def _caller(self, headers: Iterable[tuple[str | bytes, str | bytes]]) -> Caller:
        """The call's tenant, with its service level. Raises Unauthenticated."""
        given = list(headers)
        found = Caller() if self._callers is None else self._callers.caller(authorization(given))
        found.target_headers = target_headers(given)
        return found

    def _with_keys(
        self,
        made: RoutingRequest,
        prompts: Sequence[_Prompt],
        caller: Caller,
        salt: str,
        hint: str,
        program: Program | None,
    ) -> RoutingRequest:
        """Adds the keys by which routers know the prompts, those that all prompts share, and the
        hint: the program's, if there is one, or else the given one.

        Args:
            made: The routing request.
            prompts: The prompts whose keys are wanted.
            caller: The client.
            salt: As `Request.cache_salt`.
            hint: The prompt's cache key.
            program: The call's program; None for none.
        """
        if self._block_keys is None or made is NOTHING:
            return made
        tenant = caller.name
        marks = [
            marks_of(
                self._block_keys.of(tokens, tenant, salt).keys, (length - 1) // self._block_size
            )
            for length, tokens in prompts
        ]
        if program is None:
            key = self._block_keys.hint(hint, tenant, salt)
        else:
            key = self._block_keys.hint(_PROGRAM + program.id, tenant)
        return made._replace(marks=_common(marks), hint=key, of_program=program is not None)

    def _request(
        self,
        prompts: Sequence[_Prompt],
        n: int,
        level: ServiceLevel,
        *,
        told: bool,
    ) -> RoutingRequest:
        """n: continuations of each prompt. told: whether the prompts' log-probabilities are
        returned, since each continuation then computes them."""
        if not 1 <= n <= MAX_N:
            return NOTHING
        asked = ((name, getattr(level.slo, name)) for name in TARGETS)
        targets: dict[str, Any] = {name: np.inf if t is None else t for name, t in asked}
        mean = math.ceil(sum(length for length, _ in prompts) / len(prompts))
        computed = 1 if self._block_size and not told else n
        targets |= {"sequences": n * len(prompts), "prompts": computed * len(prompts)}
        return RoutingRequest(max(mean, 1), int(level.tier), **targets)

    def _prompts(self, call: Targeted) -> list[_Prompt]:
        if isinstance(call, ResponseRequest):  # without the turns before, which a replica has
            call = as_chat(call, messages_of(kept_items(call.input)), strict=False)
        elif isinstance(call, MessagesRequest):
            call = messages_as_chat(call, self._template)
        elif isinstance(call, OllamaChatRequest):
            call = chat_of(call)
        if isinstance(call, ChatRequest):
            text = render_chat(self._template, call).result()
            return [self._template.encode(text, self._prompt)]
        if isinstance(call, EmbeddingRequest):
            given = prompts_in(call.input, "input", MAX_INPUTS)
        else:
            assert isinstance(call, CompletionRequest)
            given = prompts_of(call)
        return list(map(self._counted, given))

    def _counted(self, prompt: str | Sequence[int]) -> _Prompt:
        return self._prompt(prompt) if isinstance(prompt, str) else (len(prompt), prompt)

    def _prompt(self, text: str, *, special: bool = True) -> _Prompt:
        """The tokens of a text; one per character if there is no tokenizer."""
        try:
            tokens = self._tokenizer.encode(text, _MANY_TOKENS, special=special)
        except InvalidRequest:
            return len(text), ()
        return len(tokens), tokens


def _program_of(said: Program | None, caller: Caller) -> Program | None:
    """The program of a call: what its body or message says, or else its headers."""
    return header_program(caller.target_headers) if said is None else said


def _with_deadline(
    made: RoutingRequest, program: Program | None, level: ServiceLevel
) -> RoutingRequest:
    """Adds the program's deadline, or that of the call's class."""
    if program is None or made is NOTHING:
        return made
    deadline = program.deadline or level.program_deadline
    if deadline is None:
        return made
    return made._replace(program_deadline=deadline, calls_left=program.expected_calls or 0)


def _common(marks: Sequence[bytes]) -> bytes:
    """The keys that all of them begin with."""
    first, last = min(marks, default=b""), max(marks, default=b"")
    for start in range(0, len(first), KEY_BYTES):
        if first[start : start + KEY_BYTES] != last[start : start + KEY_BYTES]:
            return first[:start]
    return first


def _callers(config: Config) -> Keys | None:
    """The API keys. None if the file is not on this host: then neither the tenant nor the class of
    a call is known."""
    try:
        return access_settings(config.server).keys
    except ConfigError as error:
        log.warning("routers do not look at prefixes, nor at keys' classes: %s", error)
        return None


async def _made(make: Callable[[], RoutingRequest], *, slow: bool) -> RoutingRequest:
    """Makes a routing request. slow: on another thread than the event loop's."""
    try:
        return await asyncio.to_thread(make) if slow else make()
    except (ApiError, InvalidRequest, QueueFull, Unauthenticated):
        return NOTHING
