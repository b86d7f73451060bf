"""The bodies of requests: OpenAI's fields, vLLM's further sampling fields, and our own.

A field that is not here is refused by its name; one that is here and cannot be served as asked is
refused too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]
MAX_PROMPTS = 128
"""Prompts of one call."""


class Body(BaseModel):
    """A JSON object without unknown fields. A field that is null counts as absent, whatever it
    is."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Body):
    """include_usage: a last chunk with the usage of all. continuous_usage_stats: the usage so far
    in every chunk. include_obfuscation: OpenAI's padding against who counts bytes; there is
    none."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: Literal[False] | None = None


class SloFields(Body):
    """Targets in milliseconds: to the first token, between two tokens, to the last token."""

    ttft_ms: Number | None = None
    tbt_ms: Number | None = None
    jct_ms: Number | None = None


class Unused(Body):
    """Fields that clients send and that would change no answer here: names of callers, notes, and
    options in the one value that is what this server does anyway."""

    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    metadata: dict[str, StrictStr] | None = None
    store: Literal[False] | None = None  # nothing is kept to be asked for later
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None


JsonSchemaText = dict[str, Any] | StrictBool | StrictStr


class NamedSchema(Body):
    """A JSON Schema as OpenAI has it. strict: accepted, for text is always valid."""

    name: StrictStr
    description: StrictStr | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class ResponseFormat(Body):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """The same as vLLM has it; exactly one of them."""

    json_schema: Annotated[JsonSchemaText | None, Field(alias="json")] = None
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    json_object: Literal[True] | None = None


class Generation(Unused):
    """What completions and chats have in common."""

    model: StrictStr | None = None
    temperature: Number | None = 1.0
    top_p: Number | None = 1.0
    n: StrictInt | None = 1
    stop: StrictStr | list[StrictStr] | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = 0.0
    frequency_penalty: Number | None = 0.0
    logit_bias: dict[str, Number] | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "priority", "flex"] | None = None
    # As vLLM has them; its -1 for top_k is 0 here.
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: list[TokenId] | None = None
    # What the text has to be: OpenAI's field, and vLLM's.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaText | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    # Our own.
    request_id: StrictStr | None = None
    slo: SloFields | StrictStr | None = None  # targets, or the name of a class
    slo_class: StrictStr | None = None
    tier: Literal["realtime", "best_effort"] | None = None
    serve_late: StrictBool | None = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: StrictStr | list[StrictStr] | list[TokenId] | list[list[TokenId]]
    max_tokens: StrictInt | None = 16
    logprobs: StrictInt | None = None
    echo: StrictBool | None = False
    best_of: StrictInt | None = None
    suffix: Literal[""] | None = None  # nothing comes after what is generated


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: StrictStr


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = False
    top_logprobs: StrictInt | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool = True


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a chat."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[TokenId]


class ErrorDetail(BaseModel):
    """param: the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail
