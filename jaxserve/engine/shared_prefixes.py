"""Which earlier request each request shares a prefix with, for recordings: by the keys of their
blocks, without their tokens."""

from __future__ import annotations

from collections.abc import Sequence

MOST_KEYS = 1 << 20  # remembered keys; the oldest are forgotten first


class SharedPrefixes:
    """Finds the earlier request with the longest common prefix.

    Args:
        block_size: Tokens of a block.
        most: Most remembered keys.
    """

    def __init__(self, block_size: int, most: int = MOST_KEYS) -> None:
        self._block_size, self._most = block_size, most
        self._number: dict[bytes, int] = {}  # by key, the last request with such a block

    def arrived(self, number: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """Takes a new request with the keys of its prompt's full blocks. Returns the number of the
        earlier request with the longest common prefix, and its length in tokens, a multiple of a
        block; 0 and 0 if there is none."""
        known = self._number
        low, high = 0, len(keys)  # a request with a key has all keys before it
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in known else (low, middle)
        found = (known[keys[low - 1]], low * self._block_size) if low else (0, 0)
        self.wrote(number, keys)
        return found

    def wrote(self, number: int, keys: Sequence[bytes]) -> None:
        """Takes the keys of a request's text so far, including its answer."""
        for key in reversed(keys):  # so that the first ones are forgotten last
            self._number.pop(key, None)
            self._number[key] = number
        while len(self._number) > self._most:
            del self._number[next(iter(self._number))]
