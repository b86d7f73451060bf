"""Restricts a model's thought to a number of tokens, and its answer to a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from jaxserve.engine.device.sampling import mask_words
from jaxserve.engine.text.grammars import GrammarMatcher, has
from jaxserve.engine.text.thinking import Phase, State, ThoughtSpan
from jaxserve.sched.request import Thinking


class MarkerTokens:
    """The tokens of a vocabulary that are part of the markers around thoughts. Thread-safe.

    Args:
        piece: the bytes of a token.
        vocab_size: tokens of the vocabulary.
        eos_ids: tokens that may end a text.
    """

    def __init__(
        self, piece: Callable[[int], bytes], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self.piece = piece
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self.beginning = lru_cache(16)(self._beginning)
        self.ending = lru_cache(16)(self._ending)

    def only(self, token: int) -> np.ndarray:
        """Mask that allows only this token."""
        return self._mask((token,))

    def any(self, *but: int) -> np.ndarray:
        """Mask that allows all tokens but these."""
        return ~self._mask([*but, *range(self._vocab_size, 32 * mask_words(self._vocab_size))])

    def find(self, thinking: Thinking) -> None:
        """Prepares the masks that a `ThinkingMatcher` with a grammar needs; the first time this
        takes a fraction of a second."""
        for begin in thinking.begins:
            self.beginning(begin.encode())
        for end in thinking.ends:
            self.ending(end.encode())

    def _beginning(self, begin: bytes) -> list[np.ndarray]:
        """Masks of the tokens that continue the marker, by the number of its bytes so far."""
        found: list[list[int]] = [[] for _ in begin]
        for token in range(self._vocab_size):
            piece = self.piece(token)
            for place in range(len(begin)):
                text = piece if place else piece.lstrip()
                rest = begin[place:]
                if text and (rest.startswith(text) or text.startswith(rest)):
                    found[place].append(token)
        return [self._mask(tokens) for tokens in found]

    def _ending(self, end: bytes) -> list[np.ndarray]:
        """Masks of all tokens but those that end a text and those that continue after the end
        marker, by the number of its bytes so far. The grammar would not see the continuation."""
        found: list[list[int]] = [list(self._eos_ids) for _ in end]
        for token in range(self._vocab_size):
            piece = self.piece(token)
            if end[-1:] not in piece:
                continue
            if end in piece and piece.partition(end)[2].strip():
                found[0].append(token)
            for place in range(1, len(end)):
                rest = end[place:]
                if piece.startswith(rest) and piece[len(rest) :].strip():
                    found[place].append(token)
        return [self.any(*tokens) for tokens in found]

    def _mask(self, tokens: Sequence[int]) -> np.ndarray:
        bits = np.zeros(32 * mask_words(self._vocab_size), np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


class ThinkingMatcher:
    """The state of one continuation that may think: a `Matcher`.

    Args:
        thinking: where the thought begins and ends, and how long it may be.
        tokens: marker tokens of the model.
        grammar: makes the state of the answer in its grammar; None without one.
    """

    def __init__(
        self,
        thinking: Thinking,
        tokens: MarkerTokens,
        grammar: Callable[[], GrammarMatcher] | None,
    ) -> None:
        self._span, self._tokens = ThoughtSpan(thinking, tokens.piece), tokens
        self._close, self._any = thinking.close, tokens.any()
        self._state = self._span.start
        # As long as no thought has begun, the text may be the answer.
        self._answer, self._may_answer = None if grammar is None else grammar(), True
        self._fresh = self._answer if grammar is None or not self._span.begins else grammar()

    def holds(self, ahead: int) -> bool:
        """See `Matcher`."""
        state = self._state
        if self._answer is not None or state.phase is Phase.CLOSING:
            return True
        if state.phase is Phase.BEFORE:
            return self._span.budget <= ahead
        return state.phase is Phase.INSIDE and state.left <= ahead

    def feed(self, token: int) -> bool:
        """See `Matcher`."""
        was, self._state = self._state, self._span.after(self._state, token)
        if self._answer is None:
            return False
        if was.phase is Phase.BEHIND:
            return self._answer.feed(token)
        if was.phase is not Phase.BEFORE:
            return False
        allowed = self._answer.mask() if self._may_answer else None
        self._may_answer = allowed is not None and has(allowed, token)
        complete = self._may_answer and self._answer.feed(token)
        if self._state.phase in (Phase.INSIDE, Phase.CLOSING):
            self._answer = self._fresh
        return complete and self._state.phase is Phase.BEHIND

    def mask(self) -> np.ndarray | None:
        """See `Matcher`."""
        return self._mask_at(self._state)

    def masks_along(self, tokens: Sequence[int]) -> list[np.ndarray | None]:
        """See `Matcher`."""
        masks, state = [self._mask_at(self._state)], self._state
        for place, token in enumerate(tokens):
            allowed = masks[-1]
            if allowed is None or not has(allowed, token) or not self._certain(state):
                break
            if state.phase is Phase.BEHIND and self._answer is not None:
                return masks[:-1] + self._answer.masks_along(tokens[place:])
            state = self._span.after(state, token)
            masks.append(self._mask_at(state))
        return masks + [None] * (len(tokens) + 1 - len(masks))

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """See `Matcher`."""
        state = self._state
        for place, token in enumerate(tokens):
            if state.phase is Phase.BEHIND:
                rest = tokens[place:]
                answer = self._answer
                return place + (len(rest) if answer is None else answer.valid_prefix(rest))
            allowed = self._mask_at(state)
            if not self._certain(state) or allowed is None or not has(allowed, token):
                return place
            state = self._span.after(state, token)
        return len(tokens)

    def forced(self, most: int) -> list[int]:
        """See `Matcher`."""
        state = self._state
        if state.phase is Phase.CLOSING:
            return list(self._close[state.closed : state.closed + most])
        if state.phase is Phase.BEHIND and self._answer is not None:
            return self._answer.forced(most)
        return []

    @property
    def problem(self) -> str:
        """See `Matcher`."""
        return "" if self._answer is None else self._answer.problem

    def _certain(self, state: State) -> bool:
        """Whether the state determines what may follow; it does not where the text may already be
        the answer, whose grammar would have to be advanced."""
        return state.phase is not Phase.BEFORE or self._answer is None

    def _mask_at(self, state: State) -> np.ndarray | None:
        match state.phase:
            case Phase.CLOSING:
                return self._tokens.only(self._close[state.closed])
            case _ if self._answer is None:
                return self._any
            case Phase.BEHIND:
                return self._answer.mask()
            case Phase.BEFORE:
                return self._first(state, self._answer)
        allowed = self._any
        for end in self._span.ends:
            for place, mask in enumerate(self._tokens.ending(end)):
                if state.tail.endswith(end[:place]):
                    allowed = allowed & mask
        return allowed

    def _first(self, state: State, answer: GrammarMatcher) -> np.ndarray | None:
        """The first tokens of an answer, and those that open a thought."""
        found = answer.mask() if self._may_answer else None
        for begin in self._span.begins:
            if begin.startswith(state.tail):
                opens = self._tokens.beginning(begin)[len(state.tail)]
                found = opens if found is None else found | opens
        return found if found is not None and found.any() else None
