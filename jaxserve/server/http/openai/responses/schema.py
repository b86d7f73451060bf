"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    model_validator,
)

from jaxserve.server.http.openai.schema import (
    MAX_MESSAGES,
    MAX_TEXT_PARTS,
    MAX_TOOLS,
    Body,
    FunctionCall,
    FunctionTool,
    Int32,
    JsonSchema,
    OneAnswer,
    Text,
    TextPart,
    Whole,
    different_names,
    known_choice,
    short_together,
)

MAX_ID = 256
"""Most characters in the id of an item, a call or a response."""
MAX_ITEMS = MAX_MESSAGES
"""Most items of a call's input, and of a conversation."""
_Id = Annotated[Text, Field(max_length=MAX_ID)]
_Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(TextPart):
    """A part of a message, or of a call's output."""

    def plain(self) -> dict[str, Any]:
        """As it is kept."""
        if self.type == "refusal":
            return {"type": self.type, "refusal": self.refusal}
        return _text_part("input_text" if self.type == "text" else self.type, self.text or "")


def _text_part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": []} if kind == "output_text" else part


ContentParts = Annotated[list[ContentPart], Field(max_length=MAX_TEXT_PARTS, fail_fast=True)]


class MessageItem(Body):
    """A turn of any role. phase: whether OpenAI's model meant it as the final answer; no model here
    reads it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: StrictStr | ContentParts
    id: _Id | None = None
    status: _Status | None = None
    phase: Text | None = None

    def plain(self) -> dict[str, Any]:
        """The item as it is stored: its content in parts."""
        if isinstance(self.content, str):
            kind = "output_text" if self.role == "assistant" else "input_text"
            parts = [_text_part(kind, self.content)]
        else:
            parts = [part.plain() for part in self.content]
        return {"type": "message", "role": self.role, "content": parts}


class CallItem(FunctionCall):
    """A model's call of a function."""

    type: Literal["function_call"]
    call_id: _Id
    id: _Id | None = None
    status: _Status | None = None

    def plain(self) -> dict[str, Any]:
        """As it is kept."""
        said = {"name": self.name, "arguments": self.arguments}
        return {"type": self.type, "call_id": self.call_id, **said}


class CallOutputItem(Body):
    """The output of a call."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: StrictStr | ContentParts
    id: _Id | None = None
    status: _Status | None = None

    def plain(self) -> dict[str, Any]:
        """As it is kept."""
        output: Any = self.output
        if not isinstance(output, str):
            output = [part.plain() for part in output]
        return {"type": self.type, "call_id": self.call_id, "output": output}


class ReasoningPart(Body):
    """A part of a model's thoughts."""

    type: Literal["reasoning_text"]
    text: StrictStr


class SummaryPart(Body):
    """A part of a summary of thoughts; no model reads it."""

    type: Literal["summary_text"]
    text: StrictStr


_Reasoning = Annotated[list[ReasoningPart], Field(max_length=MAX_TEXT_PARTS, fail_fast=True)]
_Summary = Annotated[list[SummaryPart], Field(max_length=MAX_TEXT_PARTS, fail_fast=True)]


class ReasoningItem(Body):
    """A model's thoughts before its text. encrypted_content: another server's form of them, which
    no model here reads."""

    type: Literal["reasoning"]
    summary: _Summary | None = None
    content: _Reasoning | None = None
    id: _Id | None = None
    status: _Status | None = None
    encrypted_content: StrictStr | None = None

    def plain(self) -> dict[str, Any]:
        """As it is kept."""
        summary = [part.model_dump() for part in self.summary or ()]
        content = [part.model_dump() for part in self.content or ()]
        return {"type": self.type, "summary": summary, "content": content}


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _type(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else value.type
    return "message" if kind is None else kind


def _served(value: Any) -> Any:
    if not isinstance(value, dict | Body):
        raise ValueError("must be an object")
    if _type(value) not in _ITEMS:
        kinds = ", ".join(_ITEMS)
        raise ValueError(f"{_type(value)!r:.80} items are not served, only {kinds}")
    return value


Item = Annotated[
    Annotated[MessageItem, Tag("Item[message]")]
    | Annotated[CallItem, Tag("Item[function_call]")]
    | Annotated[CallOutputItem, Tag("Item[function_call_output]")]
    | Annotated[ReasoningItem, Tag("Item[reasoning]")],
    Discriminator(lambda value: f"Item[{_type(value)}]"),
    BeforeValidator(_served),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class ResponseTool(FunctionTool):
    """One of `tools`. strict: as in OpenAI's API, the default is strict here, as far as a grammar
    can hold the schema."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        kind = value.get("type", "function") if isinstance(value, dict) else "function"
        if kind != "function":
            raise ValueError(f"{kind!r:.80} tools are not served, only functions")
        return value


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Text


def _different(tools: list[ResponseTool]) -> list[ResponseTool]:
    different_names([tool.name for tool in tools], "name")
    return tools


class TextFormat(Body):
    """The format of the text. strict: as in `NamedSchema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    json_schema: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class TextOptions(Body):
    """Options of the text. verbosity: changes nothing, as in chats."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """Options of thinking. summary: auto means none here, since all thoughts are returned in
    full."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    """include_obfuscation: OpenAI's padding against traffic analysis; there is none."""

    include_obfuscation: Literal[False] | None = None


LOGPROBS = "message.output_text.logprobs"
_Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponseRequest(OneAnswer):
    """POST /v1/responses. include: log-probabilities of the text. encrypted_content is accepted,
    but clients need not send it back, since reasoning is returned as plain text."""

    input: StrictStr | Items
    instructions: StrictStr | None = None
    previous_response_id: _Id | None = None
    store: StrictBool | None = None
    max_output_tokens: Int32 | None = None
    tools: (
        Annotated[
            list[ResponseTool],
            Field(max_length=MAX_TOOLS, fail_fast=True),
            BeforeValidator(short_together),
            AfterValidator(_different),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | NamedTool, BeforeValidator(known_choice)]
        | None
    ) = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[_Include], Field(max_length=8, fail_fast=True)] | None = None
    top_logprobs: Whole | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Int32 | None = None  # as in chats
