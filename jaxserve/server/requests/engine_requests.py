"""The requests of all doors on their way to the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxserve.engine.errors import EngineStopped
from jaxserve.engine.stats import EngineInfo
from jaxserve.sched.request import (
    SLO,
    InvalidRequest,
    Request,
    SamplingParams,
    Tier,
    too_many_tokens,
    validate,
)
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.engine_client import ServedEngine
from jaxserve.server.requests.logprob_arrays import size as logprobs_size
from jaxserve.server.requests.output_streams import BUFFER_BYTES, OutputRouter, Stream, StreamFailed
from jaxserve.server.requests.slo_admission import LateRefusal
from jaxserve.server.requests.slo_classes import ServiceLevel, named, permitted

T = TypeVar("T")
MAX_REQUEST_ID = 128  # characters
SHUTTING_DOWN = "the server is shutting down"
# Encoding takes about a microsecond a character. Longer texts leave the event loop to others, and
# so few of them are encoded at once that the engine's thread, too, has a core.
_ENCODE_INLINE_CHARS = 2000
_ENCODERS = max(1, min(4, (os.cpu_count() or 1) // 2))


class EngineRequests:
    """Makes requests, hands them to the engine, and knows whether it takes any. Create it on the
    event loop that serves; all but `build` and `check` run there. buffer_bytes: what may wait for
    the reader of a request's stream. slo_classes: that requests may name. refuse_late: as in
    configs/base.py.

    stalled: why the engine takes no requests for now, if so.
    """

    def __init__(
        self,
        engine: ServedEngine,
        buffer_bytes: float = BUFFER_BYTES,
        slo_classes: Mapping[str, ServiceLevel] | None = None,
        refuse_late: float = 0.0,
    ) -> None:
        self._engine = engine
        self._late = LateRefusal(engine, refuse_late)
        self._buffer_bytes = buffer_bytes
        self.slo_classes = slo_classes or {}
        self._router = OutputRouter(
            asyncio.get_running_loop(), buffer_bytes=buffer_bytes, cancel=engine.cancel
        )
        self._encoders = ThreadPoolExecutor(_ENCODERS, "jaxserve-encode")
        self._grammars = ThreadPoolExecutor(1, "jaxserve-grammar")  # which nobody's text waits for
        self._others = ThreadPoolExecutor(_ENCODERS, "jaxserve-beside")
        self.draining = False
        self.failure: str | None = None
        self.stalled: str | None = None

    @property
    def closed(self) -> str | None:
        """Why no requests are taken; None while they are."""
        return self.failure or (SHUTTING_DOWN if self.draining else self.stalled)

    @property
    def running(self) -> int:
        """Requests on which the engine has not said its last word."""
        return len(self._router.unfinished())

    def check_open(self) -> None:
        """Raises EngineStopped where no requests are taken."""
        if self.closed is not None:
            raise EngineStopped(self.closed)

    def info(self) -> EngineInfo:
        """What is served, the same from start to stop."""
        return self._engine.info()

    def stop_admission(self) -> None:
        """No new requests from now on."""
        self.draining = True

    def fail(self, error: str, kind: type[Exception] = StreamFailed) -> None:
        """Ends every open stream with kind(error); no new requests from now on."""
        self.failure = error
        self._router.fail_all(error, kind)

    def close(self) -> None:
        """Nothing is made any more, and of what was, nothing is heard."""
        self._router.fail_all(SHUTTING_DOWN)
        for pool in (self._encoders, self._grammars, self._others):
            pool.shutdown(wait=False, cancel_futures=True)

    def cancel_all(self) -> None:
        """Cancels every running request; its stream ends once the engine has said its last word."""
        for request_id in self._router.unfinished():
            self._engine.cancel(request_id)

    async def beside(self, work: Callable[..., T], *arguments: Any) -> T:
        """What the work returns, on one of few threads beside the event loop: for what takes
        milliseconds, bodies and answers."""
        return await asyncio.get_running_loop().run_in_executor(self._others, work, *arguments)

    async def make(self, prompt: str | Sequence[int], **options: Any) -> Request:
        """`build`, of long texts beside the event loop, after a look at its grammar there."""
        grammar = options["sampling"].get("grammar")
        if grammar is not None:
            check = functools.partial(self._engine.check_grammar, grammar)
            await asyncio.get_running_loop().run_in_executor(self._grammars, check)
        if isinstance(prompt, str) and len(prompt) > _ENCODE_INLINE_CHARS:
            build = functools.partial(self.build, prompt, **options)
            return await asyncio.get_running_loop().run_in_executor(self._encoders, build)
        return self.build(prompt, **options)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, a long one beside the event loop. Raises InvalidRequest."""
        if len(text) > _ENCODE_INLINE_CHARS:
            encode = functools.partial(self._engine.encode, text, special=special)
            return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)
        return self._engine.encode(text, special=special)

    def room(self, prompt_tokens: int) -> int:
        """Tokens that can follow such a prompt, but at least one."""
        info = self._engine.info()
        return max(1, min(info.max_model_len, info.pool_tokens) - prompt_tokens)

    def build(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any],
        request_id: str = "",
        slo: SLO | None = None,
        tier: Tier | None = None,
        slo_class: str = "",
        serve_late: bool = False,
        caller: Caller | None = None,
    ) -> Request:
        """A request of text or token ids. Safe to call from any thread.

        sampling: fields of SamplingParams, its defaults for the absent ones; who asks for no length
        gets the usual one, or what fits behind a long prompt. request_id: empty makes one up.
        slo_class: what it has of targets and tier where the request has none; empty is none.
        caller: whose it is; its id in the engine is `caller.scoped`, so that nobody learns what ids
        others have, and it gets no more than its key may ask for. Raises InvalidRequest.
        """
        level = named(self.slo_classes, slo_class).with_own(slo or SLO(), tier)
        said = tier is not None or bool(slo_class)
        level = permitted(level, said, None if caller is None else caller.key)
        if len(request_id) > MAX_REQUEST_ID:
            limits = f"at most {MAX_REQUEST_ID} are allowed"
            raise InvalidRequest("request_id", f"has {len(request_id)} characters; {limits}")
        if not request_id.isprintable():  # it is written to logs, and encoded
            raise InvalidRequest("request_id", "has characters that cannot be printed")
        params = SamplingParams(**sampling)
        info = self._engine.info()
        limit = min(info.max_model_len, info.pool_tokens)
        if not isinstance(prompt, str) and len(prompt) >= limit:  # before they are copied
            raise too_many_tokens(len(prompt), limit - 1)
        tokens = tuple(self._engine.encode(prompt) if isinstance(prompt, str) else prompt)
        self._check_prompt_logprobs(params, len(tokens))
        if "max_tokens" not in sampling:
            room = self.room(len(tokens))
            fits = max(params.min_tokens, min(params.max_tokens, room))
            params = dataclasses.replace(params, max_tokens=fits)
        name = request_id or uuid.uuid4().hex
        return Request(
            id=name if caller is None else caller.scoped(name),
            prompt=tokens,
            sampling=params,
            slo=level.slo,
            tier=level.tier,
            slo_class=level.slo_class,
            serve_late=serve_late,
            tenant="" if caller is None else caller.name,
            weight=None if caller is None or caller.key is None else caller.weight,
        )

    def _check_prompt_logprobs(self, params: SamplingParams, tokens: int) -> None:
        """They come faster than tokens do, and however fast somebody reads, he has to be given the
        time to: InvalidRequest for more than half of what may wait for him."""
        asked = params.prompt_logprobs
        if asked is None:
            return
        size = params.n * logprobs_size(tokens, tokens * (1 + asked))
        if size > self._buffer_bytes / 2:
            each = f"{asked} of each of {tokens} tokens take {size >> 10} KiB"
            most = f"{int(self._buffer_bytes) >> 11}, half of server.stream_buffer_kib"
            raise InvalidRequest("prompt_logprobs", f"{each}, n={params.n} times; at most {most}")

    def check(self, request: Request) -> None:
        """Whether the engine can serve it, by its size, token ids and grammar, before it is
        submitted. Safe to call from any thread. Raises InvalidRequest."""
        info = self._engine.info()
        validate(
            request,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            pool_tokens=info.pool_tokens,
        )
        if request.sampling.grammar is not None:
            self._engine.check_grammar(request.sampling.grammar)

    def open(
        self, request: Request, *, bounded: bool = True, record: CallRecord | None = None
    ) -> Stream:
        """Submits a request: the stream of what the engine says of it. `end` it, however it ends.
        bounded: what waits in it is; a reader of our own is never too slow. record: of the call.

        Raises EngineStopped where none are taken, ExpectedLate, DuplicateRequest, InvalidRequest,
        QueueFull.
        """
        # Without an await in between, a later failure or shutdown finds the stream open.
        self.check_open()
        self._late.check(request)
        stream = self._router.open(request.id, request.sampling.n, bounded=bounded, record=record)
        try:
            self._engine.submit(request, self._router.on_output)
        except BaseException:
            self._router.forget(request.id)
            raise
        if record is not None:  # what the engine says comes later, by way of the loop
            record.opened()
        return stream

    def cancel(self, stream: Stream) -> None:
        """Cancels the request; the stream ends once the engine has said its last word."""
        self._engine.cancel(stream.request_id)

    def end(self, stream: Stream) -> None:
        """Nobody reads the stream any more: an unfinished request is cancelled."""
        if not stream.finished:
            stream.abandon()
            self.cancel(stream)
