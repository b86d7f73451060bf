"""The bodies of POST /v1/messages and of POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable
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
    FunctionTool,
    Int32,
    JsonSchema,
    OneAnswer,
    Parameters,
    StopStrings,
    Text,
    different_names,
    short_together,
    wrong_entry,
)

_Id = Annotated[Text, Field(max_length=256)]
_CacheControl = dict[str, Any] | None
"""Where a cached prefix may end. Prefixes are found anyway, wherever they end."""


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else block.type


def _only(*kinds: str) -> Callable[[Any], Any]:
    """A validator of a block's type."""

    def check(block: Any) -> Any:
        if not isinstance(block, dict | Body):
            raise ValueError("must be an object")
        if _kind(block) not in kinds:
            problem = (
                f"{_kind(block)!r:.80} blocks are not served" if _kind(block) else "has no type"
            )
            raise ValueError(f"{problem}, only {', '.join(kinds)}")
        return block

    return check


class TextBlock(Body):
    """A text. citations: come from answers of other servers; no model reads them."""

    type: Literal["text"]
    text: StrictStr
    citations: list[Any] | None = None
    cache_control: _CacheControl = None


Texts = Annotated[
    list[Annotated[TextBlock, BeforeValidator(_only("text"))]],
    Field(max_length=MAX_TEXT_PARTS, fail_fast=True),
]


class ThinkingBlock(Body):
    """A thought of the model's. signature: a server's own mark, which nothing here reads."""

    type: Literal["thinking"]
    thinking: StrictStr
    signature: StrictStr | None = None


class RedactedThinkingBlock(Body):
    """A thought that another server has encrypted; no model reads it."""

    type: Literal["redacted_thinking"]
    data: StrictStr


class ToolUseBlock(Body):
    """A call of a tool. caller: who made it, if the model may not be the only one."""

    type: Literal["tool_use"]
    id: _Id
    name: Text
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: _CacheControl = None


class ToolResultBlock(Body):
    """What a call has returned. is_error: whether the tool has failed, which the model is told."""

    type: Literal["tool_result"]
    tool_use_id: _Id
    content: StrictStr | Texts | None = None
    is_error: StrictBool | None = None
    cache_control: _CacheControl = None


_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
Block = Annotated[
    Annotated[TextBlock, Tag("Block[text]")]
    | Annotated[ThinkingBlock, Tag("Block[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("Block[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("Block[tool_use]")]
    | Annotated[ToolResultBlock, Tag("Block[tool_result]")],
    Discriminator(lambda block: f"Block[{_kind(block)}]"),
    BeforeValidator(_only(*_BLOCKS)),
]


class Turn(Body):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: StrictStr | Annotated[list[Block], Field(max_length=MAX_TEXT_PARTS, fail_fast=True)]

    @model_validator(mode="after")
    def _of_its_role(self) -> Turn:
        for place, block in enumerate(self.blocks):
            if block.type not in _OF_ROLE[self.role]:
                kinds = ", ".join(_OF_ROLE[self.role])
                problem = f"a turn of the {self.role} has no {block.type}, only {kinds}"
                wrong_entry("content", place, problem)
        return self

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        if not isinstance(self.content, str):
            return self.content
        return [TextBlock.model_construct(type="text", text=self.content)]


class MessageTool(FunctionTool):
    """One of `tools`. What other servers load later, or let other tools call, is not served;
    inputs are streamed as they come, eagerly or not."""

    type: Literal["custom"] | None = None
    parameters: Annotated[Parameters | None, Field(alias="input_schema")]
    cache_control: _CacheControl = None
    eager_input_streaming: StrictBool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_own(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(f"{kind!r:.80} tools are not served, only those with an input_schema")
        return value


def _different(tools: list[MessageTool]) -> list[MessageTool]:
    different_names([tool.name for tool in tools], "name")
    return tools


class ToolChoice(Body):
    """Which tools the model may use. name: the tool, of type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: StrictBool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("a name is for type tool, and needed there")
        return self


class ThinkingOptions(Body):
    """Whether the model thinks, and its most tokens for that. display: omitted leaves the text of
    thoughts out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int32, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _budgeted(self) -> ThinkingOptions:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise ValueError("budget_tokens is for type enabled, and needed there")
        return self


class OutputFormat(Body):
    """The schema of the text."""

    type: Literal["json_schema"]
    json_schema: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(Body):
    """How much the model thinks, and the format of its text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class KeptThoughts(Body):
    """An edit that keeps all thoughts of earlier turns: the chat template says which it shows."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Changes of the conversation: only those that change nothing."""

    edits: Annotated[list[KeptThoughts], Field(max_length=1)] | None = None


class Conversation(Body):
    """What makes the prompt."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: StrictStr | Texts | None = None
    tools: (
        Annotated[
            list[MessageTool],
            Field(max_length=MAX_TOOLS, fail_fast=True),
            BeforeValidator(short_together),
            AfterValidator(_different),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: _CacheControl = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(Conversation, OneAnswer):
    """POST /v1/messages. Both service tiers are the same here."""

    max_tokens: Int32
    stop: Annotated[Text | StopStrings | None, Field(alias="stop_sequences")] = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]


class CountTokensRequest(Conversation):
    """POST /v1/messages/count_tokens."""

    model: Text | None = None


class TokenCount(Body):
    """The answer to it."""

    input_tokens: int
