"""A sketch of a prefix cache in a few kilobytes, with which routers estimate how much of a prompt a
replica would find.

It is a Bloom filter of the keys of blocks at the depths in `MARKS`, each about a quarter deeper
than the one before, so that a prompt of any length has few of them. A key consists of random bytes,
and four parts of it are its four places in the filter. A router looks up the marks of a prompt from
the first on, until a place is not set. A place may have been set by other keys, so a mark is
falsely found with probability `fill ** 4`: at most 1.2%, since a sketch grows as needed for that,
up to `PLACES` (3,300 marks; with 10,000 it is 25%). A false mark adds only the prompt's next
quarter, since the marks before it have to be found, too.
"""

from __future__ import annotations

import array
import base64
import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from struct import Struct

import numpy as np

PLACES = 1 << 15  # bits of the largest sketch: 4 KiB
HASHES = 4  # bits per key
KEY_BYTES = 4 * HASHES
FULL = 0.33  # share of bits that may be set before a sketch doubles its size
_LEAST = 64  # places
_DEEPEST = 1 << 20  # blocks of a prompt
_unpack = Struct(f"<{HASHES}I").unpack_from


def _depths() -> Iterable[int]:
    depth = 1
    while depth < _DEEPEST:
        yield depth
        depth = max(depth + 1, depth * 5 // 4)


MARKS = tuple(_depths())
"""How many blocks of a prompt each of its marks stands for."""


def marks_of(keys: Sequence[bytes], blocks: int) -> bytes:
    """The keys of a prompt's marks, one after another.

    Args:
        keys: Keys of its full blocks, KEY_BYTES each.
        blocks: How many of them it may find; one less than all if it ends with a block, since the
        last token has to be computed.
    """
    most = min(blocks, len(keys))
    return b"".join(keys[n - 1] for n in itertools.takewhile(lambda n: n <= most, MARKS))


@functools.lru_cache(4)  # a router asks twice, to choose and to note its choice
def places_of(marks: bytes) -> np.ndarray:
    """The places of each mark, int64 [marks, HASHES]. marks: from `marks_of`."""
    return np.frombuffer(marks, "<u4").reshape(-1, HASHES).astype(np.int64) & (PLACES - 1)


class PrefixSketch:
    """Counts the keys that set each place, so that keys can be removed. One thread changes it, any
    thread may ask for `text`."""

    def __init__(self) -> None:
        self._counts = array.array("i", bytes(4 * PLACES))

    def add(self, keys: Sequence[bytes], start: int = 0, count: int = 1) -> None:
        """Adds consecutive blocks, or removes them.

        Args:
            keys: Their keys. Those that are not of KEY_BYTES are left out, since routers cannot use
            them.
            start: Number of blocks before them.
            count: 1, or -1 to take them out.
        """
        counts, end = self._counts, start + len(keys)
        for mark in range(bisect.bisect_right(MARKS, start), bisect.bisect_right(MARKS, end)):
            key = keys[MARKS[mark] - 1 - start]
            if len(key) == KEY_BYTES:
                for place in _unpack(key):
                    counts[place & (PLACES - 1)] += count

    def text(self) -> str:
        """The filter in base64, the first place in the lowest bit of the first byte. A small filter
        is the large one folded: place p becomes p modulo its size."""
        bits = np.frombuffer(self._counts, np.int32) > 0
        while len(bits) > _LEAST:
            half = bits[: len(bits) // 2] | bits[len(bits) // 2 :]
            if np.count_nonzero(half) > FULL * len(half):
                break
            bits = half
        return base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()


def unfolded(text: str) -> np.ndarray:
    """The filter of a sketch in full size, uint8 [PLACES / 8]. text: from `PrefixSketch.text`.
    Raises ValueError for anything else."""
    given = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if not len(given) or (PLACES // 8) % len(given):
        raise ValueError(f"a sketch has a power of two of places, at most {PLACES}")
    return np.tile(given, PLACES // 8 // len(given))
