"""What a model's text is made of: thoughts, content, calls of tools."""

from __future__ import annotations

from jaxserve.server.reasoning.parser import ReasoningParser
from jaxserve.server.tools.calls import Content, Piece
from jaxserve.server.tools.parser import CallParser


class MessageParser:
    """Takes the text of one continuation and says what it is made of. Calls stand outside of
    thoughts. The same text gives the same, however it is cut.

    Args:
        reasoning: finds thoughts; None where there are none.
        calls: finds calls; None where nothing may be called.
    """

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> list[Piece]:
        """What can be told with this text, which follows the one before."""
        if self._reasoning is None:
            return self._rest(text)
        return self._without_calls(self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text. Nothing may be fed after it."""
        left = [] if self._reasoning is None else self._without_calls(self._reasoning.finish())
        return left if self._calls is None else [*left, *self._calls.finish()]

    def _rest(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [Content(text)] if text else []

    def _without_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._rest(piece.text) if isinstance(piece, Content) else [piece]
        return found
