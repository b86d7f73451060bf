"""Finds tool calls in text that comes in pieces."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from jaxserve.server.tools.calls import Arguments, CallBegin, Content, Piece, Tool

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parser as a generator: it yields when it needs more text, and returns its result."""
_SPACE = re.compile(r"\s*")
_SLICE = 2048  # characters
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class ValueEnd:
    """Finds where a JSON object ends in text that comes in pieces. It counts brackets outside of
    strings, and does not check that the rest is JSON.

    Args:
        depth: brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._inside, self._escaped = depth, False, False

    def feed(self, text: str) -> int | None:
        """The index after the last bracket; None if it is not in this piece."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while (match := (_INSIDE if self._inside else _OUTSIDE).search(text, at)) is not None:
            at = match.end()
            mark = match[0]
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
    """Splits the text of one continuation into its parts. The result does not depend on how the
    text was cut into pieces."""

    def __init__(self) -> None:
        self._held, self._ended = "", False
        self._pieces: list[Piece] = []
        self._steps = self._run()

    def feed(self, text: str) -> list[Piece]:
        """Takes the next text and returns the parts that are certain by now."""
        match: list[Piece] = []
        # Each step reads and copies all text that is held.
        for start in range(0, len(text), _SLICE):
            self._held += text[start : start + _SLICE]
            match += self._go()
        return match

    def finish(self) -> list[Piece]:
        """The parts held back at the end of the text. Nothing may be fed after it."""
        self._ended = True
        return self._go()

    def _go(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Reads the held text and appends pieces. It only ends at the end of the text."""

    # Parts that parsers are made of.

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _up_to(self, markers: Sequence[str], tell: Callable[[str], None]) -> Steps[str | None]:
        """Passes on the text before the next of the markers, then reads and returns the marker;
        None at the end of the text."""
        while True:
            at = [(self._held.find(marker), marker) for marker in markers]
            first = min(((place, -len(m), m) for place, m in at if place >= 0), default=None)
            if first is not None:
                tell(self._take(first[0]))
                return self._take(len(first[2]))
            keep = 0 if self._ended else _unsure(self._held, markers)
            tell(self._take(len(self._held) - keep))
            if self._ended:
                return None
            yield

    def _skip_space(self) -> Steps[str]:
        """Reads white space up to other text or the end."""
        skipped: list[str] = []
        while True:
            match = _SPACE.match(self._held)
            assert match is not None
            skipped.append(self._take(match.end()))
            if self._held or self._ended:
                return "".join(skipped)
            yield

    def _literal(self, *texts: str) -> Steps[str]:
        """Reads and returns the longest of these texts that follows; "" if none does."""
        while not self._ended and any(
            len(self._held) < len(text) and text.startswith(self._held) for text in texts
        ):
            yield
        match = max(filter(self._held.startswith, texts), key=len, default="")
        return self._take(len(match))

    def _until(self, text: str, most: int) -> Steps[str | None]:
        """Reads up to and including this text, and returns what was before it. If that has more
        than `most` characters, reads nothing and returns None."""
        while (at := self._held.find(text, 0, most + len(text))) < 0:
            if self._ended or len(self._held) >= most + len(text):
                return None
            yield
        before = self._take(at)
        self._take(len(text))
        return before


class CallParser(TextParser):
    """Splits text into content and calls. All text outside of calls is content, except white space
    around them.

    A call begins once its name and the beginning of its arguments are known; from then on its
    arguments are passed on as they come. If the text then breaks off or is malformed, the arguments
    so far stay, and the rest is content.

    Args:
        tools: the tools that may be called. A call of another tool is content.
        most: most calls; further ones are content. None: any number.
        alone: whether a text with calls has no other content, so that no call can follow content.
        forced: whether the text consists of calls only. Its end may then be a call that was cut off
            early, which is not content.
    """

    markers: tuple[str, ...] = ()
    """Texts that begin a call anywhere."""

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
        """Reads calls at the text's beginning, in formats where they need no marker."""
        yield from ()

    @abstractmethod
    def _after(self, marker: str) -> Steps[None]:
        """Reads what follows a marker. Text that is not a call is content."""

    # What formats are made of.

    @property
    def _may_call(self) -> bool:
        return self._left is None or self._left > 0

    def _text(self) -> Steps[str | None]:
        """Reads content up to the next marker, and returns the marker; None at the end."""
        while True:
            markers = self.markers if self._may_call else ()
            marker = yield from self._up_to(markers, self._content)
            if marker is None or self._may_call:
                return marker
            self._content(marker)

    def _content(self, text: str) -> None:
        """Passes on content. White space at its end is held back until it is clear that no call
        follows."""
        if self._forced and self._ended:
            return
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if stripped:
            self._pieces.append(Content(stripped))
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
    """Number of characters at the text's end that may begin a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(len(text), longest), 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0
