"""Turns messages into a chat: they are served as chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.http.anthropic.schema import (
    Conversation,
    MessageTool,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from jaxserve.server.http.openai.schema import (
    ChatRequest,
    ChosenFunction,
    ChosenTool,
    FunctionCall,
    FunctionTool,
    Message,
    NamedSchema,
    OneAnswer,
    ResponseFormat,
    ToolCall,
    ToolField,
)
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.tools.calls import compact

NAMES = (
    (r"response_format\.json_schema\.schema|response_format", "output_config.format.schema"),
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"reasoning_effort", "output_config.effort"),
    (r"stop", "stop_sequences"),
)
"""Fields of chats, and of messages, for `renaming`."""
_SHARED = {*OneAnswer.model_fields, "max_tokens", "chat_template_kwargs"} - {"service_tier"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"enabled": "medium", "adaptive": "medium", "disabled": "none"}
_BILLING = "x-anthropic-billing-header:"
"""Begins a system text that Claude Code sends for Anthropic's own servers. It differs with each
call, so no prompt would begin like another."""


def as_chat(body: Conversation, template: ChatTemplate) -> ChatRequest:
    """The chat that serves a call.

    Args:
        body: the call's body.
        template: the model's chat template.

    Raises:
        InvalidRequest: If the result of a call comes without the call.
    """
    fields: dict[str, Any] = {
        name: getattr(body, name) for name in body.model_fields_set if name in _SHARED
    }
    config, choice, thinking = body.output_config, body.tool_choice, body.thinking
    effort = None if thinking is None else _EFFORTS[thinking.type]
    if config is not None and config.effort is not None and effort != "none":
        effort = config.effort
    if thinking is not None and template.reasoning_format is not None:
        # A model that does not think keeps any budget.
        fields["thinking_token_budget"] = thinking.budget_tokens
    if choice is not None:
        fields["tool_choice"] = _choice(choice.type, choice.name)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if config is not None and config.format is not None:
        schema = NamedSchema.model_construct(name="output", json_schema=config.format.json_schema)
        form = ResponseFormat.model_construct(type="json_schema", json_schema=schema)
        fields["response_format"] = form
    return ChatRequest.model_construct(
        **fields,
        messages=list(_messages(body)),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        reasoning_effort=effort,
    )


def check_turns(turns: Sequence[Turn]) -> None:
    """Raises InvalidRequest if the answer would have to go on with a text that the client has
    begun."""
    if turns[-1].role == "assistant":
        problem = "is assistant in the last turn, but a text that is begun there is not continued"
        raise InvalidRequest(f"messages.{len(turns) - 1}.role", problem)


def _messages(body: Conversation) -> Iterator[Message]:
    """The chat's messages. Consecutive turns of a role are one."""
    system = body.system
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    said = "\n\n".join(text for text in texts if not text.startswith(_BILLING))
    if said:
        yield _message("system", said)
    called: set[str] = set()
    last = Message.model_construct(role="", content="")
    for place, turn in enumerate(body.messages):
        called.update(block.id for block in turn.blocks if isinstance(block, ToolUseBlock))
        _check_results(turn, called, f"messages.{place}.content")
        for message in _assistant(turn) if turn.role == "assistant" else _others(turn):
            if message.role == last.role and message.role in ("user", "assistant"):
                message = _merged(last, message)
            elif last.role:
                yield last
            last = message
    if last.role:
        yield last


def _check_results(turn: Turn, called: set[str], where: str) -> None:
    for place, block in enumerate(turn.blocks):
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
            problem = f"there is no tool_use {block.tool_use_id!r:.80} before it"
            raise InvalidRequest(f"{where}.{place}.tool_use_id", problem)


def _assistant(turn: Turn) -> Iterator[Message]:
    calls = [
        ToolCall.model_construct(
            id=block.id,
            type="function",
            function=FunctionCall.model_construct(name=block.name, arguments=compact(block.input)),
        )
        for block in turn.blocks
        if block.type == "tool_use"
    ]
    thought = [block.thinking for block in turn.blocks if block.type == "thinking"]
    said = _joined(turn.blocks)
    yield _message("assistant", said, reasoning_content="\n\n".join(thought), tool_calls=calls)


def _others(turn: Turn) -> Iterator[Message]:
    """The turn's results, each a message, and its texts between them."""
    said: list[TextBlock] = []
    for block in turn.blocks:
        if isinstance(block, TextBlock):
            said.append(block)
            continue
        if said:
            yield _message(turn.role, _joined(said))
            said = []
        content = block.content
        text = content if isinstance(content, str) else _joined(content or ())
        told = f"Error: {text}" if block.is_error else text
        yield _message("tool", told, tool_call_id=block.tool_use_id)
    if said or not turn.blocks:
        yield _message(turn.role, _joined(said))


def _merged(first: Message, then: Message) -> Message:
    def both(*texts: str | None) -> str:
        return "\n\n".join(filter(None, texts))

    return _message(
        first.role,
        both(str(first.content), str(then.content)),
        reasoning_content=both(first.reasoning_content, then.reasoning_content),
        tool_calls=[*(first.tool_calls or ()), *(then.tool_calls or ())],
    )


def _joined(blocks: Sequence[Any]) -> str:
    return "\n\n".join(block.text for block in blocks if block.type == "text")


def _message(role: str, content: str, **more: Any) -> Message:
    return Message.model_construct(role=role, content=content, **more)


def _choice(kind: str, name: str | None) -> Any:
    if kind != "tool":
        return _CHOICES[kind]
    function = ChosenFunction.model_construct(name=name)
    return ChosenTool.model_construct(type="function", function=function)


def _tool(tool: MessageTool) -> ToolField:
    function = FunctionTool.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return ToolField.model_construct(type="function", function=function)
