"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from jaxserve import __version__
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.batches.batch_operations import Batches
from jaxserve.server.http.anthropic.routes import add_message_routes
from jaxserve.server.http.errors import ApiError, add_handlers, record_of
from jaxserve.server.http.live_feed import LiveFeed
from jaxserve.server.http.ollama.routes import add_ollama_routes
from jaxserve.server.http.openai.batch_routes import add_batch_routes
from jaxserve.server.http.openai.body_limits import body_route
from jaxserve.server.http.openai.chat import chat_prompt, chat_response
from jaxserve.server.http.openai.completions import completion_response
from jaxserve.server.http.openai.files import FileStore
from jaxserve.server.http.openai.multi_prompt import ClientGone
from jaxserve.server.http.openai.pooling.pooling_routes import add_pooling_routes
from jaxserve.server.http.openai.responses.routes import add_response_routes
from jaxserve.server.http.openai.responses.store import ResponseStore
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorReply,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from jaxserve.server.http.web_console import add_console
from jaxserve.server.requests.call_outcome import CallOutcome

_GONE = 499  # for the log; the client has gone
# Declared once for all routes, instead of the 422 that FastAPI would declare and that is never
# sent.
_ERROR: dict[str, Any] = {"model": ErrorReply, "description": "An error, in OpenAI's shape"}


def build_app(
    context: RouteContext,
    responses: ResponseStore,
    batches: Batches | None = None,
    store: FileStore | None = None,
    metrics: Callable[[], bytes] | None = None,
    feed: LiveFeed | None = None,
) -> FastAPI:
    """The application with all routes.

    Args:
        context: what the routes need.
        responses: keeps responses.
        batches: the batches; None refuses calls for them.
        store: the uploaded files; None likewise.
        metrics: renders /metrics; None for no such page.
        feed: data for the console; None for no console.
    """
    app = FastAPI(
        title="jaxserve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would go to whatever Host the call names
        responses={"4XX": _ERROR, "5XX": _ERROR},
    )
    app.router.route_class = body_route(context.requests.run_beside)
    add_handlers(app)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, _nobody)
    _add_generation(app, context)
    add_response_routes(app, context, responses)
    add_message_routes(app, context)
    add_ollama_routes(app, context)
    add_pooling_routes(app, context)
    _add_models(app, context)
    _add_tokens(app, context)
    add_batch_routes(app, context, batches, store)
    _add_state(app, context)
    _add_admin(app, context)
    if feed is not None:
        add_console(app, context, feed)
    if metrics is not None:

        @app.get("/metrics", include_in_schema=False)
        async def _metrics() -> Response:
            return Response(await asyncio.to_thread(metrics), media_type=CONTENT_TYPE_LATEST)

    return app


def _add_generation(app: FastAPI, context: RouteContext) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continues one prompt or several."""
        return await completion_response(context, body, http)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answers a chat."""
        return await chat_response(context, body, http)


def _add_models(app: FastAPI, context: RouteContext) -> None:
    started = int(time.time())

    def described(http: Request) -> list[dict[str, Any]]:
        info = context.requests.info()
        limit = min(info.max_model_len, info.pool_tokens)
        usual = {"object": "model", "created": started, "owned_by": "jaxserve"}
        # vLLM has these, too, and its `bench serve` reads them.
        models = [{"id": info.model, **usual, "root": info.model, "parent": None}]
        for adapter in context.requests.adapters(record_of(http).caller):
            models.append({"id": adapter.name, **usual, "root": adapter.path, "parent": info.model})
        more = {"max_model_len": limit, "sampling_defaults": dict(info.sampling_defaults)}
        return [{**model, **more} for model in models]

    @app.get("/v1/models")
    async def models(http: Request) -> dict[str, Any]:
        """Lists the served model, and the adapters that the key may use."""
        return {"object": "list", "data": described(http)}

    @app.get("/v1/models/{model:path}")
    async def model(model: str, http: Request) -> dict[str, Any]:
        """One of the models, by its name."""
        name = context.adapter_of(model, record_of(http).caller) or context.model
        return next(entry for entry in described(http) if entry["id"] == name)


def _add_tokens(app: FastAPI, context: RouteContext) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
        """Token ids of a text or of a chat's prompt."""
        context.adapter_of(body.model, record_of(http).caller)
        tenant = record_of(http).caller.name
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt", "either prompt or messages is needed")
        if body.prompt is not None:
            special = body.add_special_tokens
            tokens = await context.requests.encode(body.prompt, tenant, special=special)
        else:
            _, tokens = await chat_prompt(context, body, tenant)
        info = context.requests.info()
        return {"tokens": tokens, "count": len(tokens), "max_model_len": info.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, str]:
        """The text of token ids, without special tokens."""
        context.adapter_of(body.model, record_of(http).caller)
        info, count = context.requests.info(), len(body.tokens)
        if count > info.max_model_len:
            limits = f"at most {info.max_model_len} are allowed"
            raise InvalidRequest("tokens", f"has {count} entries; {limits}")
        last = info.vocab_size - 1
        for bad in (each for each in body.tokens if not 0 <= each <= last):
            raise InvalidRequest("tokens", f"token id {bad} is outside 0..{last}")
        tenant, decode = record_of(http).caller.name, context.engine.decode
        return {"prompt": await context.requests.run_beside(tenant, decode, body.tokens)}


def _add_state(app: FastAPI, context: RouteContext) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine is alive."""
        if context.requests.failure is not None:
            raise ApiError(503, context.requests.failure, code="engine_failed")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether the server takes requests."""
        context.requests.check_open()
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The server's version, and everything else that the bits of its answers depend on."""
        fingerprint = context.requests.info().system_fingerprint
        return {"version": __version__, "system_fingerprint": fingerprint}


def _add_admin(app: FastAPI, context: RouteContext) -> None:
    def check_admin(http: Request) -> None:
        if not record_of(http).caller.is_admin:
            raise ApiError(403, "only a key with admin=1 may do this", code="admin_only")

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterRequest, http: Request) -> Response:
        """Requests may name the adapter as their model from now on."""
        check_admin(http)
        if not context.lora_root:
            problem = "no adapters are loaded over HTTP here (lora.root); --lora loads some"
            raise ApiError(403, problem, code="lora_root_missing")
        context.requests.check_open()
        root = Path(context.lora_root).expanduser()
        where = str(root / body.lora_path)
        await asyncio.to_thread(context.engine.load_adapter, body.lora_name, where, root)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterRequest, http: Request) -> Response:
        """No new request may name the adapter. Running requests go on."""
        check_admin(http)
        context.engine.unload_adapter(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(http: Request) -> Response:
        """Empties the prefix cache: later requests get no hits on blocks computed before."""
        check_admin(http)
        if not context.requests.info().prefix_caching:
            problem = "prefix caching is off here (cache.prefix_caching)"
            raise ApiError(409, problem, code="prefix_caching_off")
        context.requests.check_open()
        context.engine.reset_prefix_cache()
        return Response()


async def _nobody(request: Request, error: Exception) -> JSONResponse:
    record_of(request).outcome = CallOutcome.CANCELLED
    return JSONResponse(None, _GONE)
