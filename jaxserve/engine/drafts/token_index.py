"""Finds earlier occurrences of a text's last tokens, in a time that does not grow with the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

END = -1  # not a token: stands before and between texts
WINDOW = 32  # tokens; longest match that is recognised
CANDIDATES = 8  # places that are compared
MOST = 1 << 16  # most tokens of an index; NumPy sorts 16 bits by radix
_LEFT, _RIGHT = 0x9E3779B1, 0x85EBCA77  # odd, so that all bits of a token count
_MASK = 0xFFFFFFFF
_EMPTY = array("i", [0]) * (WINDOW + 1)


class TokenIndex:
    """A growing text that knows where each pair of its tokens last occurred.

    A table by the pair's hash gives the last place, and each place the one before. A place is the
    position of the token after the pair. Windows are compared as single large numbers, so that a
    text of one repeated token costs no more than any other.

    Args:
        limit: most tokens that it holds, 2 to MOST. When it is full, the older half is dropped. A
        token takes 12 to 18 bytes while there is room, 12 at the limit if that is a power of 2.
        tokens: its first tokens.

    Attributes:
        dropped: tokens that it no longer holds. Positions count them.
    """

    def __init__(self, limit: int, tokens: Sequence[int] = ()) -> None:
        assert 2 <= limit <= MOST
        self.dropped = 0
        self._keep, self._limit = limit // 2, limit
        self._text = array("i", [END]) * WINDOW  # so that a whole window can be compared
        self._index(len(tokens))
        self.extend(tokens)

    def __len__(self) -> int:
        """Number of tokens that it holds."""
        return len(self._text) - WINDOW

    @property
    def nbytes(self) -> int:
        """Bytes of its text and tables."""
        return sum(4 * len(one) for one in (self._text, self._before, self._last))

    def append(self, token: int) -> None:
        """Appends a token."""
        text = self._text
        if len(text) >= self._room:
            self._index(1)
            text = self._text
        slot = ((text[-1] * _LEFT + token * _RIGHT) & _MASK) >> self._shift
        text.append(token)
        self._before.append(self._last[slot])
        self._last[slot] = len(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens; of too many, only the last, half of the limit."""
        new = np.array(tokens[-self._keep :], np.int32)
        if len(self._text) + len(new) > self._room:
            self._index(len(new))
        self._enter(new)

    def longest(self, known: TokenIndex, guess: int) -> tuple[int, int]:
        """Finds where the end of a text occurred here.

        Args:
            known: the text; may be this one.
            guess: a position to try, too, preferred if it is as good; 0 for none.

        Returns:
            The position after the longest match among the places compared, and the match's length,
            below 2 if there is none.
        """
        text, whole = known._text, self._text
        held = len(text) - WINDOW
        if held < 2:
            return 0, 0
        if known is self:
            place = self._before[-1]
        else:
            place = self._last[((text[-2] * _LEFT + text[-1] * _RIGHT) & _MASK) >> self._shift]
        found = best = 0
        guess -= self.dropped
        guessed = WINDOW < guess < len(whole)
        if not place and not guessed:
            return 0, 0
        end = int.from_bytes(text[-WINDOW:], "little")
        if guessed:
            best, found = _common(whole, guess, end), guess
        for _ in range(CANDIDATES):
            if not place or best == WINDOW:
                break
            # It is longer only if one more token is equal, which is rare.
            if whole[place - 1 - best] == text[-1 - best]:
                common = _common(whole, place, end)
                if common > best:
                    best, found = common, place
            place = self._before[place]
        return found + self.dropped, min(best, held)

    def following(self, position: int, most: int) -> list[int]:
        """At most `most` tokens from `position` to the end of the text. At the end it continues
        with the tokens from `position` on again."""
        begin = position - self.dropped
        tokens = self._text[begin : begin + most].tolist()
        if END in tokens:
            return tokens[: tokens.index(END)]
        return (tokens * (most // max(len(tokens), 1) + 1))[:most]

    def _index(self, more: int) -> None:
        """Rebuilds the tables with room for `more` tokens, less than half of the limit."""
        text = self._text
        over = len(text) - WINDOW + more > self._limit
        if over:
            drop = max(len(text) - WINDOW - self._keep, 0)
            self.dropped += drop
            text = text[:WINDOW] + text[WINDOW + drop :]
        held = len(text) - WINDOW
        wanted = (held + more) * 5 // 4 + 256  # an output of usual length needs no other rebuild
        bits = min((wanted - 1).bit_length(), (self._limit - 1).bit_length())
        self._room = WINDOW + min(1 << bits, self._limit)
        self._shift = 32 - bits
        self._text, self._before = text[:WINDOW], _EMPTY[:]
        self._last = array("i", [0]) * (1 << bits)
        self._enter(np.frombuffer(text, np.int32)[WINDOW:])

    def _enter(self, new: np.ndarray) -> None:
        if not len(new):
            return
        begin = len(self._text)
        self._text.frombytes(new.tobytes())
        view = np.frombuffer(self._text, np.uint32)[begin - 1 :]
        pairs = view[:-1] * np.uint32(_LEFT) + view[1:] * np.uint32(_RIGHT)
        slots = (pairs >> np.uint32(self._shift)).astype(np.uint16)
        order = np.argsort(slots, kind="stable")
        slots, places = slots[order], (order + begin + 1).astype(np.int32)
        changes = np.flatnonzero(slots[1:] != slots[:-1])
        first, last = np.append(0, changes + 1), np.append(changes, len(slots) - 1)
        table = np.frombuffer(self._last, np.int32)
        before = np.empty_like(places)
        earlier = np.append(np.int32(0), places[:-1])
        earlier[first] = table[slots[first]]
        before[order] = earlier
        table[slots[last]] = places[last]
        self._before.frombytes(before.tobytes())


def _common(text: array[int], place: int, end: int) -> int:
    """How many tokens before `place` equal the last ones of a window, given as the number `end`."""
    differ = int.from_bytes(text[place - WINDOW : place], "little") ^ end
    return WINDOW - (differ.bit_length() + 31) // 32
