"""Turns Ollama's calls into chats and completions: they are served as such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.server.http.ollama.schema import (
    GenerateRequest,
    Generating,
    OllamaChatRequest,
    OllamaMessage,
)
from jaxserve.server.http.openai.schema import (
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    Message,
    NamedSchema,
    ResponseFormat,
    Targeted,
    ToolCall,
)
from jaxserve.server.tools.calls import compact

_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", *_RENAMED),
)
NAMES = (
    (r"response_format\.json_schema\.schema|response_format", "format"),
    (r"reasoning_effort", "think"),
    *((ours, f"options.{theirs}") for theirs, ours in _RENAMED.items()),
    *((name, f"options.{name}") for name in _SAMPLED if name not in _RENAMED),
)
"""Fields of chats and completions, and of Ollama's calls, for `renaming`."""
_CALL_ID = "call{:05}"  # nine letters and digits, as some templates want them
LATEST = ":latest"


def model_named(model: str | None) -> str | None:
    """The model without the tag that Ollama's clients add to names that have none."""
    return None if model is None else model.removesuffix(LATEST)


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    """The chat that serves a call of /api/chat."""
    messages = list(_messages(body.messages or ()))
    return ChatRequest.model_construct(**_fields(body), messages=messages, tools=body.tools)


def prompted_chat(body: GenerateRequest) -> ChatRequest:
    """The chat that serves a call of /api/generate."""
    messages = [_message("user", body.prompt)]
    if body.system:
        messages.insert(0, _message("system", body.system))
    return ChatRequest.model_construct(**_fields(body), messages=messages)


def completion_of(body: GenerateRequest, room: int) -> CompletionRequest:
    """The completion that serves such a call without a template. room: tokens that fit after its
    prompt."""
    fields = _fields(body)
    del fields["reasoning_effort"]
    fields["max_tokens"] = min(fields.get("max_tokens", room), room)
    return CompletionRequest.model_construct(**fields, prompt=body.prompt)


def _fields(body: Generating) -> dict[str, Any]:
    """The fields that chats and completions have, too."""
    fields = {name: getattr(body, name) for name in Targeted.model_fields}
    fields["model"] = model_named(body.model)
    options = {} if body.options is None else body.options.model_dump(exclude_none=True)
    if options.get("num_predict", 0) < 0:  # any number
        del options["num_predict"]
    sampled = {_RENAMED.get(name, name): options[name] for name in _SAMPLED if name in options}
    think = body.think
    effort = {True: "medium", False: "none"}[think] if isinstance(think, bool) else think
    form = None
    if body.format == "json":
        form = ResponseFormat.model_construct(type="json_object")
    elif body.format:
        schema = NamedSchema.model_construct(name="format", json_schema=body.format)
        form = ResponseFormat.model_construct(type="json_schema", json_schema=schema)
    return {**fields, **sampled, "reasoning_effort": effort, "response_format": form}


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[Message]:
    """The chat. Calls get ids, and results those of the calls that they follow."""
    count, open_calls = 0, list[tuple[str, str]]()
    for message in messages:
        calls = []
        for entry in message.tool_calls or ():
            function = entry.function
            call_id = entry.id or _CALL_ID.format(count)
            count += 1
            calls.append(
                ToolCall.model_construct(
                    id=call_id,
                    type="function",
                    function=FunctionCall.model_construct(
                        name=function.name, arguments=compact(function.arguments)
                    ),
                )
            )
            open_calls.append((call_id, function.name))
        more: dict[str, Any] = {}
        if message.role == "tool":
            same = (call for call in open_calls if call[1] == message.tool_name)
            answered = next(same, open_calls[0] if open_calls else ("", ""))
            if answered in open_calls:
                open_calls.remove(answered)
            more = {"tool_call_id": message.tool_call_id or answered[0] or None}
            more["name"] = message.tool_name or answered[1] or None
        elif message.role == "assistant":
            more = {"tool_calls": calls, "reasoning_content": message.thinking}
        yield _message(message.role, message.content, **more)


def _message(role: str, content: str, **more: Any) -> Message:
    return Message.model_construct(role=role, content=content, **more)
