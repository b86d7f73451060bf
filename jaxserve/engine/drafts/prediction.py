"""Drafts of a client's own prediction of the output."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from jaxserve.engine.drafts.draft import Draft, strength_of

PREDICTION = "prediction"
MOST_TOKENS = 65_536  # used tokens of a prediction, 4 bytes each
AHEAD = 1024  # tokens that are searched for the place where the output continues
FIRM = 4  # predicted tokens in a row that are no coincidence
_TRIES = 8


class Prediction:
    """A drafter that follows a prediction from its beginning. If the output differs from it, the
    drafter continues at the nearest place of the last two tokens, after the last place at which
    prediction and output agreed for several tokens.

    Args:
        tokens: the likely output; used up to MOST_TOKENS.
    """

    name = PREDICTION

    def __init__(self, tokens: Sequence[int]) -> None:
        self._bytes = array("i", tokens[:MOST_TOKENS]).tobytes()
        self._tokens = memoryview(self._bytes).cast("i")
        self._next, self._run = 0, 0  # expected index, and number of tokens in a row that agreed
        self._firm, self._last = 0, -1
        self._lost = False

    def append(self, token: int) -> None:
        """See `Drafter`."""
        if not self._lost and self._next < len(self._tokens) and self._tokens[self._next] == token:
            self._next += 1
            self._run += 1
            if self._run >= FIRM:
                self._firm = self._next
        else:
            self._lost, self._run = True, 0
            if self._last >= 0:
                self._find(array("i", (self._last, token)).tobytes())
        self._last = token

    def propose(self, most: int) -> Draft | None:
        """See `Drafter`."""
        tokens = self._tokens[self._next : self._next + most]
        if self._lost or not tokens:
            return None
        return Draft(tuple(tokens), self.name, strength_of(self._run))

    def _find(self, pair: bytes) -> None:
        """Continues after the pair's nearest occurrence, if there is one."""
        at, end = 4 * self._firm, 4 * (self._firm + AHEAD)
        for _ in range(_TRIES):
            at = self._bytes.find(pair, at, end)
            if at < 0:
                return
            if at % 4 == 0:
                self._next, self._run, self._lost = at // 4 + 2, 2, False
                return
            at += 1  # not at a token boundary
