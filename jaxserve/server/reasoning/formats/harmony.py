"""Messages in channels: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxserve.server.reasoning.parser import ReasoningParser
from jaxserve.server.reasoning.registry import ReasoningFormat, register
from jaxserve.server.tools.calls import Content, Reasoning
from jaxserve.server.tools.parser import Steps

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ROLE = f"{_START}assistant"
_HEADS = (_CHANNEL, " to=", "to=")
_MOST = 256  # characters of a header
_KNOWN = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\s*")


class _Parser(ReasoningParser):
    """What is said in `analysis` is thought. Messages to somebody, which are calls, stay as they
    are written; of all others only their text is told, in lines of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: set[type] = set()

    def _run(self) -> Steps[None]:
        while self._held or not self._ended:
            if not self._held:
                yield
                continue
            begin = yield from self._literal(_ROLE, _START)
            head = yield from self._literal(*_HEADS)
            rest = (yield from self._until(_MESSAGE, _MOST)) if head else None
            if rest is None:  # no message
                self._content(begin + head)
                yield from self._body(self._content, _CHANNEL, _START)
                continue
            known = _KNOWN.fullmatch(head + rest)
            if known is None:
                self._content(head + rest + _MESSAGE)
                end = yield from self._body(self._content, _CHANNEL, _START, *_ENDS)
                self._content(end)
            elif known[1] == "analysis":
                self._line(Reasoning)
                yield from self._body(self._think, _CHANNEL, _START, *_ENDS)
                self._thought()
            else:
                self._line(Content)
                yield from self._body(self._content, _CHANNEL, _START, *_ENDS)

    def _body(self, tell: Callable[[str], None], *ends: str) -> Steps[str]:
        """Up to one of these, which is returned; it is read if no message begins with it."""
        end = (yield from self._up_to(ends, tell)) or ""
        if end in (_CHANNEL, _START):
            self._held, end = end + self._held, ""
        return end

    def _line(self, kind: type[Content | Reasoning]) -> None:
        if kind in self._lines:
            self._pieces.append(kind("\n"))
        self._lines.add(kind)


@register
class Harmony(ReasoningFormat):
    """Every text is a list of messages, and each says in which channel it is."""

    name = "harmony"
    signs = ("<|channel|>analysis", "<|channel|>final")
    rank = -1
    markers = (_START, _CHANNEL, _MESSAGE, *_ENDS, "<|constrain|>")
    history = "thinking"

    def parser(self, prompt: str) -> _Parser:
        """See `ReasoningFormat`."""
        made = _Parser()
        _, role, begun = prompt[-_MOST:].rpartition(_ROLE)
        if role and not any(end in begun for end in _ENDS):
            made.feed(begun)
        return made
