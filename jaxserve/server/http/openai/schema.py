"""The bodies of requests: OpenAI's fields, vLLM's further sampling fields, and our own.

A field that is not here is refused by its name; one that is here and cannot be served as asked is
refused too.
"""

from __future__ import annotations

import contextlib
import functools
import json
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
"""Characters of all tools together, as JSON."""
MAX_PROMPTS = 128
"""Prompts of one call."""
MAX_MESSAGES = 10_000
"""Turns of a chat."""
MAX_TEXT_PARTS = 1000
"""Pieces of a turn."""
MAX_TEXT = 1 << 16
"""Characters of a text that is no prompt. MAX_GRAMMAR is as many."""
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_DESCRIPTION = 16_384
"""Characters of what a tool's description says."""
MAX_METADATA = 16
_LAST_TOKEN_ID = (1 << 31) - 1

# Whether a number, NaN among them, or a token id is one that can be served, is found out where all
# frontends' requests are checked.
Number = Annotated[float, Field(strict=True)]


def _whole(given: Any) -> Any:
    """JSON has one kind of numbers: 16.0 is 16."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


Int32 = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=_LAST_TOKEN_ID)]
Text = Annotated[StrictStr, Field(max_length=MAX_TEXT)]


def _few(limit: int) -> BeforeValidator:
    """For objects: of a list pydantic itself stops at the first entry that is wrong."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > limit:
            raise ValueError(f"has {len(given)} entries; at most {limit} are allowed")
        return given

    return BeforeValidator(check)


def checked_prompts(given: Any, most: int) -> str | list[str] | list[int] | list[list[int]]:
    """As `Prompt` has it, `most` of them at most. A union of the four would try each prompt as all
    of them."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError("must be a string, or a list of strings, of token ids or of lists of them")
    if not given or type(given[0]) not in (str, list):
        return _token_ids(given)
    if len(given) > most:
        raise ValueError(f"has {len(given)} prompts; 1 to {most} prompts are taken in a call")
    for place, each in enumerate(given):
        if type(each) is not type(given[0]):
            wrong_entry(place, f"must be as the first prompt, a {_NAMES[type(given[0])]}")
        if isinstance(each, list):
            _token_ids(each, place)
    return given


_NAMES: dict[type, str] = {str: "string", list: "list of token ids"}


def _token_ids(given: Any, *where: int) -> list[int]:
    """Raises ValidationError, which names the first that is none. where: the way to them."""
    if not isinstance(given, list):
        raise ValueError("must be a list of token ids")
    # Booleans are integers to Python. Of half a million ids each of these takes some 10 ms.
    if not set(map(type, given)) <= {int} or (
        given and not -_LAST_TOKEN_ID <= min(given) <= max(given) <= _LAST_TOKEN_ID
    ):
        for place, each in enumerate(given):
            if type(each) is not int or not -_LAST_TOKEN_ID <= each <= _LAST_TOKEN_ID:
                wrong_entry(
                    *where, place, f"must be a token id, a whole number from 0 to {_LAST_TOKEN_ID}"
                )
    return given


def wrong_entry(*where_and_what: int | str) -> None:
    """Raises ValidationError for something within a value. where_and_what: the way to it, and what
    is said of it."""
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
    """A JSON object without unknown fields, of which the first is named. A field that is null
    counts as absent, whatever it is."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in found if name not in known), None)
        if unknown is not None:
            line: Any = {"type": "extra_forbidden", "loc": (unknown,), "input": None}
            raise ValidationError.from_exception_data("body", [line])
        return found


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
"""As much as OpenAI takes."""


class Unused(Body):
    """Fields that clients send and that would change no answer here: names of callers, notes, and
    options in the one value that is what this server does anyway."""

    user: Text | None = None
    safety_identifier: Text | None = None
    metadata: Metadata | None = None
    store: StrictBool | None = None  # nothing is kept to be asked for later
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None


_TOO_LONG = f"has more than {MAX_GRAMMAR} characters"


def _short(schema: dict[str, Any]) -> dict[str, Any]:
    """As the engine has it, which makes its text of it; of a long one only the beginning is made
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
    """`relaxed`, of a schema's text, as text. It takes up to a tenth of a second."""
    schema, places = relaxed(json.loads(text))
    return json.dumps(schema), tuple(places)


class NamedSchema(Body):
    """A JSON Schema as OpenAI has it. strict: whether it is refused if no grammar can hold all of
    it; else what can be held is."""

    name: Text
    description: Text | None = None
    json_schema: Annotated[JsonSchema, Field(alias="schema")]
    strict: StrictBool | None = None

    @model_validator(mode="after")
    def _read(self) -> NamedSchema:
        """Here, as long bodies are validated beside the event loop."""
        with contextlib.suppress(InvalidRequest):
            self.held()
        return self

    def held(self) -> tuple[Grammar, Sequence[str]]:
        """The grammar of a text, and the places of what that does not hold it to, as none can.
        Raises InvalidRequest."""
        if self.strict:
            return Grammar.json_schema(self.json_schema), ()
        try:
            text, places = _relaxed(json.dumps(self.json_schema))
        except (MemoryError, RecursionError):
            raise InvalidRequest("grammar.json_schema", "takes too much to be read") from None
        return Grammar.json_schema(text), places


class ResponseFormat(Body):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """The same as vLLM has it; exactly one of them."""

    json_schema: Annotated[JsonSchemaText | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    json_object: Literal[True] | None = None


StopStrings = Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]


class Targeted(Unused):
    """What all calls for the model have in common: which, whose cache, and by when."""

    model: Text | None = None
    service_tier: Literal["auto", "default", "priority", "fast", "scale", "flex"] | None = None
    priority: Int64 | None = None  # as vLLM has it, the lower the earlier: of two tiers
    cache_salt: Text | None = None
    # For the router before several replicas; a single server does not read it.
    prompt_cache_key: Annotated[Text, Field(max_length=MAX_CACHE_KEY)] | None = None
    # Our own.
    request_id: Text | None = None
    slo: SloFields | Text | None = None  # targets, or the name of a class
    slo_class: Text | None = None
    tier: Literal["realtime", "best_effort"] | None = None
    serve_late: StrictBool | None = None


class OneAnswer(Targeted):
    """What all calls that generate have in common."""

    temperature: Number | None = None
    top_p: Number | None = None
    stop: Text | StopStrings | None = None
    seed: Int64 | None = None
    presence_penalty: Number | None = 0.0
    frequency_penalty: Number | None = 0.0
    logit_bias: Annotated[dict[Text, Number], _few(MAX_LOGIT_BIAS)] | None = None
    stream: StrictBool | None = False
    # As vLLM has them; its -1 for top_k is 0 here.
    top_k: Int32 | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int32 | None = None
    ignore_eos: StrictBool | None = None
    deterministic: StrictBool | None = None  # our own
    stop_token_ids: (
        Annotated[list[Int32], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    # What the text has to be, as vLLM has it.
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None


class Generation(OneAnswer):
    """What completions and chats have in common."""

    n: Int32 | None = 1
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Int32 | None = 16
    logprobs: Int32 | None = None
    echo: StrictBool | None = False
    best_of: Int32 | None = None
    suffix: Literal[""] | None = None  # nothing comes after what is generated


class TextPart(Body):
    """A piece of a message, of whichever of OpenAI's types for text. What stands behind refusal is
    what answers have, or what clients send for other servers' caches; no model reads it."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: StrictStr | None = None
    refusal: StrictStr | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type", "text") if isinstance(given, dict) else "text"
        if kind not in _TEXT_PARTS:
            raise ValueError(f"{kind!r:.80} parts are not served, only text")
        return given

    @model_validator(mode="after")
    def _whole(self) -> TextPart:
        wanted, other = ("refusal", "text") if self.type == "refusal" else ("text", "refusal")
        if getattr(self, wanted) is None or getattr(self, other) is not None:
            raise ValueError(f"a part of the type {self.type} has {wanted}, and no {other}")
        return self

    @property
    def said(self) -> str:
        """Its text."""
        return self.text or self.refusal or ""


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def _as_text(arguments: Any) -> Any:
    """Some clients send the object itself."""
    return compact(arguments) if isinstance(arguments, dict) else arguments


class FunctionCall(Body):
    """What a model once wanted to be called. arguments: JSON, or what was to be it; only whoever
    renders the chat reads it. parsed_arguments: the same, which OpenAI's client adds to answers; it
    sends them back."""

    name: Text
    arguments: Annotated[StrictStr, BeforeValidator(_as_text)] = ""
    parsed_arguments: Any = None


class ToolCall(Body):
    """One of an assistant's turn. index: its place, which OpenAI's client leaves there if it was
    streamed. extra_content, provider_specific_fields: what gateways have in answers; their clients
    send them back."""

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
    """One of a tool. All tools together are short enough to be written down at once."""
    if len(json.dumps(schema)) > MAX_GRAMMAR:
        raise ValueError(_TOO_LONG)
    found = schema_problem(schema)
    if found is not None:
        where, problem = found
        raise ValueError(f"{where}: {problem}" if where else problem)
    return schema


class FunctionTool(Body):
    """A function that the model may ask for. parameters: JSON Schema of its arguments, which are
    an object; without it takes none. strict: the arguments are always valid by it."""

    name: ToolName
    description: Annotated[Text, Field(max_length=MAX_DESCRIPTION)] | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] | None = None
    strict: StrictBool | None = None


class ToolField(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionTool

    def plain(self) -> Tool:
        """As the rest of the server has it."""
        given = self.function
        parameters = NOTHING if given.parameters is None else given.parameters
        return Tool(given.name, given.description or "", parameters, bool(given.strict))


class ChosenFunction(Body):
    """Which one."""

    name: Text


class ChosenTool(Body):
    """The one that is to be called."""

    type: Literal["function"]
    function: ChosenFunction


def known_choice(given: Any) -> Any:
    """As given. Raises ValueError for a `tool_choice` of another form."""
    if not isinstance(given, dict) and given not in ("none", "auto", "required"):
        raise ValueError("must be none, auto, required, or an object that names a function")
    return given


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool, BeforeValidator(known_choice)
]


def different_names(names: Sequence[str], *where: str) -> None:
    """Raises ValidationError for a tool with the name of another. where: the way to the name."""
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            wrong_entry(place, *where, f"two tools are named {name!r}")
        seen.add(name)


def short_together(tools: Any) -> Any:
    """As given. Raises ValueError for tools with too much text, before any of it is looked at."""
    size = 0
    for tool in tools if isinstance(tools, list) else ():
        given = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(given, dict):
            size += len(compact(given.get("parameters", {})))
            size += len(about) if isinstance(about := given.get("description"), str) else 0
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
    """What the output is likely to be: drafts of it are checked where the policy speculates."""

    type: Literal["content"]
    content: StrictStr | TextParts


class Message(Body):
    """One turn of a chat. Those of assistants may have calls of tools, those of tools answer one;
    function_call, and the role function, are the same as OpenAI first had them. reasoning: an
    assistant's reasoning_content, as vLLM has it. All behind tool_call_id is what answers have,
    OpenAI's or a gateway's, and clients send back; no model reads it."""

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
        given = {name: value for name, value in further.items() if value}
        return {"role": _TOOL if self.role == "function" else self.role, "content": text, **given}


_TOOL = "tool"
_NO_ID = "call00000"
"""Of a call that has none, in a form that any template takes."""


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Int32 | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None = None
    prediction: Prediction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    thinking_token_budget: Int32 | None = None  # as vLLM has it
    # They change nothing.
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool = True


def predicted_text(body: Targeted) -> str:
    """What its output is likely to be; empty where it does not say."""
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
    """POST /v1/unload_lora_adapter. lora_int_id: vLLM's number of it, which is ignored there,
    too."""

    lora_name: Text
    lora_int_id: Int32 | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


class ErrorLoad(BaseModel):
    """What the engine has to do: continuations, and the share of blocks in use."""

    running: int
    waiting: int
    kv_cache_usage: float


class ErrorDetail(BaseModel):
    """param: the field that is wrong. retry_after_ms, load: when the same call may succeed, and how
    busy the engine is, where it is the moment that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    retry_after_ms: int | None = None
    load: ErrorLoad | None = None


class ErrorReply(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail
