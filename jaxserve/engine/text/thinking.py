"""Follows a text through the thought before its answer.

A thought is found in the bytes of the tokens, so it does not matter with which tokens a model
writes the markers around it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxserve.sched.request import Thinking


class Phase(enum.Enum):
    """Where a text is in relation to its thought."""

    BEFORE = enum.auto()  # a thought may begin
    INSIDE = enum.auto()
    CLOSING = enum.auto()  # the budget is spent
    BEHIND = enum.auto()


class State(NamedTuple):
    """The state of a text.

    Attributes:
        phase: its phase.
        tail: its last bytes, which may be part of a marker.
        left: tokens that are left for the thought.
        closed: tokens of the forced end so far.
    """

    phase: Phase
    tail: bytes = b""
    left: int = 0
    closed: int = 0


class ThoughtSpan:
    """Follows a text through its thought. It has no state of its own.

    Args:
        thinking: where the thought begins and ends.
        piece: the bytes of a token.

    Attributes:
        start: the state at the text's beginning.
        begins, ends: the markers around the thought.
        budget: most tokens of the thought.
    """

    def __init__(self, thinking: Thinking, piece: Callable[[int], bytes]) -> None:
        self._piece, self._close = piece, len(thinking.close)
        self.begins = tuple(text.encode() for text in thinking.begins)
        self.ends = tuple(text.encode() for text in thinking.ends)
        self._keep = max(map(len, self.ends)) - 1
        self.budget = sys.maxsize if thinking.budget is None else thinking.budget
        self.start = State(Phase.BEFORE) if self.begins else self._inside(b"", self.budget)

    def after(self, state: State, token: int) -> State:
        """The state after the next token."""
        match state.phase:
            case Phase.BEFORE:
                return self._begun((state.tail + self._piece(token)).lstrip())
            case Phase.INSIDE:
                return self._inside(state.tail + self._piece(token), state.left - 1)
            case Phase.CLOSING if state.closed + 1 < self._close:
                return state._replace(closed=state.closed + 1)
        return State(Phase.BEHIND)

    def _begun(self, text: bytes) -> State:
        for begin in self.begins:
            if text.startswith(begin):
                return self._inside(text[len(begin) :], self.budget)
        may = any(begin.startswith(text) for begin in self.begins)
        return State(Phase.BEFORE, text) if may else State(Phase.BEHIND)

    def _inside(self, text: bytes, left: int) -> State:
        if any(end in text for end in self.ends):
            return State(Phase.BEHIND)
        return State(Phase.INSIDE if left > 0 else Phase.CLOSING, text[-self._keep :], left)


class ThoughtCount:
    """Counts the tokens of a thought, including the markers around it.

    Args:
        span: how thoughts are marked.

    Attributes:
        tokens: number of thought tokens so far.
    """

    def __init__(self, span: ThoughtSpan) -> None:
        self._span, self._state, self._seen = span, span.start, 0
        self.tokens = 0

    def feed(self, tokens: Iterable[int]) -> None:
        """Takes the next tokens."""
        for token in tokens:
            if self._state.phase is Phase.BEHIND:
                return
            was, self._state = self._state, self._span.after(self._state, token)
            self._seen += 1
            if was.phase is not Phase.BEFORE or self._state.phase is Phase.INSIDE:
                self.tokens = self._seen
