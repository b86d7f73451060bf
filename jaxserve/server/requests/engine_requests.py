"""The path of every request from any frontend: built from the client's fields and checked
(`EngineRequests.make_request`), then submitted (`EngineRequests.open_stream`)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxserve.engine.adapters import Adapter, UnknownAdapter
from jaxserve.engine.errors import EngineStopped
from jaxserve.engine.stats import EngineInfo
from jaxserve.engine.text.grammar_process import PROCESSES
from jaxserve.sched.request import (
    NOTHING_SAMPLED,
    SLO,
    Grammar,
    InvalidRequest,
    PoolingParams,
    Program,
    Request,
    SamplingParams,
    Thinking,
    Tier,
    too_many_tokens,
)
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.logprob_arrays import logprobs_bytes as logprobs_size
from jaxserve.server.requests.output_streams import (
    BUFFER_BYTES,
    Delta,
    OutputRouter,
    RequestCancelled,
    Stream,
    StreamFailed,
)
from jaxserve.server.requests.slo_admission import check_expected
from jaxserve.server.requests.slo_classes import ServiceLevel, check_deadline, requested_level
from jaxserve.server.requests.target_headers import DEADLINE_HEADER, header_program
from jaxserve.server.requests.tenant_turns import TenantThreads

L = TypeVar("L")
T = TypeVar("T")
MAX_REQUEST_ID = 128  # characters
MAX_CACHE_SALT = 256  # likewise
MAX_CACHE_KEY = 256  # likewise, of a prompt_cache_key, which only routers read
SHUTTING_DOWN = "the server is shutting down"
# Encoding takes about a microsecond per character. Longer texts are encoded off the event loop,
# only a few at once, so that the engine's thread keeps a core.
INLINE_LENGTH = 2000
LONG_LENGTH = 1 << 16
"""Longer prompts have a thread of their own, so that shorter ones need not wait for them."""
PREDICTED_CHARACTERS = 16
"""Most characters of a prediction for each token that a prompt may have: four times the usual
ratio."""
_NO_TARGETS = SLO()
_READERS = 8  # tenants whose lines are read at once, mostly waiting
_ENCODERS = max(1, min(4, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class RequestFields:
    """The fields of one request as a frontend parsed them, still unchecked.

    Attributes:
        prompt: text, or token ids.
        sampling: the `SamplingParams` fields that the client gave, by name. Other fields have the
            checkpoint's values (`EngineInfo.sampling_defaults`) or their defaults, except that a
            missing max_tokens is lowered to what fits after the prompt.
        request_id: the client's id; empty generates one.
        slo: targets given with the request. They override targets in the call's headers, which
            override those of `slo_class` (`slo_classes.requested_level`).
        tier: tier given with the request, which overrides that of `slo_class`; None takes the tier
            of the class, else of the API key, else real-time.
        slo_class: name of one of the server's SLO classes; empty takes the API key's class, if it
            has one.
        serve_late: whether to serve the request though its first token is expected late.
        cache_salt: as `Request.cache_salt`, any characters.
        caller: the client; None for the server's own requests. The request's id in the engine is
            `caller.scoped`, so that no client learns which ids others use, and the limits of the
            caller's API key apply to its tier and targets.
        prediction: the likely output; empty if the client gives none. It is encoded if the policy
            speculates.
        model: name of an adapter, or of the model itself; "" is the model.
        pooling: the vector or scores that are wanted in place of generated text, with an empty
            `sampling`; None generates text.
        program: what it says of its program, which overrides headers; None if it says nothing. The
            class's deadline is still missing.
        continues: as `Request.continues`.
    """

    prompt: str | Sequence[int]
    sampling: Mapping[str, Any]
    request_id: str = ""
    slo: SLO = _NO_TARGETS
    tier: Tier | None = None
    slo_class: str = ""
    serve_late: bool = False
    cache_salt: str = ""
    caller: Caller | None = None
    prediction: str = ""
    model: str = ""
    pooling: PoolingParams | None = None
    program: Program | None = None
    continues: tuple[tuple[str, str], ...] = ()


class EngineRequests:
    """Builds requests, submits them to the engine and tracks whether it accepts any. Create it on
    the event loop that serves. All methods run there, except those that are marked as callable from
    any thread.

    Args:
        engine: the engine, already started.
        buffer_bytes: output that may wait for the reader of one stream, in bytes.
        slo_classes: SLO classes that requests may name, by name.
        refuse_late: as `server.refuse_late` in the config; 0 refuses nobody.

    Attributes:
        slo_classes: as given.
        draining: whether the server is shutting down and takes no new requests.
        failure: why the engine has failed; None if it has not.
        stalled: why the engine takes no requests for now; None if it does.
    """

    def __init__(
        self,
        engine: EngineClient,
        buffer_bytes: float = BUFFER_BYTES,
        slo_classes: Mapping[str, ServiceLevel] | None = None,
        refuse_late: float = 0.0,
    ) -> None:
        self._engine = engine
        self._refuse_late, self._buffer_bytes = refuse_late, buffer_bytes
        self.slo_classes = slo_classes or {}
        self._loop = asyncio.get_running_loop()
        self._router = OutputRouter(self._loop, buffer_bytes=buffer_bytes, cancel=engine.cancel)
        self._encoders = TenantThreads(_ENCODERS, "jaxserve-encode")
        self._long_encoders = TenantThreads(1, "jaxserve-encode-long")
        self._grammars = TenantThreads(PROCESSES, "jaxserve-grammar", each=1, keyless=PROCESSES)
        self._lines = TenantThreads(_READERS, "jaxserve-lines", each=1)
        self._others = TenantThreads(_ENCODERS, "jaxserve-beside")
        self.draining = False
        self.failure: str | None = None
        self.stalled: str | None = None

    @property
    def closed(self) -> str | None:
        """The reason why new requests are refused; None while they are accepted."""
        return self.failure or (SHUTTING_DOWN if self.draining else self.stalled)

    @property
    def running(self) -> int:
        """Number of requests that the engine has not finished."""
        return len(self._router.unfinished())

    def check_open(self) -> None:
        """Raises EngineStopped if new requests are refused."""
        if self.closed is not None:
            raise EngineStopped(self.closed)

    def info(self) -> EngineInfo:
        """Describes what is served; does not change while the engine runs."""
        return self._engine.info()

    def adapter_named(self, model: str, caller: Caller | None) -> str:
        """The adapter for a request with this model; "" for the base model. Raises UnknownAdapter
        if the caller has no adapter with this name."""
        if model in ("", self.info().model):
            return ""
        for adapter in self.adapters(caller):
            if adapter.name == model:
                return model
        raise UnknownAdapter(model)

    def adapters(self, caller: Caller | None) -> list[Adapter]:
        """The adapters that the caller's requests may name."""
        return [
            adapter
            for adapter in self._engine.adapters()
            if caller is None or caller.may_use(adapter.name)
        ]

    def stop_admission(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True

    def fail(self, error: str, kind: type[Exception] = StreamFailed) -> None:
        """Ends every open stream with kind(error) and refuses new requests from now on."""
        self.failure = error
        self._router.fail_all(error, kind)

    def close(self) -> None:
        """Fails the open streams and shuts down the thread pools. Nothing can be built or submitted
        afterwards."""
        self._router.fail_all(SHUTTING_DOWN)
        threads = self._encoders, self._long_encoders, self._grammars, self._lines, self._others
        for pool in threads:
            pool.close()

    def cancel_all(self) -> None:
        """Cancels every running request. Each stream ends with the engine's final output for it."""
        for request_id in self._router.unfinished():
            self._engine.cancel(request_id)

    async def run_beside(self, tenant: str, work: Callable[..., T], *arguments: Any) -> T:
        """Returns work(*arguments), run on one of a few threads, at which tenants take turns. For
        work of some milliseconds that would hold up the event loop, such as parsing bodies and
        encoding answers.
        """
        return await self._others.run(tenant, work, *arguments)

    async def make_request(self, fields: RequestFields) -> Request:
        """`build_request`, ready to be submitted, with the slow parts off the event loop: compiling
        a grammar, encoding a long prompt, and computing the keys of its blocks."""
        tenant = "" if fields.caller is None else fields.caller.name
        grammar = fields.sampling.get("grammar")
        if grammar is not None:
            await self.check_grammar(grammar, fields.sampling.get("thinking"), tenant)
        length = len(fields.prompt) + len(fields.prediction)
        return await self._encoded(tenant, length, self._ready, fields)

    async def make_requests(
        self,
        shared: RequestFields,
        prompts: Sequence[str | Sequence[int]],
        most_tokens: float = math.inf,
    ) -> list[Request]:
        """`make_request` of each prompt of a call.

        Args:
            shared: the fields that all requests share, with the first request's id and any prompt.
            prompts: the prompts, each text or token ids.
            most_tokens: most tokens of all prompts together.

        Raises:
            InvalidRequest: If a request cannot be served. With several prompts, it names the one.
        """
        wanted, tokens = [], 0
        first = shared.request_id or self._new_id(shared.caller)
        for place, prompt in enumerate(prompts):
            await asyncio.sleep(0)  # each may take milliseconds: lets other tasks run
            own = _numbered(first, place)
            program = shared.program
            if program is not None and place + 1 < len(prompts):
                program = program.going_on()
            fields = dataclasses.replace(shared, prompt=prompt, request_id=own, program=program)
            try:
                wanted.append(await self.make_request(fields))
            except InvalidRequest as error:
                if error.field_name != "prompt" or len(prompts) == 1:
                    raise
                raise error.renamed(f"prompt.{place}") from None
            tokens += len(wanted[-1].prompt)
            if tokens > most_tokens:
                most = f"{most_tokens:,} tokens in all are taken in a call"
                raise InvalidRequest("prompt", f"at most {most}")
        return wanted

    async def check_grammar(
        self, grammar: Grammar, thinking: Thinking | None = None, tenant: str = ""
    ) -> None:
        """Compiles a grammar for the engine.

        Args:
            grammar: the text's grammar.
            thinking: what comes before the text that it holds.
            tenant: the request's tenant. Tenants take turns at the compiler, if the grammar was not
                compiled before.

        Raises:
            InvalidRequest: If the grammar cannot be served; says why.
            EngineStopped: If the engine stops.
            QueueFull: If it cannot be compiled now.
        """
        check = self._engine.check_grammar
        if not self._engine.knows_grammar(grammar):
            await self._grammars.run(tenant, check, grammar, thinking)
        elif thinking is None:
            check(grammar)
        else:  # its tokens may have to be found
            await self.run_beside(tenant, check, grammar, thinking)

    async def read_lines(self, tenant: str, read: Callable[[L], T], lines: Iterable[L]) -> list[T]:
        """Reads lines of a batch on a thread, which may wait for encoding, templates and grammars
        (`wait_for_grammar`). If the caller is cancelled, no further line is read.

        Args:
            tenant: the batch's tenant. Tenants take turns.
            read: reads a line.
            lines: the lines.

        Returns:
            The results of `read`, by line.
        """
        gone = threading.Event()
        until_gone = itertools.takewhile(lambda _: not gone.is_set(), lines)
        try:
            return await self._lines.run(tenant, lambda: list(map(read, until_gone)))
        finally:
            gone.set()

    def wait_for_grammar(self, grammar: Grammar, thinking: Thinking | None, tenant: str) -> None:
        """`check_grammar`, for a thread that may block."""
        check = self.check_grammar(grammar, thinking, tenant)
        asyncio.run_coroutine_threadsafe(check, self._loop).result()

    def _ready(self, fields: RequestFields) -> Request:
        return self._engine.with_keys(self.build_request(fields))

    async def encode(self, text: str, tenant: str = "", *, special: bool = True) -> list[int]:
        """Token ids of a text; a long text is encoded off the event loop, at the tenant's turn.
        Raises InvalidRequest."""
        encode = functools.partial(self._engine.encode, text, special=special)
        return await self._encoded(tenant, len(text), encode)

    async def _encoded(
        self, tenant: str, length: int, work: Callable[..., T], *arguments: Any
    ) -> T:
        """Returns work(*arguments), which encodes `length` characters, run on the thread for such
        lengths."""
        if length <= INLINE_LENGTH:
            return work(*arguments)
        threads = self._encoders if length <= LONG_LENGTH else self._long_encoders
        return await threads.run(tenant, work, *arguments)

    def encode_plainly(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it. Any thread may call this. Raises
        InvalidRequest."""
        return self._engine.encode(text, special=False)

    def max_output_tokens(self, prompt_tokens: int) -> int:
        """Tokens that can follow a prompt of that length; at least 1."""
        info = self._engine.info()
        return max(1, min(info.max_model_len, info.pool_tokens) - prompt_tokens)

    def build_request(self, fields: RequestFields) -> Request:
        """The request that a client's fields describe, checked as far as possible before it is
        submitted. Any thread may call this. Raises InvalidRequest."""
        caller, own = fields.caller, fields.request_id
        level = requested_level(self.slo_classes, fields.slo, fields.tier, fields.slo_class, caller)
        if len(own) > MAX_REQUEST_ID:
            limits = f"at most {MAX_REQUEST_ID} are allowed"
            raise InvalidRequest("request_id", f"has {len(own)} characters; {limits}")
        if not own.isprintable():  # it is logged and encoded
            raise InvalidRequest("request_id", "has characters that cannot be printed")
        if len(fields.cache_salt) > MAX_CACHE_SALT:
            limits = f"at most {MAX_CACHE_SALT} are allowed"
            raise InvalidRequest("cache_salt", f"has {len(fields.cache_salt)} characters; {limits}")
        adapter = self.adapter_named(fields.model, caller)
        params = SamplingParams(**{**self.info().sampling_defaults, **fields.sampling})
        self._check_prediction(fields.prediction)
        tokens = self._tokens(fields.prompt)
        self._check_prompt_logprobs(params, len(tokens))
        if fields.pooling is not None:
            params = NOTHING_SAMPLED
        elif "max_tokens" not in fields.sampling:
            room = self.max_output_tokens(len(tokens))
            fits = max(params.min_tokens, min(params.max_tokens, room))
            params = dataclasses.replace(params, max_tokens=fits)
        program = fields.program
        if program is None and caller is not None:
            program = header_program(caller.target_headers)
            check_deadline(program, caller, DEADLINE_HEADER)
        if program is not None and level.program_deadline is not None:
            program = dataclasses.replace(program, usual_deadline=level.program_deadline)
        name = own or self._new_id(caller)
        if caller is not None and caller.travels and params.seed is None:
            # The same draws wherever it goes on.
            drawn = caller.drawn(f"seed of {name}")[:8]
            params = dataclasses.replace(params, seed=int.from_bytes(drawn, signed=True))
        request = Request(
            id=name if caller is None else caller.scoped(name),
            prompt=tokens,
            sampling=params,
            slo=level.slo,
            tier=level.tier,
            arrival=0.0 if caller is None else caller.arrived,
            value=level.value,
            slo_class=level.slo_class,
            serve_late=fields.serve_late,
            cache_salt=fields.cache_salt,
            prediction=self._prediction(fields.prediction),
            adapter=adapter,
            pooling=fields.pooling,
            tenant="" if caller is None else caller.name,
            weight=None if caller is None or caller.key is None else caller.weight,
            program=program,
            continues=fields.continues,
        )
        self._engine.check(request)
        return request

    def _new_id(self, caller: Caller | None) -> str:
        return uuid.uuid4().hex if caller is None else caller.drawn("id").hex()

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            try:
                return tuple(self._engine.encode(prompt))
            except UnicodeEncodeError as error:
                raise InvalidRequest("prompt", half_surrogate(error)) from None
        info = self._engine.info()
        limit = min(info.max_model_len, info.pool_tokens)
        if len(prompt) >= limit:  # before the ids are copied
            raise too_many_tokens(len(prompt), limit - 1)
        return tuple(prompt)

    def _check_prediction(self, text: str) -> None:
        """Raises InvalidRequest if the prediction is surely longer than a prompt may be."""
        info = self._engine.info()
        most = PREDICTED_CHARACTERS * min(info.max_model_len, info.pool_tokens)
        if len(text) > most:
            problem = f"has {len(text):,} characters; at most {most:,} are allowed"
            raise InvalidRequest("prediction", problem)

    def _prediction(self, text: str) -> tuple[int, ...]:
        """The tokens of a prediction. Raises InvalidRequest for half a surrogate pair, and if it is
        longer than a prompt may be."""
        if not (text and self._engine.info().speculates):
            return ()
        try:
            return tuple(self._engine.encode(text, special=False))
        except UnicodeEncodeError as error:
            raise InvalidRequest("prediction", half_surrogate(error)) from None
        except InvalidRequest as error:
            raise InvalidRequest("prediction", error.problem) from None

    def _check_prompt_logprobs(self, params: SamplingParams, tokens: int) -> None:
        """Raises InvalidRequest if the prompt's log-probabilities would fill more than half of a
        stream's buffer. They come faster than any client reads."""
        asked = params.prompt_logprobs
        if asked is None:
            return
        size = params.n * logprobs_size(tokens, tokens * (1 + asked))
        if size > self._buffer_bytes / 2:
            problem = f"{asked} of each of {tokens} tokens take {size >> 10} KiB"
            most = f"{int(self._buffer_bytes) >> 11}, half of server.stream_buffer_kib"
            raise InvalidRequest(
                "prompt_logprobs", f"{problem}, n={params.n} times; at most {most}"
            )

    def open_stream(
        self, request: Request, *, bounded: bool = True, record: CallRecord | None = None
    ) -> Stream:
        """Submits a request and returns the stream of its outputs. Always call `end_stream` when
        done with it.

        Args:
            request: from `make_request`.
            bounded: whether to limit what waits in the stream. In-process readers need no limit.
            record: the call's record, which is told of every output.

        Raises:
            EngineStopped: If new requests are refused.
            InvalidRequest: If it cannot go on from what was generated elsewhere.
            ExpectedLate: If the first token is expected after its target.
            DuplicateRequest: If a request with this id is running.
            QueueFull: If the engine's queue is full.
        """
        # Without an await in between, a later failure or shutdown finds the stream open.
        self.check_open()
        if request.generated:
            self._engine.check(request)
        else:
            check_expected(self._engine, request, self._refuse_late)
        stream = self._router.open_stream(
            request.id, request.sampling.n, bounded=bounded, record=record
        )
        try:
            self._engine.submit(request, self._router.on_output)
        except BaseException:
            self._router.forget(request.id)
            raise
        if record is not None:  # outputs come later, through the loop
            record.opened()
        return stream

    def note_tools(self, request: Request, tools: Mapping[str, str]) -> None:
        """Notes that a request's answer asks for tools, before its client reads that. Any thread
        may call this. tools: their names, by the ids of the calls."""
        if tools:
            self._engine.note_tools(request.id, tools)

    def cancelled_error(self) -> Exception:
        """The error for a request that was cancelled by the server, not by its client."""
        if self.draining:
            return EngineStopped(SHUTTING_DOWN)
        return RequestCancelled("the request was cancelled")

    def cancel_stream(self, stream: Stream) -> None:
        """Cancels the request. The stream ends with the engine's final output for it."""
        self._engine.cancel(stream.request_id)

    def end_stream(self, stream: Stream) -> None:
        """Releases the stream after its reader is done. An unfinished request is cancelled."""
        if not stream.finished:
            stream.abandon()
            self.cancel_stream(stream)


class CallStreams:
    """Submits all requests of a call, or none. Always call `end`, however the call ends.

    Args:
        requests: the way to the engine.
        wanted: one request for each prompt.
        record: the call's record; the requests count for its caller.

    Raises:
        RateLimited: If the caller may not have as many now.
        TooManyRequests: If the caller may never have as many.
        Exception: As `EngineRequests.open_stream` raises.
    """

    def __init__(
        self, requests: EngineRequests, wanted: Sequence[Request], record: CallRecord
    ) -> None:
        self._requests, passage = requests, record.passage
        # Without the pages that have come along, which the engine keeps or drops.
        self.wanted, self.record = wanted, record
        begun = wanted if passage is None else passage.begin(wanted)
        record.charge(wanted)
        self.streams: list[Stream] = []
        try:
            for request in begun:
                self.streams.append(requests.open_stream(request, record=record))
        except BaseException:
            self.end()
            raise

    def passing(self, number: int, delta: Delta) -> AbstractContextManager[None]:
        """Within it, the frontend says what a delta stands for, and nothing else. number: the
        continuation's, j of prompt i has i * n + j."""
        passage = self.record.passage
        return nullcontext() if passage is None else passage.passing(number, delta)

    def passed(self) -> None:
        """All that the deltas stand for was said."""
        if self.record.passage is not None:
            self.record.passage.over()

    def end(self) -> None:
        """Ends all streams; unfinished requests are cancelled."""
        for stream in self.streams:
            self._requests.end_stream(stream)


def _numbered(name: str, place: int) -> str:
    """The id of the request for a prompt; the first one has the call's own id."""
    if not name or not place:
        return name
    ending = f"-{place}"
    return name[: MAX_REQUEST_ID - len(ending)] + ending


def half_surrogate(error: UnicodeEncodeError) -> str:
    """The message for a text that cannot be encoded."""
    return f"has U+{ord(error.object[error.start]):04X}, half a surrogate pair, which is not text"
