"""Turns a call into a chat: responses are served as chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.http.openai.responses.schema import (
    LOGPROBS,
    NamedTool,
    ResponseRequest,
    ResponseTool,
    TextFormat,
)
from jaxserve.server.http.openai.schema import (
    ChatRequest,
    ChosenFunction,
    ChosenTool,
    FunctionTool,
    Message,
    NamedSchema,
    OneAnswer,
    ResponseFormat,
    ToolField,
)

_SHARED = {
    *OneAnswer.model_fields,
    *("parallel_tool_calls", "top_logprobs", "chat_template_kwargs", "thinking_token_budget"),
}
NAMES = (
    (r"max_completion_tokens|max_tokens", "max_output_tokens"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format", "text.format"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"prompt|messages", "input"),
)
"""Fields of chats, and of responses, for `renaming`."""


def as_chat(body: ResponseRequest, messages: Sequence[Message], *, strict: bool) -> ChatRequest:
    """The chat that serves a call.

    Args:
        body: the call's body.
        messages: the conversation, without instructions.
        strict: whether tools that do not say so are strict.

    Raises:
        InvalidRequest: If a field has a value that is not supported.
    """
    fields: dict[str, Any] = {
        name: getattr(body, name) for name in body.model_fields_set if name in _SHARED
    }
    if body.instructions is not None:
        instructions = Message.model_construct(role="system", content=body.instructions)
        messages = [instructions, *messages]
    return ChatRequest.model_construct(
        **fields,
        messages=list(messages),
        max_completion_tokens=body.max_output_tokens,
        logprobs=_logprobs(body),
        tools=None if body.tools is None else [_tool(tool, strict) for tool in body.tools],
        tool_choice=_choice(body.tool_choice),
        response_format=_format(body.text.format if body.text else None),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
    )


def is_strict(tool: ResponseTool, default: bool) -> bool:
    """Whether the tool's arguments are held to its schema. default: used if the tool does not
    say."""
    return default if tool.strict is None else tool.strict


def _tool(tool: ResponseTool, strict: bool) -> ToolField:
    function = FunctionTool.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=is_strict(tool, strict),
    )
    return ToolField.model_construct(type="function", function=function)


def _choice(choice: Any) -> Any:
    if not isinstance(choice, NamedTool):
        return choice
    function = ChosenFunction.model_construct(name=choice.name)
    return ChosenTool.model_construct(type="function", function=function)


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    schema = None
    for name in ("name", "schema"):
        value = form.name if name == "name" else form.json_schema
        if form.type == "json_schema" and value is None:
            raise InvalidRequest(f"text.format.{name}", "is missing")
        if form.type != "json_schema" and value is not None:
            raise InvalidRequest(f"text.format.{name}", f"is not for type {form.type}")
    if form.type == "json_schema":
        schema = NamedSchema.model_construct(
            name=form.name, schema=form.json_schema, strict=form.strict
        )
    return ResponseFormat.model_construct(type=form.type, json_schema=schema)


def _logprobs(body: ResponseRequest) -> bool:
    """Whether the call asks for log-probabilities."""
    asked = LOGPROBS in (body.include or ())
    if asked and body.tools and body.tool_choice != "none":
        raise InvalidRequest("include", f"{LOGPROBS} is not served beside tools")
    if body.top_logprobs and not asked:
        raise InvalidRequest("top_logprobs", f"needs include: {LOGPROBS}")
    return asked
