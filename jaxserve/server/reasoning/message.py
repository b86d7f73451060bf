"""Splits a model's text into thoughts, content and calls of tools."""

from __future__ import annotations

from jaxserve.server.reasoning.parser import ReasoningParser
from jaxserve.server.tools.calls import Content, Piece
from jaxserve.server.tools.parser import CallParser


class MessageParser:
    """Splits the text of one continuation into its parts. Calls stand outside of thoughts. The
    result does not depend on how the text was cut into pieces.

    Args:
        reasoning: finds thoughts; None if there are none.
        calls: finds calls; None if no tool may be called.
    """

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> list[Piece]:
        """Takes the next text and returns the parts that are certain by now."""
        if self._reasoning is None:
            return self._rest(text)
        return self._without_calls(self._reasoning.feed(text))

    def finish(self) -> list[Piece]:
        """The parts held back at the end of the text. Nothing may be fed after it."""
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
