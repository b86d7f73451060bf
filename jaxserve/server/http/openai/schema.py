"""The bodies of requests: OpenAI's fields, vLLM's further sampling fields, and our own.

An unknown field is refused by its name, and so is a known field whose value cannot be served.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)

from jaxserve.engine.text.json_schemas import relaxed
from jaxserve.sched.request import (
    MAX_CHOICES,
    MAX_GRAMMAR,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    InvalidRequest,
)
from jaxserve.server.requests.engine_requests import MAX_CACHE_KEY
from jaxserve.server.tools.calls import NOTHING, Tool, compact
from jaxserve.server.tools.schema_check import schema_problem

MAX_TOOLS_TEXT = 1 << 18
"""Most characters of all tools together, as JSON."""
MAX_PROMPTS = 128
"""Most prompts of one call."""
MAX_MESSAGES = 10_000
"""Most turns of a chat."""
MAX_TEXT_PARTS = 1000
"""Most parts of a turn."""
MAX_TEXT = 1 << 16
"""Most characters of texts other than prompts; as many as MAX_GRAMMAR."""
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_DESCRIPTION = 16_384
"""Most characters of a tool's description."""
MAX_METADATA = 16
_LAST_TOKEN_ID = (1 << 31) - 1
_MOST = sys.float_info.max


def _number(value: Any) -> Any:
    """Takes an integer that no float can hold as infinite: the field's own limit refuses it."""
    if type(value) is int and abs(value) > _MOST:
        return math.inf if value > 0 else -math.inf
    return value


# Values of numbers (also NaN) and of token ids are checked later, where requests of all frontends
# are checked.
Number = Annotated[float, BeforeValidator(_number), Field(strict=True)]


def _whole(value: Any) -> Any:
    """Takes 16.0 as 16: JSON has only one type of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Whole numbers with a limit of their own are checked there, too; others have so many bits.
Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Int32 = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=_LAST_TOKEN_ID)]
Text = Annotated[StrictStr, Field(max_length=MAX_TEXT)]


def _few(limit: int) -> BeforeValidator:
    """A validator that limits the entries of objects. For lists, pydantic's own limit stops early
    enough."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries; at most {limit} are allowed")
        return value

    return BeforeValidator(check)


def checked_prompts(value: Any, most: int) -> str | list[str] | list[int] | list[list[int]]:
    """One prompt or at most `most` prompts, as in `Prompt`. A union of the four types would try
    each prompt as every type."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, or a list of strings, of token ids or of lists of them")
    if not value or type(value[0]) not in (str, list):
        return _token_ids(value)
    if len(value) > most:
        raise ValueError(f"has {len(value)} prompts; 1 to {most} prompts are taken in a call")
    for place, prompt in enumerate(value):
        if type(prompt) is not type(value[0]):
            wrong_entry(place, f"must be as the first prompt, a {_NAMES[type(value[0])]}")
        if isinstance(prompt, list):
            _token_ids(prompt, place)
    return value


_NAMES: dict[type, str] = {str: "string", list: "list of token ids"}


def _token_ids(value: Any, *where: int) -> list[int]:
    """Raises ValidationError, which names the first entry that is not a token id. where: location
    of the list."""
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    # Python takes booleans for integers. Each of these checks takes some 10 ms for half a million
    # ids.
    if not set(map(type, value)) <= {int} or (
        value and not -_LAST_TOKEN_ID <= min(value) <= max(value) <= _LAST_TOKEN_ID
    ):
        for place, token_id in enumerate(value):
            if type(token_id) is not int or not -_LAST_TOKEN_ID <= token_id <= _LAST_TOKEN_ID:
                wrong_entry(
                    *where, place, f"must be a token id, a whole number from 0 to {_LAST_TOKEN_ID}"
                )
    return value


def wrong_entry(*where_and_what: int | str) -> None:
    """Raises ValidationError for an entry of a value. where_and_what: the entry's location, and the
    message."""
    *where, what = where_and_what
    problem = {"error": ValueError(what)}
    line: Any = {"type": "value_error", "loc": tuple(where), "input": None, "ctx": problem}
    raise ValidationError.from_exception_data("body", [line])


Prompt = Annotated[
    Any,
    PlainValidator(
        lambda given: checked_prompts(given, MAX_PROMPTS),
        json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]],
    ),
]
TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[TokenId])]


class Body(BaseModel):
    """A JSON object without unknown fields; the error names the first unknown field. Any field that
    is null counts as absent."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in fields if name not in known), None)
        if unknown is not None:
            line: Any = {"type": "extra_forbidden", "loc": (unknown,), "input": None}
            raise ValidationError.from_exception_data("body", [line])
        return fields


class StreamOptions(Body):
    """include_usage: a last chunk with the usage of all. continuous_usage_stats: the usage so far
    in every chunk. include_obfuscation: OpenAI's padding against who counts bytes; there is
    none."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: Literal[False] | None = None


class SloFields(Body):
    """Targets in milliseconds: to the first token, between two tokens (99th percentile), to the
    last token, between two tokens (the longest)."""

    ttft_ms: Number | None = None
    tbt_ms: Number | None = None
    jct_ms: Number | None = None
    max_tbt_ms: Number | None = None


_Name = Annotated[Text, Field(max_length=64)]
_Value = Annotated[Text, Field(max_length=512)]
Metadata = Annotated[dict[_Name, _Value], _few(MAX_METADATA)]
"""As many entries as OpenAI accepts."""


class Unused(Body):
    """Fields of every call that change no answer here: names of callers, metadata, and options
    that are accepted only with the value that describes what this server does anyway."""

    user: Text | None = None
    safety_identifier: Text | None = None
    metadata: Metadata | None = None
    store: StrictBool | None = None  # completions and chats are never stored
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None


_TOO_LONG = f"has more than {MAX_GRAMMAR} characters"


def _short(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema's text, as the engine makes it. Of a long schema, only the beginning is made
    here."""
    size = 0
    for piece in json.JSONEncoder().iterencode(schema):
        size += len(piece)
        if size > MAX_GRAMMAR:
            raise ValueError(_TOO_LONG)
    return schema


JsonSchema = Annotated[dict[str, Any], AfterValidator(_short)]
JsonSchemaText = JsonSchema | StrictBool | Text


Choices = Annotated[list[Text], Field(max_length=MAX_CHOICES, fail_fast=True)]


@functools.lru_cache(64)
def _relaxed(text: str) -> tuple[str, tuple[str, ...]]:
    """Text of the `relaxed` schema, from the schema's text. Takes up to a tenth of a second."""
    schema, places = relaxed(json.loads(text))
    return json.dumps(schema), tuple(places)


class NamedSchema(Body):
    """A JSON Schema in OpenAI's form. strict: whether the schema is refused if a grammar cannot
    hold all of it; otherwise the text is held to as much as possible."""

    name: Text
    description: Text | None = None
    json_schema: Annotated[JsonSchema, Field(alias="schema")]
    strict: StrictBool | None = None

    @model_validator(mode="after")
    def _read(self) -> NamedSchema:
        """Reads the schema during validation, which is off the event loop for long bodies."""
        with contextlib.suppress(InvalidRequest):
            self.held()
        return self

    def held(self) -> tuple[Grammar, Sequence[str]]:
        """The grammar of the text, and the places of keywords that no grammar can hold it to.
        Raises InvalidRequest."""
        if self.strict:
            return Grammar.json_schema(self.json_schema), ()
        try:
            text, places = _relaxed(json.dumps(self.json_schema))
        except (MemoryError, RecursionError):
            raise InvalidRequest("grammar.json_schema", "takes too much to be read") from None
        return Grammar.json_schema(text), places


class ResponseFormat(Body):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """The same in vLLM's form; exactly one field is set."""

    json_schema: Annotated[JsonSchemaText | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    json_object: Literal[True] | None = None


StopStrings = Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]


class Targeted(Unused):
    """The common fields of all calls for the model: model, cache and SLO targets."""

    model: Text | None = None
    service_tier: Literal["auto", "default", "priority", "fast", "scale", "flex"] | None = None
    priority: Int64 | None = None  # as in vLLM, lower is earlier; mapped to two tiers
    cache_salt: Text | None = None
    # For the router before several replicas, and to find the program that the call continues.
    prompt_cache_key: Annotated[Text, Field(max_length=MAX_CACHE_KEY)] | None = None
    # Fields of our own.
    request_id: Text | None = None
    slo: SloFields | Text | None = None  # targets, or the name of a class
    slo_class: Text | None = None
    tier: Literal["realtime", "best_effort"] | None = None
    serve_late: StrictBool | None = None


class OneAnswer(Targeted):
    """The common fields of all calls that generate. Those of programs are our own."""

    program: Text | None = None
    program_deadline_ms: Number | None = None
    expected_calls: Whole | None = None
    program_over: StrictBool | None = None

    temperature: Number | None = None
    top_p: Number | None = None
    stop: Text | StopStrings | None = None
    seed: Int64 | None = None
    presence_penalty: Number | None = 0.0
    frequency_penalty: Number | None = 0.0
    logit_bias: Annotated[dict[Text, Number], _few(MAX_LOGIT_BIAS)] | None = None
    stream: StrictBool | None = False
    # As in vLLM; its -1 for top_k is 0 here.
    top_k: Int32 | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int32 | None = None
    ignore_eos: StrictBool | None = None
    deterministic: StrictBool | None = None  # our own
    stop_token_ids: (
        Annotated[list[Whole], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    # The format of the text, as in vLLM.
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None


class Generation(OneAnswer):
    """The common fields of completions and chats."""

    n: Whole | None = 1
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Int32 | None = 16
    logprobs: Whole | None = None
    echo: StrictBool | None = False
    best_of: Whole | None = None
    suffix: Literal[""] | None = None  # inserting into a text is not supported


class TextPart(Body):
    """A part of a message, of any of OpenAI's types for text. The fields after refusal come from
    answers, or are for the caches of other servers; no model reads them."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: StrictStr | None = None
    refusal: StrictStr | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        kind = value.get("type", "text") if isinstance(value, dict) else "text"
        if kind not in _TEXT_PARTS:
            raise ValueError(f"{kind!r:.80} parts are not served, only text")
        return value

    @model_validator(mode="after")
    def _whole(self) -> TextPart:
        wanted, other = ("refusal", "text") if self.type == "refusal" else ("text", "refusal")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"a part of the type {self.type} has {wanted}, and no {other}")
        return self

    @property
    def said(self) -> str:
        """The part's text."""
        return self.text or self.refusal or ""


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def _as_text(arguments: Any) -> Any:
    """Arguments as text: some clients send the object itself."""
    return compact(arguments) if isinstance(arguments, dict) else arguments


class FunctionCall(Body):
    """A model's earlier call of a function. arguments: JSON, possibly malformed; only the chat
    template reads it. parsed_arguments: the same, parsed; OpenAI's client adds it to answers and
    sends it back."""

    name: Text
    arguments: Annotated[StrictStr, BeforeValidator(_as_text)] = ""
    parsed_arguments: Any = None


class ToolCall(Body):
    """A call in an assistant's turn. index: its index, which OpenAI's client keeps from streams.
    extra_content, provider_specific_fields: fields of gateways' answers, which their clients send
    back."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Int32 | None = None
    extra_content: Any = None
    provider_specific_fields: Any = None

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


ToolName = Annotated[StrictStr, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Checks a tool's schema. All tools together are short enough to be encoded at once."""
    if len(json.dumps(schema)) > MAX_GRAMMAR:
        raise ValueError(_TOO_LONG)
    fault = schema_problem(schema)
    if fault is not None:
        where, problem = fault
        raise ValueError(f"{where}: {problem}" if where else problem)
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]


class FunctionTool(Body):
    """A function that the model may ask for. parameters: JSON Schema of its arguments, which are an
    object; without it, the function takes no arguments. strict: whether the arguments always match
    it."""

    name: ToolName
    description: Annotated[Text, Field(max_length=MAX_DESCRIPTION)] | None = None
    parameters: Parameters | None = None
    strict: StrictBool | None = None


class ToolField(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: FunctionTool

    def plain(self) -> Tool:
        """The tool as the rest of the server knows it."""
        function = self.function
        parameters = NOTHING if function.parameters is None else function.parameters
        return Tool(function.name, function.description or "", parameters, bool(function.strict))


class ChosenFunction(Body):
    """The name of a function."""

    name: Text


class ChosenTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


def known_choice(value: Any) -> Any:
    """Returns `tool_choice` as it is. Raises ValueError if it has another form."""
    if not isinstance(value, dict) and value not in ("none", "auto", "required"):
        raise ValueError("must be none, auto, required, or an object that names a function")
    return value


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool, BeforeValidator(known_choice)
]


def different_names(names: Sequence[str], *where: str) -> None:
    """Raises ValidationError if two tools have the same name. where: location of the name."""
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            wrong_entry(place, *where, f"two tools are named {name!r}")
        seen.add(name)


def short_together(tools: Any) -> Any:
    """Returns the tools as they are. Raises ValueError if they have too much text, before any of it
    is parsed."""
    size = 0
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict):
            size += len(compact(function.get("parameters", function.get("input_schema"))))
            size += len(about) if isinstance(about := function.get("description"), str) else 0
        if size > MAX_TOOLS_TEXT:
            problem = f"have more than {MAX_TOOLS_TEXT:,} characters"
            raise ValueError(f"{problem}; {MAX_TOOLS_TEXT:,} are allowed")
    return tools


def _different(tools: list[ToolField]) -> list[ToolField]:
    different_names([tool.function.name for tool in tools], "function", "name")
    return tools


Tools = Annotated[
    list[ToolField],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(short_together),
    AfterValidator(_different),
]


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


TextParts = Annotated[list[TextPart], Field(max_length=MAX_TEXT_PARTS, fail_fast=True)]


def joined(content: str | list[TextPart] | None) -> str:
    """A content's text."""
    if isinstance(content, str):
        return content
    return "".join(part.said for part in content or ())


class Prediction(Body):
    """The likely output: it is used for drafts if the policy speculates."""

    type: Literal["content"]
    content: StrictStr | TextParts


class Message(Body):
    """One turn of a chat. An assistant's turn may have tool calls, and a tool's turn answers one.
    function_call and the role function are OpenAI's older form of the same. reasoning: vLLM's name
    for an assistant's reasoning_content. The fields after tool_call_id come from answers of OpenAI
    or a gateway, and clients send them back; no model reads them."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | TextParts | None = None
    name: Text | None = None
    refusal: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    tool_calls: ToolCalls | None = None
    function_call: FunctionCall | None = None
    tool_call_id: Text | None = None
    parsed: Any = None
    annotations: list[Any] | None = None
    phase: Text | None = None
    cache_control: dict[str, Any] | None = None
    provider_specific_fields: Any = None

    @model_validator(mode="after")
    def _whole(self) -> Message:
        if self.role == "assistant":
            return self
        for name in ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning"):
            if getattr(self, name):
                raise ValueError(f"only an assistant has {name}")
        if self.role != "tool" and self.tool_call_id:
            raise ValueError("only a tool has a tool_call_id")
        if self.content is None:
            raise ValueError("content is required, but of an assistant")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        text = joined(self.content or self.refusal)
        further: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        further["tool_calls"] = [call.plain() for call in self.tool_calls or ()]
        if self.function_call is not None:
            call = ToolCall.model_construct(id=_NO_ID, type="function", function=self.function_call)
            further["tool_calls"].append(call.plain())
        further["reasoning_content"] = self.reasoning_content or self.reasoning
        function = {name: value for name, value in further.items() if value}
        return {
            "role": _TOOL if self.role == "function" else self.role,
            "content": text,
            **function,
        }


_TOOL = "tool"
_NO_ID = "call00000"
"""The id of a call that has none, in a form that every template accepts."""


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Whole | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None = None
    prediction: Prediction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    thinking_token_budget: Int32 | None = None  # as in vLLM
    # These fields change nothing.
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool = True


def predicted_text(body: Targeted) -> str:
    """The likely output, if the chat gives one; else empty."""
    prediction = body.prediction if isinstance(body, ChatRequest) else None
    return "" if prediction is None else joined(prediction.content)


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a chat."""

    model: Text | None = None
    prompt: StrictStr | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool = True


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Text
    lora_path: Text


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter. lora_int_id: vLLM's number of the adapter, which vLLM ignores,
    too."""

    lora_name: Text
    lora_int_id: Int32 | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


class ErrorLoad(BaseModel):
    """The engine's load: continuations, and the share of blocks in use."""

    running: int
    waiting: int
    kv_cache_usage: float


class ErrorDetail(BaseModel):
    """param: the field that is wrong. retry_after_ms, load: when the same call may succeed, and how
    busy the engine is, if the client may try again."""

    message: str
    type: str
    param: str | None
    code: str | None
    retry_after_ms: int | None = None
    load: ErrorLoad | None = None


class ErrorReply(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail
