"""One engine with its frontends, as a replica of a deployment: the class that Ray Serve calls.

It does not depend on Ray: calls come in as plain data, and responses go out in pieces
(`in_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from prometheus_client import Counter, Metric

from jaxserve.config import Config
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.in_process import Parts, call_asgi, call_grpc
from jaxserve.deploy.moves.relay import Unserved
from jaxserve.deploy.moves.roster import Roster
from jaxserve.deploy.moves.transport import Pages, Transport
from jaxserve.deploy.replica_stats import ReplicaStats
from jaxserve.deploy.replicas import ANYWHERE, FINGERPRINT, RANK, SNAPSHOT, Where
from jaxserve.deploy.response_kind import (
    ResponseKind,
    first_response_kind,
    grpc_response_kind,
    http_response_kind,
)
from jaxserve.engine.errors import EngineStopped, HostLost
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.server.access.options import access_settings
from jaxserve.server.frontends import Frontends, make_call_tracker
from jaxserve.server.http.transport.protocol import ARRIVED
from jaxserve.server.moves.passage import CannotResume, Passage
from jaxserve.server.moves.resume_point import Handle, Mark, unmarked
from jaxserve.server.requests.call_outcome import CallOutcome
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.options import server_options
from jaxserve.server.requests.output_streams import StreamFailed
from jaxserve.server.requests.slo_classes import slo_classes
from jaxserve.server.requests.templates.chat_template import load_chat_template
from jaxserve.server.requests.watchdog import watch_for_stalls
from jaxserve.server.startup.launch import find_checkpoint
from jaxserve.server.telemetry.logs import log_to_stderr
from jaxserve.server.telemetry.metrics import MetricsRegistry
from jaxserve.server.telemetry.trace_options import open_traces

log = logging.getLogger(__name__)
LEAVE_S = 2.0
"""Seconds that the answers of a replica that is to go may still take."""
_EXPORT_S, _MOST_BYTES = 1.5, 256 << 20  # for all answers; of one answer's cache
_BROUGHT_S = 10.0  # for which what came ahead of an answer is kept
_LEAST_S = 0.02  # to wait for what comes along, however little it is
_LARGE = 1 << 16  # bytes of a record that takes milliseconds to read
_REFUSED = (CallOutcome.INVALID, CallOutcome.MALFORMED, CallOutcome.UNAUTHENTICATED)  # for good
_BROKEN_OFF = (CallOutcome.ENGINE_FAILED, CallOutcome.SHUTTING_DOWN)


class EngineReplica:
    """An engine and its frontends, without ports. Create it on the event loop that serves.

    Args:
        flags: those of serve.py.
        hosts: number of hosts that serve together.
        run: context manager with the started engine for a config; it stops the engine on exit.
        name: returns the replica's name in the deployment.
        watch: returns the roster of the deployment, once the replica serves; None: it hears
            nothing of whether it is to go.
        transport: how what is cached of answers gets to other replicas.
        rank: returns the replica's number among all of the deployment, from 0.

    Raises:
        ConfigError: the flags are wrong.
    """

    def __init__(
        self,
        flags: Sequence[str],
        hosts: int,
        run: Callable[[Config], AbstractContextManager[EngineClient]],
        name: Callable[[], str],
        watch: Callable[[], Roster] | None = None,
        transport: Transport | None = None,
        rank: Callable[[], int] = lambda: 0,
    ) -> None:
        self._stopped = True  # there is nothing to stop yet
        config = replica_config(flags, hosts)
        self._name, self._watch, self._rank = name(), watch, rank
        if config.engine.record:  # each one a recording of its own
            recorded = f"{config.engine.record}.{self._name}"
            config = config.with_fields(engine__record=recorded)
        self._transport = transport or Transport()
        self._passages = set[Passage]()
        self._brought: dict[str, Pages] = {}  # ahead of answers, by `ResumePoint.key`
        self._going: asyncio.Task[None] | None = None
        log_to_stderr(config.telemetry.log_format)
        options, access = server_options(config), access_settings(config.server)
        # The other replicas would not have it.
        options = dataclasses.replace(options, lora_root="")
        path = find_checkpoint(config).model.path
        self._template = template = load_chat_template(path, config.server)
        self._grace_s = config.server.grace_s
        with contextlib.ExitStack() as stack:
            endpoint = config.telemetry.otlp_endpoint
            traces = stack.enter_context(open_traces(endpoint, lambda: self._engine.info().model))
            self._serving = contextlib.ExitStack()
            self._engine = self._serving.enter_context(run(config))
            self._closing = stack.pop_all()
        self._stopped = False
        self._stats = ReplicaStats(self._engine)
        tracker = make_call_tracker(self._engine, options, traces)
        classes = slo_classes(config.server.slo_classes)
        self._frontends = Frontends(self._engine, options, tracker, access, classes)
        self._metrics = MetricsRegistry(self._engine, tracker)
        text = "What is cached of answers that came here before these did."
        self._ahead = Counter("jaxserve:caches_ahead", text, registry=self._metrics.registry)
        self._app = self._frontends.application(template, self._metrics)
        self._handler = self._frontends.generation_handler()
        self._loop = asyncio.get_running_loop()
        self._engine.add_failure_listener(self._on_failure)
        looking = watch_for_stalls(self._engine, options.stall_s, self._on_stall)
        self._watching = asyncio.create_task(looking)

    # Calls.

    async def http(
        self,
        scope: Mapping[str, Any],
        body: bytes,
        resume: bytes = b"",
        *,
        routing_request: RoutingRequest,
        where: Where = ANYWHERE,
        pages: Handle | None = None,
    ) -> Parts:
        """Yields the response to an HTTP call, as ASGI messages, and marks.

        Args:
            scope: the call's ASGI scope.
            body: the whole body.
            resume: where the answer begins, or goes on, as JSON of a `ResumePoint`; empty for an
            answer that nobody resumes, to a call that comes now.
            routing_request: for the router only.
            where: likewise.
            pages: what another replica has cached of the answer, as in `Cache.pages`.

        Raises:
            Unserved: the replica takes no more requests, and has failed to answer this one; what is
            not yielded was not answered.
        """
        passage = await self._come(resume, pages)
        state = {} if passage is None else {ARRIVED: passage.began}
        parts = call_asgi(self._app, {**scope, "state": state}, body, passage)
        served = self._served(parts, http_response_kind, passage)
        async with contextlib.aclosing(served) as pieces:
            async for piece in pieces:
                yield piece

    async def grpc(
        self,
        method: str,
        message: bytes,
        metadata: Sequence[tuple[str, str | bytes]],
        peer: str,
        resume: bytes = b"",
        *,
        routing_request: RoutingRequest,
        where: Where = ANYWHERE,
        pages: Handle | None = None,
    ) -> Parts:
        """Yields the response to an RPC of jaxserve.v1.Generation, as `call_grpc` does.

        Args:
            method: "/package.Service/Name".
            message: the request, serialized.
            metadata: of the call.
            peer: the client's address.
            resume: see `http`.
            routing_request: for the router only.
            where: likewise.
            pages: what another replica has cached of the answer, as in `Cache.pages`.

        Raises:
            Unserved: see `http`.
        """
        passage = await self._come(resume, pages)
        parts = call_grpc(self._handler, method, message, metadata, peer, passage)
        served = self._served(parts, grpc_response_kind, passage)
        async with contextlib.aclosing(served) as pieces:
            async for piece in pieces:
                yield piece

    async def _come(self, resume: bytes, handle: Handle | None) -> Passage | None:
        """See `_passage`; off the event loop where it may take long."""
        if handle is None and len(resume) <= _LARGE:
            return self._passage(resume)
        return await asyncio.to_thread(lambda: self._passage(resume, self._get(handle) or {}))

    def _get(self, handle: Handle | None) -> Pages | None:
        """What another replica has put. Empty if it is here already, or is computed again as soon.
        None if it has not come by then."""
        if handle is None or not handle.refs:
            return {}
        try:
            again = self._engine.recompute_seconds(handle.keys)
            sooner = self._transport.seconds(handle) < again
            return self._transport.get(handle, max(again, _LEAST_S)) if sooner else {}
        except Exception as error:
            log.warning("what is cached of an answer has not come: %r", error)
            return None
        finally:
            handle.refs.clear()

    def _passage(self, resume: bytes, pages: Pages | None = None) -> Passage | None:
        """Raises Unserved if another replica has to resume the answer."""
        if not resume:
            return None
        try:
            passage = Passage(resume, self._engine.info().system_fingerprint, self._name)
        except CannotResume as error:
            raise Unserved(str(error), "") from None  # it takes other calls
        # The same answer may come again, if it is refused now.
        passage.pages = {**self._brought.get(passage.point.key, {}), **(pages or {})}
        return passage

    async def _served(
        self, parts: Parts, by: Callable[[Any], ResponseKind], passage: Passage | None
    ) -> Parts:
        """Passes the response on. Raises Unserved if another replica may serve the call, or go on
        with it: it begins with a failure, or breaks off, and the replica takes no more requests; or
        it cannot be resumed here now."""
        told = ResponseKind.NOTHING
        async with contextlib.aclosing(parts), self._known(passage):
            async for piece in parts:
                if passage is not None and not isinstance(piece[-1], Mark):
                    self._check(passage)
                if told is ResponseKind.NOTHING:
                    told = first_response_kind(map(by, unmarked(piece)))
                    why = self._frontends.requests.closed
                    if told is ResponseKind.FAILURE and why is not None:
                        raise Unserved(why, self._name)
                yield piece
        if passage is not None and passage.silent and not passage.left:
            self._check(passage)

    @contextlib.asynccontextmanager
    async def _known(self, passage: Passage | None) -> AsyncGenerator[None, None]:
        """Within it, the passage's answer may be left to other replicas."""
        if passage is None:
            yield
            return
        self._passages.add(passage)
        try:
            yield
        finally:
            self._passages.discard(passage)

    async def leave(self) -> None:
        """Leaves all answers that can be resumed to other replicas: at once those that have not
        begun, then one after the other, with what is cached of them as long as there is time."""
        due = time.monotonic() + _EXPORT_S
        for passage in sorted(self._passages, key=lambda passage: passage.tokens):
            pages = await asyncio.to_thread(self._put, passage, due) if passage.tokens else None
            passage.leave(pages)

    async def offer(self, key: str, *, where: Where = ANYWHERE) -> Handle | None:
        """Puts what is cached of an answer, which goes on here.

        Args:
            key: `ResumePoint.key` of the answer.
            where: for the router only.

        Returns:
            For `bring` of another replica; None if there is nothing.
        """
        for passage in self._with(key):
            due = time.monotonic() + _EXPORT_S
            handle = await asyncio.to_thread(self._put, passage, due)
            passage.sent = frozenset(() if handle is None else handle.keys)
            return handle
        return None

    async def bring(self, key: str, handle: Handle, *, where: Where = ANYWHERE) -> bool:
        """Gets what another replica offers, ahead of an answer that may go on here.

        Args:
            key: `ResumePoint.key` of the answer.
            handle: by which it can be had.
            where: for the router only.

        Returns:
            Whether all that is wanted of it is here.
        """
        pages = await asyncio.to_thread(self._get, handle)
        if pages:
            self._ahead.inc()
            self._brought[key] = pages

            def drop() -> None:
                if self._brought.get(key) is pages:
                    del self._brought[key]

            self._loop.call_later(_BROUGHT_S, drop)
        return pages is not None

    async def hand_over(self, key: str, ahead: bool = False, *, where: Where = ANYWHERE) -> bool:
        """Leaves one answer to other replicas, with what is cached of it.

        Args:
            key: `ResumePoint.key` of the answer.
            ahead: whether what was offered of it is where it goes, so that the rest is enough.
            where: for the router only.

        Returns:
            Whether it is left; not if it has ended, or cannot be resumed.
        """
        for passage in self._with(key):
            due, sent = time.monotonic() + _EXPORT_S, passage.sent if ahead else ()
            passage.leave(await asyncio.to_thread(self._put, passage, due, sent))
            await passage.settled.wait()
            return passage.left and passage in self._passages
        return False

    def _with(self, key: str) -> list[Passage]:
        return [one for one in self._passages if one.point.key == key]

    def _put(self, passage: Passage, due: float, sent: Collection[bytes] = ()) -> Handle | None:
        """Puts what is cached of an answer, up to _MOST_BYTES, if it can be had by then. Its
        requests go on meanwhile.

        Args:
            passage: the answer's.
            due: seconds of time.monotonic().
            sent: keys of what is left out.

        Returns:
            None if nothing can be put: then it is computed again.
        """
        pages, room = dict[bytes, np.ndarray](), _MOST_BYTES
        requests = () if passage.call is None else passage.call.requests
        try:
            for request in requests:
                left = due - time.monotonic()
                if left > 0:
                    with contextlib.suppress(TimeoutError, EngineStopped):
                        pages |= self._engine.export(request.id, left, room, sent)
                room = _MOST_BYTES - sum(page.nbytes for page in pages.values())
            return self._transport.put(pages) if pages else None
        except Exception as error:
            log.warning("what is cached of an answer stays: %r", error)
            return None

    def _on_roster(self, roster: Roster, names: Sequence[str], changed: bool) -> None:
        """On any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if changed:
                self._loop.call_soon_threadsafe(self._look, roster)

    def _look(self, roster: Roster) -> None:
        """Leaves everything in LEAVE_S if the replica is to go."""
        if self._going is not None or not roster.leaves(self._name, self._fingerprint):
            return

        async def go() -> None:
            try:
                await asyncio.sleep(LEAVE_S)
                if roster.leaves(self._name, self._fingerprint):
                    await self.leave()
            finally:
                self._going = None

        self._going = asyncio.create_task(go())

    @property
    def _fingerprint(self) -> str:
        return self._engine.info().system_fingerprint

    def _check(self, passage: Passage) -> None:
        """Raises Unserved if the answer has not been resumed, or has broken off."""
        why, call = self._frontends.requests.closed, passage.call
        if passage.silent:
            refused, final = "it was not resumed", False
            if call is not None:
                refused, final = call.reason or refused, call.outcome in _REFUSED
            raise Unserved(why or refused, self._name if why else "", final and why is None)
        if passage.begun and why is not None and call is not None and call.outcome in _BROKEN_OFF:
            raise Unserved(why, self._name)

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The replica's name, and its Prometheus metrics."""
        return self._name, await asyncio.to_thread(lambda: list(self._metrics.registry.collect()))

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        self._engine.reset_prefix_cache()

    async def sizes(self) -> tuple[int, int]:
        """Most bytes of a body that it takes, and tokens per block of its prefix cache, 0 for
        none."""
        info = self._engine.info()
        return self._frontends.body_bytes, info.block_size if info.prefix_caching else 0

    # Methods that Ray Serve calls by name.

    async def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed or stalled. The replica is then replaced."""
        requests = self._frontends.requests
        if requests.failure or requests.stalled:
            raise RuntimeError(requests.failure or requests.stalled)

    async def record_routing_stats(self) -> dict[str, Any]:
        """The snapshot for routers, and which answers it can go on with."""
        if self._watch is not None:
            roster = self._watch()
            roster.listen(functools.partial(self._on_roster, roster))
            self._watch = None
        draining = self._frontends.requests.closed is not None
        snapshot = self._stats.snapshot(draining=draining).as_dict()
        return {SNAPSHOT: snapshot, FINGERPRINT: self._fingerprint, RANK: self._rank()}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load for `ray.scale`."""
        return self._stats.load().as_metrics()

    def __del__(self) -> Awaitable[None] | None:
        """Stops the replica. Ray Serve calls and awaits it once the replica's calls have ended."""
        if self._stopped:
            return None
        self._stopped = True
        return self._stop()

    async def stop(self) -> None:
        """Takes no more calls, drains the engine and stops it. Idempotent."""
        stopping = self.__del__()
        if stopping is not None:
            await stopping

    async def _stop(self) -> None:
        self._frontends.requests.stop_admission()
        self._watching.cancel()
        if self._frontends.requests.failure is None:
            await asyncio.to_thread(self._engine.drain, self._grace_s)
        await asyncio.to_thread(self._serving.close)
        self._frontends.requests.close()
        self._template.close()
        self._closing.close()

    # Changes of the engine's state.

    async def _on_stall(self, why: str | None) -> None:
        self._frontends.requests.stalled = why

    def _on_failure(self, error: BaseException) -> None:
        """On any thread."""
        text = f"the engine failed: {str(error) or type(error).__name__}"
        log.error("%s", text)
        kind = EngineStopped if isinstance(error, HostLost) else StreamFailed
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._frontends.requests.fail, text, kind)
