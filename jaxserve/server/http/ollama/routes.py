"""/api, as Ollama has it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.ollama.answer import OllamaAnswer, now
from jaxserve.server.http.ollama.chat_request import (
    NAMES,
    chat_of,
    completion_of,
    model_named,
    prompted_chat,
)
from jaxserve.server.http.ollama.schema import (
    EmbedRequest,
    GenerateRequest,
    Generating,
    OllamaChatRequest,
    ShowRequest,
)
from jaxserve.server.http.openai.answer_messages import PreparedChat
from jaxserve.server.http.openai.chat import prepare_chat
from jaxserve.server.http.openai.completions import prepare_completion
from jaxserve.server.http.openai.pooling.pooling_routes import VectorsForm, vectors_response
from jaxserve.server.http.openai.pooling.pooling_schema import EmbeddingRequest
from jaxserve.server.http.openai.request_options import renaming
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import ChatRequest, Targeted

_API_VERSION = "0.12.6"
"""Of Ollama: clients ask for it, and some want a recent one."""
_FEW_TURNS = 100
_NEVER = "9999-12-31T00:00:00Z"
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class OllamaError(BaseModel):
    """The body of every answer that is an error."""

    error: str


_ERROR: dict[str, Any] = {"model": OllamaError, "description": "An error, in Ollama's shape"}
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}


def add_ollama_routes(app: FastAPI, context: RouteContext) -> None:
    """Adds the routes of Ollama's API.

    Args:
        app: the application.
        context: what the routes need.
    """
    started = now()

    @app.post("/api/chat", responses=_ERRORS)
    async def chat(body: OllamaChatRequest, http: Request) -> Response:
        """Answers a chat."""
        if not body.messages:
            return _loaded(context, body, http, {"message": {"role": "assistant", "content": ""}})
        few = len(body.messages) <= _FEW_TURNS
        inline = few and not any(message.tool_calls for message in body.messages)
        return await _answered(context, body, http, chat_of, inline=inline)

    @app.post("/api/generate", responses=_ERRORS)
    async def generate(body: GenerateRequest, http: Request) -> Response:
        """Answers a prompt, or continues it if it is raw, or the model has no chat template."""
        if not body.prompt:
            return _loaded(context, body, http, {"response": ""})
        if not body.raw and (context.template.own or body.system):
            return await _answered(context, body, http, prompted_chat)
        if body.system:
            raise InvalidRequest("system", "needs a template, so it is not for raw prompts")
        caller = record_of(http).caller
        with renaming(NAMES):
            tokens = await context.requests.encode(body.prompt, caller.name)
            completion = completion_of(body, context.requests.max_output_tokens(len(tokens)))
            wanted = await prepare_completion(context, completion, [tokens], caller)
        answer = OllamaAnswer(context, PreparedChat(wanted, {}, None, []), http, chats=False)
        return answer.stream() if body.stream else await answer.whole()

    @app.post("/api/embed", responses=_ERRORS)
    async def embed(body: EmbedRequest, http: Request) -> Response:
        """A vector for each text."""
        shared = {name: getattr(body, name) for name in Targeted.model_fields}
        shared |= {"model": model_named(body.model), "dimensions": body.dimensions}
        asked = EmbeddingRequest.model_construct(**shared, input=body.input)
        return await vectors_response(context, asked, http, _EMBEDDINGS)

    @app.get("/api/tags", responses=_ERRORS)
    async def tags(http: Request) -> dict[str, Any]:
        """Lists the model, and the adapters that the key may use."""
        return {"models": [_described(context, name, started) for name in _names(context, http)]}

    @app.get("/api/ps", responses=_ERRORS)
    async def running(http: Request) -> dict[str, Any]:
        """Lists the same: they are loaded until the server ends."""
        loaded = {"expires_at": _NEVER, "context_length": context.requests.info().max_model_len}
        models = (_described(context, name, started) for name in _names(context, http))
        return {"models": [{**model, **loaded, "size_vram": model["size"]} for model in models]}

    @app.post("/api/show", responses=_ERRORS)
    async def show(body: ShowRequest, http: Request) -> dict[str, Any]:
        """Describes a model."""
        named = model_named(body.model or body.name)
        name = context.adapter_of(named, record_of(http).caller) or context.model
        return _shown(context, name, started)

    @app.get("/api/version", responses=_ERRORS)
    async def version() -> dict[str, str]:
        """The version of Ollama whose API this is."""
        return {"version": _API_VERSION}


async def _answered(
    context: RouteContext,
    body: Generating,
    http: Request,
    made: Callable[[Any], ChatRequest],
    *,
    inline: bool = True,
) -> Response:
    """The answer to a chat that `made` makes of a body. inline: whether that takes no time."""
    caller = record_of(http).caller
    with renaming(NAMES):
        chat = made(body) if inline else await context.requests.run_beside(caller.name, made, body)
        prepared = await prepare_chat(context, chat, caller, shorten=True)
    answer = OllamaAnswer(context, prepared, http, chats=made is chat_of)
    return answer.stream() if body.stream else await answer.whole()


def _loaded(
    context: RouteContext, body: Generating, http: Request, empty: dict[str, Any]
) -> Response:
    """The answer to a call without a prompt, by which clients load a model, or unload it."""
    name = context.adapter_of(model_named(body.model), record_of(http).caller) or context.model
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    head = {"model": name, "created_at": now()}
    return JSONResponse({**head, **empty, "done": True, "done_reason": reason})


_EMBEDDINGS = VectorsForm(
    "embeddings",
    lambda model, record: {"model": model, "prompt_eval_count": record.prompt_tokens},
    lambda place, vector, output: vector,
)


def _names(context: RouteContext, http: Request) -> list[str]:
    adapters = context.requests.adapters(record_of(http).caller)
    return [context.model, *(adapter.name for adapter in adapters)]


def _details(context: RouteContext) -> dict[str, Any]:
    info = context.requests.info()
    return {
        "parent_model": "",
        "format": "",
        "family": info.family,
        "families": [info.family],
        "parameter_size": f"{info.num_params / 1e9:.1f}B",
        "quantization_level": info.dtype.upper(),
    }


def _described(context: RouteContext, name: str, started: str) -> dict[str, Any]:
    info = context.requests.info()
    return {
        "name": name,
        "model": name,
        "modified_at": started,
        "size": info.num_params * _BYTES.get(info.dtype, 1),
        "digest": hashlib.sha256(f"{info.system_fingerprint} {name}".encode()).hexdigest(),
        "details": _details(context),
    }


def _shown(context: RouteContext, name: str, started: str) -> dict[str, Any]:
    info = context.requests.info()
    able = ["completion", "tools"] if info.causal else ["embedding"]
    if context.template.reasoning_format is not None:
        able.append("thinking")
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in info.sampling_defaults.items()),
        "template": "",
        "modified_at": started,
        "details": _details(context),
        "model_info": {
            "general.architecture": info.family,
            "general.basename": name,
            "general.parameter_count": info.num_params,
            f"{info.family}.context_length": info.max_model_len,
            f"{info.family}.embedding_length": info.d_model,
            f"{info.family}.block_count": info.num_layers,
        },
        "capabilities": able,
    }
