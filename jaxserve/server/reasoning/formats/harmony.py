"""Messages in channels: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxserve.server.reasoning.parser import ReasoningParser
from jaxserve.server.reasoning.registry import Calls, ReasoningFormat, Span, register
from jaxserve.server.tools.calls import Content, Reasoning
from jaxserve.server.tools.parser import Steps

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_ROLE = f"{_START}assistant"
_HEADS = (_CHANNEL, " to=", "to=")
_MOST = 256  # characters of a header
_KNOWN = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)\s*(?:<\|constrain\|>\s*\w*\s*)?")
_ANSWERS = tuple(f"{_CHANNEL}final{form}{_MESSAGE}" for form in ("", " <|constrain|>json"))


class _Parser(ReasoningParser):
    """Text in the channel `analysis` is thought. Messages with a recipient are calls and pass as
    they are written. Of all other messages only the text passes, each on its own line."""

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
            header = (yield from self._header()) if head else None
            if header is None:  # not a message
                self._content(begin + head)
                yield from self._body(self._content, _CHANNEL, _START)
                continue
            rest, mark = header
            known = _KNOWN.fullmatch(head + rest)
            if mark != _MESSAGE:  # a message without a text
                if known is None:
                    self._content(head + rest + mark)
            elif known is None:
                self._content(head + rest + mark)
                end = yield from self._body(self._content, _CHANNEL, _START, *_ENDS)
                self._content(end)
            elif known[1] == "analysis":
                self._line(Reasoning)
                yield from self._body(self._think, _CHANNEL, _START, *_ENDS)
                self._thought()
            else:
                self._line(Content)
                yield from self._body(self._content, _CHANNEL, _START, *_ENDS)

    def _header(self) -> Steps[tuple[str, str] | None]:
        """The header before a message's text, or before its end if it has no text, and the mark
        that follows, which is read, too. None if it is not a header."""
        while True:
            at = [(self._held.find(mark, 0, _MOST), mark) for mark in (_MESSAGE, _START, *_ENDS)]
            first = min((place for place in at if place[0] >= 0), default=None)
            if first is not None:
                rest, mark = self._take(first[0]), self._take(len(first[1]))
                if mark == _START:
                    self._held = mark + self._held
                    return rest, ""
                return rest, mark
            if self._ended or len(self._held) >= _MOST:
                return None
            yield

    def _body(self, tell: Callable[[str], None], *ends: str) -> Steps[str]:
        """Reads the text up to the next mark and returns the mark. The mark is read, too, unless it
        begins a message."""
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
    """A text is a list of messages, and each message names its channel."""

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

    def span(self, prompt: str, calls: Calls = Calls.NONE) -> Span | None:
        """See `ReasoningFormat`. Everything before the answer is thought."""
        if calls is Calls.ONLY:
            return Span((f"{_CHANNEL}analysis{_MESSAGE}",), (_ROLE,), f"{_ENDS[0]}{_ROLE}")
        if prompt.endswith(_ANSWERS):
            return None
        ends = (*_ANSWERS, "to=functions.") if calls is Calls.SOME else _ANSWERS
        return Span((), ends, f"{_ENDS[0]}{_ROLE}{_ANSWERS[0]}", _ANSWERS[0])
