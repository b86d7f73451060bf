"""Which earlier request each one begins as, for recordings: by the keys of their blocks, so without
their tokens."""

from __future__ import annotations

from collections.abc import Sequence

MOST_KEYS = 1 << 20  # that are remembered; the oldest are forgotten first


class SharedPrefixes:
    """Finds the earlier stream that begins as a prompt does, for the longest.

    Args:
        block_size: Tokens of a block.
        most: Keys that are remembered.
    """

    def __init__(self, block_size: int, most: int = MOST_KEYS) -> None:
        self._block_size, self._most = block_size, most
        self._number: dict[bytes, int] = {}  # the last request that had such a block

    def arrived(self, number: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """A request has come, with the keys of its prompt's full blocks. Returns the number of an
        earlier one that begins as it does, and for how many tokens, a multiple of a block; 0 and 0
        if there is none."""
        known = self._number
        low, high = 0, len(keys)  # who has one has all before it
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in known else (low, middle)
        found = (known[keys[low - 1]], low * self._block_size) if low else (0, 0)
        self.wrote(number, keys)
        return found

    def wrote(self, number: int, keys: Sequence[bytes]) -> None:
        """These are the keys of its stream so far, the answer included."""
        for key in reversed(keys):  # the first ones are the last to be forgotten
            self._number.pop(key, None)
            self._number[key] = number
        while len(self._number) > self._most:
            del self._number[next(iter(self._number))]
