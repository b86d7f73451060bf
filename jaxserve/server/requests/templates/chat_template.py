"""Renders chats as prompts, by the checkpoint's own template or as plain lines.

Templates are Hugging Face's: Jinja, in tokenizer_config.json or in a file beside it. If there are
several, `tool_use` is for chats with tools, and `default` for other chats. A template gets
`messages`, the special tokens and `add_generation_prompt`. Since it is a program of unknown origin,
it runs in a separate process (`template_process.py`).
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from jaxserve.checkpoints import tokenizer_files
from jaxserve.config import ConfigError, ServerConfig
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.reasoning import registry as reasoning_formats
from jaxserve.server.requests.templates.template_limits import MAX_SOURCE
from jaxserve.server.requests.templates.template_process import TemplateFailed, TemplateProcess
from jaxserve.server.requests.templates.template_turns import TemplateTurns
from jaxserve.server.tools import registry as tool_formats
from jaxserve.server.tools.arguments import as_json
from jaxserve.server.tools.calls import Tool, as_openai, compact
from jaxserve.server.tools.described import has_calls, in_words, with_tools_described

log = logging.getLogger(__name__)

_NAMES = tokenizer_files.DEFAULT, tokenizer_files.TOOL_USE
_FIELD = "chat_template_kwargs"
_OF_THE_CALL = ("messages", "add_generation_prompt", "tools")
_HISTORY = "reasoning_content"
_EFFORT, _SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")
_SHORT_MESSAGES, _SHORT_CHARACTERS = 100, 1 << 15
_MAX_VALUES, _MAX_DEPTH = 10_000, 8

Message = Mapping[str, Any]
T = TypeVar("T")


class ChatTemplate:
    """Renders chats. Thread-safe.

    Args:
        source: the checkpoint's Jinja template; None renders each turn as a line with its role, for
            models that were not trained on chats.
        tool_source: the template for chats with tools, if it is a different one.
        special: special tokens by the templates' names for them, such as bos_token.
        tool_format: as `server.tool_format`.
        reasoning_format: as `server.reasoning_format`.

    Attributes:
        own: whether the checkpoint has a template. Such a template writes the special tokens
            itself.
        tool_format: how the model writes calls of tools.
        reasoning_format: how the model writes thoughts; None if it has none.

    Raises:
        TemplateFailed: If the source cannot be compiled.
        ConfigError: If there is no such format.
    """

    def __init__(
        self,
        source: str | None = None,
        special: Mapping[str, str] | None = None,
        tool_format: str = "",
        reasoning_format: str = "",
        *,
        tool_source: str | None = None,
    ) -> None:
        self.own = source is not None
        sources = [text for text in dict.fromkeys((source, tool_source)) if text is not None]
        self.tool_format = tool_formats.find_format("".join(sources[-1:]), tool_format)
        self.reasoning_format = reasoning_formats.find_format("".join(sources), reasoning_format)
        self._fixed = {**(special or {}), "documents": None}
        # Separate threads, so that long chats do not hold up short ones.
        self._processes = [TemplateProcess(text) for text in sources for _ in range(2)]
        self.close = weakref.finalize(self, _close, self._processes)
        read = [process.compile() for process in self._processes[::2]]
        self._reads_tools = "tools" in frozenset[str]().union(*read[-1:])
        self._reads = frozenset[str]().union(*read) - {*(special or ()), *_OF_THE_CALL}
        self._turns = [
            TemplateTurns(text, functools.partial(self._rendered, process))
            for text, process in zip(sources, self._processes[::2], strict=True)
        ]

    def submit(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        tenant: str = "",
        tools: Sequence[Tool] | None = None,
    ) -> Future[str]:
        """The text of the prompt for a chat, as a future.

        Args:
            messages: the chat.
            add_generation_prompt: whether the text ends with the start of the model's turn.
            kwargs: more variables for the template, JSON values by name.
            tenant: owner of the chat. Tenants take turns if several chats wait.
            tools: the tools that the model may call. If the template does not support tools, a
                system message describes them, and calls and results are written as text. None: the
                chat has no tools; calls and results are then written as text if the template would
                lose them.

        Raises, here or in the future:
            InvalidRequest: If the template rejects the chat or does not read a variable. QueueFull:
            If other chats take too long. EngineStopped: If the template was closed.
        """
        self._check(kwargs or {})
        if tools is not None and not self._reads_tools:
            messages = with_tools_described(messages, tools, self.tool_format)
            tools = None
        if not self.own:
            plain: Future[str] = Future()
            plain.set_result("".join(map(_line, messages)) + "assistant:" * add_generation_prompt)
            return plain
        which = -1 if tools else 0
        turns = self._turns[which]
        if turns.lose_calls and has_calls(messages):
            messages = in_words(messages, self.tool_format, calls=not turns.has_calls)
        shown = as_openai(tools) if tools else None
        short = _is_short(messages, tools or ()) and not any(
            isinstance(value, str | list | dict) for value in (kwargs or {}).values()
        )
        chat = list(map(self._with_thought, turns.placed(messages)))
        variables = {**self._fixed, **(kwargs or {}), "messages": chat}
        variables |= {"add_generation_prompt": add_generation_prompt, "tools": shown}
        process = self._processes[2 * which + (not short)]
        return process.render(variables, tenant)

    def effort_kwargs(self, effort: str | None) -> dict[str, Any]:
        """The template's variables for an effort (`none`, `low`, `high` and so on); empty if it
        reads no such variable. A template that only knows whether to think gets that."""
        if effort is None:
            return {}
        kwargs: dict[str, Any] = {
            name: effort != "none" for name in _SWITCHES if name in self._reads
        }
        return kwargs | ({_EFFORT: effort} if _EFFORT in self._reads else {})

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """As `submit`, but waits for the result."""
        return self.submit(messages, **options).result()

    def encode(self, text: str, encode: Callable[..., T]) -> T:
        """Encodes a rendered chat with `encode`. Special tokens are added only if the template has
        not written them."""
        return encode(text, special=not self.own)

    def _rendered(
        self, process: TemplateProcess, chats: Sequence[Sequence[Message]]
    ) -> Sequence[str | None]:
        usual = {**self._fixed, "add_generation_prompt": True, "tools": None}
        return process.rendered([{**usual, "messages": chat} for chat in chats])

    def _with_thought(self, message: Message) -> Message:
        """The message with its thoughts in the field where the template looks for them."""
        where = _HISTORY if self.reasoning_format is None else self.reasoning_format.history
        if _HISTORY not in message or where == _HISTORY:
            return message
        copy = dict(message)
        copy[where] = copy.pop(_HISTORY)
        return copy

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        for name, value in kwargs.items():
            if name in _OF_THE_CALL:
                raise InvalidRequest(f"{_FIELD}.{name}", "is a field of the call itself")
            if name not in self._reads:
                read = ", ".join(sorted(self._reads)) or "none at all"
                problem = f"{name[:64]!r} is not read by the model's chat template (read: {read})"
                raise InvalidRequest(_FIELD, problem)
            wrong = _problem(value)
            if wrong is not None:
                raise InvalidRequest(f"{_FIELD}.{name}", wrong)


def _close(processes: Sequence[TemplateProcess]) -> None:
    for process in processes:
        process.close()


def _line(message: Message) -> str:
    functions = (call["function"] for call in message.get("tool_calls", ()))
    calls = "".join(
        f"{function['name']}({as_json(function['arguments'])})" for function in functions
    )
    return f"{message['role']}: {message['content']}{calls}\n"


def _is_short(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    texts = ("content", _HISTORY)
    characters = sum(
        len(message.get(name) or "") for message in messages[:_SHORT_MESSAGES] for name in texts
    )
    calls = any("tool_calls" in message for message in messages[:_SHORT_MESSAGES])
    characters += sum(_size(tool) for tool in tools)
    return len(messages) <= _SHORT_MESSAGES and characters <= _SHORT_CHARACTERS and not calls


def _size(tool: Tool) -> int:
    return len(tool.description) + len(compact(tool.parameters))


def _problem(value: Any) -> str | None:
    """Why the value cannot be passed to a template; None if it can."""
    level, values = [value], 0
    for _ in range(_MAX_DEPTH):
        values += len(level)
        if values > _MAX_VALUES:
            return f"holds more than {_MAX_VALUES:,} values"
        inner: list[Any] = []
        for item in level:
            if isinstance(item, list):
                inner += item
            elif isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, float) and not math.isfinite(item):
                return "holds a number that is not finite"
            elif isinstance(item, int) and item.bit_length() > 63:
                return "holds an integer of more than 64 bits"
        level = inner
        if not level:
            return None
    return f"is nested more than {_MAX_DEPTH} deep"


def load_chat_template(path: str, server: ServerConfig | None = None) -> ChatTemplate:
    """The template of a checkpoint's directory or a GGUF file, or the plain one if it has none.

    Args:
        path: "" for random weights.
        server: settings with the model's formats; None looks for signs in the template.

    Raises:
        ConfigError: If a file or a template cannot be read.
    """
    server = server or ServerConfig()
    formats = server.tool_format, server.reasoning_format
    if not path:
        return ChatTemplate(None, None, *formats)
    folder = Path(path).expanduser()
    try:
        config = tokenizer_files.read_config(folder)
        templates = tokenizer_files.chat_templates(folder, config, MAX_SOURCE)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from None
    special = tokenizer_files.special_tokens(config)
    if not templates:
        return ChatTemplate(None, special, *formats)
    name = next(known for known in (*_NAMES, *templates) if known in templates)
    if name != _NAMES[0]:
        log.warning("%s has no chat template of the name %s (it has %s): %s is used",
                    folder, _NAMES[0], ", ".join(templates), name)  # fmt: skip
    (source, where), (for_tools, _) = templates[name], templates.get(_NAMES[1], (None, None))
    try:
        return ChatTemplate(source, special, *formats, tool_source=for_tools)
    except TemplateFailed as error:
        raise ConfigError(f"model.path: the chat template in {where}: {error}") from None
