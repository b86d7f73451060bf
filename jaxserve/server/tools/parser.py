"""Finds calls of tools in text that comes in pieces, however it is cut."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from jaxserve.server.tools.calls import Arguments, CallBegin, Content, Piece, Tool

T = TypeVar("T")
Steps = Generator[None, None, T]
"""What a parser does until it needs more text, then goes on with; and what it finds."""
_SPACE = re.compile(r"\s*")
_SLICE = 2048  # characters
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class ValueEnd:
    """Finds where a JSON object ends in text that comes in pieces. It counts brackets outside of
    strings; whether what is between them is JSON it does not look at.

    Args:
        depth: brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._inside, self._escaped = depth, False, False

    def feed(self, text: str) -> int | None:
        """The place behind the last bracket; None where it is not in this piece."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while (found := (_INSIDE if self._inside else _OUTSIDE).search(text, at)) is not None:
            at = found.end()
            mark = found[0]
            if mark == '"':
                self._inside = not self._inside
            elif mark == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


class TextParser(ABC):
    """Says what the text of one continuation is made of. The same text gives the same, however it
    is cut."""

    def __init__(self) -> None:
        self._held, self._ended = "", False
        self._pieces: list[Piece] = []
        self._steps = self._run()

    def feed(self, text: str) -> list[Piece]:
        """What can be told with this text, which follows the one before."""
        found: list[Piece] = []
        # Each step looks at all that is held, and copies it.
        for start in range(0, len(text), _SLICE):
            self._held += text[start : start + _SLICE]
            found += self._go()
        return found

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text. Nothing may be fed after it."""
        self._ended = True
        return self._go()

    def _go(self) -> list[Piece]:
        next(self._steps, None)
        found, self._pieces = self._pieces, []
        return found

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Reads what is held, and appends pieces; it ends at the end of the text alone."""

    # What parsers are made of.

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _up_to(self, markers: Sequence[str], tell: Callable[[str], None]) -> Steps[str | None]:
        """Tells what stands before the next of the markers, which is read and returned; None at the
        end of the text."""
        while True:
            at = [(self._held.find(marker), marker) for marker in markers]
            found = min(((place, -len(m), m) for place, m in at if place >= 0), default=None)
            if found is not None:
                tell(self._take(found[0]))
                return self._take(len(found[2]))
            keep = 0 if self._ended else _unsure(self._held, markers)
            tell(self._take(len(self._held) - keep))
            if self._ended:
                return None
            yield

    def _skip_space(self) -> Steps[str]:
        """Reads white space, up to what follows it or the end."""
        skipped: list[str] = []
        while True:
            found = _SPACE.match(self._held)
            assert found is not None
            skipped.append(self._take(found.end()))
            if self._held or self._ended:
                return "".join(skipped)
            yield

    def _literal(self, *texts: str) -> Steps[str]:
        """Which of these follows, the longest; then it is read. "" if none does."""
        while not self._ended and any(
            len(self._held) < len(text) and text.startswith(self._held) for text in texts
        ):
            yield
        found = max(filter(self._held.startswith, texts), key=len, default="")
        return self._take(len(found))

    def _until(self, text: str, most: int) -> Steps[str | None]:
        """What stands before this, if that is at most so many characters; both are read. Else None,
        and nothing is."""
        while (at := self._held.find(text, 0, most + len(text))) < 0:
            if self._ended or len(self._held) >= most + len(text):
                return None
            yield
        before = self._take(at)
        self._take(len(text))
        return before


class CallParser(TextParser):
    """Says what is content and what are calls. All that is not part of a call is content, but for
    white space around calls.

    A call begins once its name and the beginning of its arguments are known; from then on its
    arguments are told as they come. If the text breaks off or goes wrong behind that, what was told
    stays, and the rest is content.

    Args:
        tools: those that may be called. A call of another one is content.
        most: calls that are taken; further ones are content. None: any number.
        alone: whether a text with calls is nothing else, so that behind content there are none.
        forced: whether the text is calls and nothing else: what it ends with may be a call that was
            cut off before it began, which is no content.
    """

    markers: tuple[str, ...] = ()
    """Texts that begin a call wherever they stand."""

    def __init__(
        self,
        tools: Sequence[Tool],
        most: int | None = None,
        *,
        alone: bool = False,
        forced: bool = False,
    ) -> None:
        super().__init__()
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self._left, self._alone, self._forced = most, alone, forced
        self._space, self._after_call = "", False

    def _run(self) -> Steps[None]:
        yield from self._beginning()
        while (marker := (yield from self._text())) is not None:
            yield from self._after(marker)
        if not (self._after_call or self._forced) and self._space:
            self._pieces.append(Content(self._space))

    def _beginning(self) -> Steps[None]:
        """Calls that the text begins with, in formats where they need no marker."""
        yield from ()

    @abstractmethod
    def _after(self, marker: str) -> Steps[None]:
        """What follows a marker, which has been read. What is no call is content."""

    # What formats are made of.

    @property
    def _may_call(self) -> bool:
        return self._left is None or self._left > 0

    def _text(self) -> Steps[str | None]:
        """Content up to the next marker, which is read; None at the end."""
        while True:
            markers = self.markers if self._may_call else ()
            found = yield from self._up_to(markers, self._content)
            if found is None or self._may_call:
                return found
            self._content(found)

    def _content(self, text: str) -> None:
        """White space at its end is told only when it is clear that no call follows."""
        if self._forced and self._ended:
            return
        text = self._space + text
        told = text.rstrip()
        self._space = text[len(told) :]
        if told:
            self._pieces.append(Content(told))
            self._after_call = False
            self._left = 0 if self._alone else self._left

    def _begin(self, name: str) -> None:
        if self._left is not None:
            self._left -= 1
        self._pieces.append(CallBegin(name))
        self._space, self._after_call = "", True

    def _arguments(self, text: str) -> None:
        if text:
            self._pieces.append(Arguments(text))


def _unsure(text: str, markers: Sequence[str]) -> int:
    """Characters at its end that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(len(text), longest), 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0
