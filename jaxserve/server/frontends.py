"""The frontends of an engine, for calls through the ports of a `Server` or within the process."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from starlette.types import ASGIApp

from jaxserve.server.access.options import Access
from jaxserve.server.batches.batch_operations import Batches, BatchSettings
from jaxserve.server.grpc.batches_service import BatchesService
from jaxserve.server.grpc.calls import Calls
from jaxserve.server.grpc.generation_service import GenerationService
from jaxserve.server.grpc.grpc_server import BATCHES, GENERATION, METHODS, longest_message
from jaxserve.server.http.admission_middleware import METHODS as HTTP_METHODS
from jaxserve.server.http.admission_middleware import AdmissionMiddleware
from jaxserve.server.http.app import build_app
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.openai.files import FileStore
from jaxserve.server.http.openai.responses.store import ResponseStore
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.requests.admission import Admission
from jaxserve.server.requests.call_outcome import CallTracker, Sink
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.engine_load import LoadMeter
from jaxserve.server.requests.engine_requests import EngineRequests
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.requests.write_timeout import WriteTimeout
from jaxserve.server.telemetry.metrics import MetricsRegistry
from jaxserve.server.telemetry.request_log import RequestLog

_FEW_CALLS, _READERS = 64, 64


def make_call_tracker(
    engine: EngineClient, options: ServerOptions, *sinks: Sink | None
) -> CallTracker:
    """A tracker that counts how calls end, and passes them to the given sinks and to the request
    log, if it is on."""
    known = [sink for sink in sinks if sink is not None]
    logged, prompts = options.request_log, options.log_prompts
    if logged:
        known.append(RequestLog(engine.decode, prompts=prompts))
    methods, load = (*METHODS, *HTTP_METHODS), LoadMeter(engine)
    return CallTracker(methods, known, logged=logged, keeps_text=prompts, load=load)


class Frontends:
    """The frontends of one engine. Create it on the event loop that serves.

    Args:
        engine: the engine, already started.
        options: how calls are treated.
        tracker: counts how they end.
        access: who may call.
        slo_classes: SLO classes that requests may name.
        batches: the batch journal; None takes no batches.

    Attributes:
        requests: the way to the engine.
        admission: limits the open calls that generate.
        few: limits the open calls for files and batches, since each may be large.
        batches: None if none are taken.
        body_bytes: size of the longest request of any call.
        writes: limits how long a client may take to read a message.
        middleware: the middleware around the HTTP application.
    """

    def __init__(
        self,
        engine: EngineClient,
        options: ServerOptions,
        tracker: CallTracker,
        access: Access,
        slo_classes: Mapping[str, ServiceLevel] | None = None,
        batches: BatchSettings | None = None,
    ) -> None:
        self._engine, self._options = engine, options
        self.requests = EngineRequests(
            engine, options.stream_buffer_bytes, slo_classes, options.refuse_late
        )
        self.admission = Admission(options.max_calls, "server.max_calls")
        self.few = Admission(_FEW_CALLS, "this server takes of files and batches")
        self.batches = None if batches is None else Batches(self.requests, batches, tracker)
        self.body_bytes = longest_message(engine, batches=batches is not None)
        self.writes = WriteTimeout(options.write_timeout_s)
        longest = self._prompt_bytes = longest_message(engine, batches=False)
        self.middleware = AdmissionMiddleware(
            access, self.admission, self.few, tracker, body_bytes=longest, writes=self.writes
        )
        self._calls = Calls(tracker, self.writes, access.keys)

    def application(
        self, template: ChatTemplate, metrics: MetricsRegistry, feed: LiveFeed | None = None
    ) -> ASGIApp:
        """The ASGI application for HTTP.

        Args:
            template: makes prompts of chats.
            metrics: renders /metrics.
            feed: data for the console; None for no console.
        """
        context = RouteContext(
            self._engine, self.requests, template, self._options.lora_root, self._options.scoring
        )
        store, batches = None, self.batches
        if batches is not None:
            store = FileStore(batches.directory / "files", batches.max_bytes, batches.keep_s)
        responses = ResponseStore(self._options.responses)
        return self.middleware.around(
            build_app(context, responses, batches, store, metrics.page, feed)
        )

    def generation_handler(self) -> grpc.GenericRpcHandler:
        """gRPC's handler of jaxserve.v1.Generation."""
        service = GenerationService(self.requests, self._options.scoring)
        admissions = {name: self.admission for name in ("Generate", "Embed", "Score")}
        return self._calls.handler(GENERATION, service, admissions, self._prompt_bytes)

    def batches_handler(self) -> grpc.GenericRpcHandler:
        """gRPC's handler of jaxserve.v1.Batches."""
        admissions = {method.name: self.few for method in BATCHES.methods}
        # A client may follow a batch for hours.
        admissions["GetBatch"] = Admission(_READERS, "this server takes of GetBatch")
        service = BatchesService(self.batches)
        return self._calls.handler(BATCHES, service, admissions, self.body_bytes)
