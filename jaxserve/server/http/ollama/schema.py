"""The bodies of Ollama's calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictStr

from jaxserve.server.http.openai.pooling.pooling_schema import Inputs
from jaxserve.server.http.openai.schema import (
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    Body,
    Int32,
    Int64,
    JsonSchema,
    Number,
    StopStrings,
    Targeted,
    Text,
    Tools,
)


def _no_images(value: Any) -> Any:
    if value:
        raise ValueError("images are not served, only text")
    return value


def _known_format(value: Any) -> Any:
    if not isinstance(value, dict) and value not in ("", "json"):
        raise ValueError("must be 'json', or a JSON Schema")
    return value


Images = Annotated[list[Any], BeforeValidator(_no_images)]


class Options(Body):
    """How the text is sampled. The fields after stop are about how Ollama runs a model; the model
    here is loaded already, and they change nothing."""

    num_predict: Int32 | None = None
    temperature: Number | None = None
    top_k: Int32 | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seed: Int64 | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: Text | StopStrings | None = None

    num_ctx: Int32 | None = None
    num_batch: Int32 | None = None
    num_gpu: Int32 | None = None
    main_gpu: Int32 | None = None
    num_thread: Int32 | None = None
    num_keep: Int32 | None = None
    repeat_last_n: Int32 | None = None
    numa: StrictBool | None = None
    low_vram: StrictBool | None = None
    f16_kv: StrictBool | None = None
    use_mmap: StrictBool | None = None
    use_mlock: StrictBool | None = None
    penalize_newline: StrictBool | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None


class OllamaCall(Targeted):
    """The common fields of all calls. keep_alive: how long Ollama keeps the model; it stays."""

    keep_alive: Text | Number | None = None
    options: Options | None = None


class Generating(OllamaCall):
    """The common fields of calls that generate."""

    stream: StrictBool = True
    format: Annotated[Literal["", "json"] | JsonSchema, BeforeValidator(_known_format)] | None = (
        None
    )
    think: StrictBool | Literal["low", "medium", "high", "max"] | None = None


class CalledFunction(Body):
    """A function that was called. index: its place among the calls."""

    name: Text
    arguments: dict[str, Any] = {}  # noqa: RUF012
    index: Int32 | None = None


class CallEntry(Body):
    """A call of a tool in an assistant's turn."""

    function: CalledFunction
    id: Annotated[Text, Field(max_length=256)] | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Body):
    """A turn of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr = ""
    thinking: StrictStr | None = None
    images: Images | None = None
    tool_calls: (
        Annotated[list[CallEntry], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_name: Text | None = None
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = None


class OllamaChatRequest(Generating):
    """POST /api/chat."""

    messages: (
        Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tools: Tools | None = None


class GenerateRequest(Generating):
    """POST /api/generate. raw: whether the prompt is continued as it is, without the template."""

    prompt: StrictStr = ""
    system: StrictStr | None = None
    raw: StrictBool = False
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[Any], Field(max_length=0)] | None = None
    images: Images | None = None


class EmbedRequest(OllamaCall):
    """POST /api/embed. Inputs that are too long are refused, and not cut."""

    input: Inputs
    dimensions: Int32 | None = None
    truncate: Literal[False] | None = None


class ShowRequest(Body):
    """POST /api/show. name: what older clients call the model."""

    model: Text | None = None
    name: Text | None = None
    verbose: StrictBool | None = None
