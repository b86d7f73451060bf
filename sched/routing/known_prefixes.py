"""The prefixes that a router expects each replica to have: from its last sketch
(`sched/cache/prefix_sketch.py`) and the requests sent to it since.

Bits of all replicas are stored side by side for each place, so a decision reads a few bytes per
mark, however many prefixes there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from jaxserve.sched.cache.prefix_sketch import HASHES, MARKS, PLACES, places_of, unfolded

MOST_HINTS = 1 << 16  # most remembered hints
MOST_SENT = 1 << 12  # most requests to a replica since its last sketch; then they are forgotten
_BIT = np.uint64(1) << np.arange(64, dtype=np.uint64)
_EIGHT = np.arange(8)
_NOTHING = np.zeros(PLACES // 8, np.uint8)
_BLOCKS = np.array([0, *MARKS], np.float64)  # by number of marks found


class KnownPrefixes:
    """The prefixes of replicas 0 to count - 1.

    Args:
        count: Number of replicas.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._bits = np.zeros((PLACES, -(-count // 64)), "<u8")  # by place, one bit per replica
        self._sketch = np.zeros((count, PLACES // 8), np.uint8)  # last sketch of each replica
        self._sent: list[list[np.ndarray]] = [[] for _ in range(count)]  # places set since
        self._finds = np.ones(count, bool)  # whether it caches prefixes
        # By hint, the replica of its last request, and when its first one was sent. The least
        # recently used comes first.
        self._hints: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def grow(self, count: int) -> None:
        """Adds `count` replicas with the next numbers."""
        self._count += count
        wider = np.zeros((PLACES, -(-self._count // 64)), "<u8")
        wider[:, : self._bits.shape[1]] = self._bits
        self._bits = wider
        more = np.zeros((count, PLACES // 8), np.uint8)
        self._sketch = np.concatenate([self._sketch, more])
        self._sent += [[] for _ in range(count)]
        self._finds = np.concatenate([self._finds, np.ones(count, bool)])

    def forget(self, replica: int) -> None:
        """Forgets a replica that is gone; its number is free for another one."""
        self._finds[replica] = True
        self._set(replica, _NOTHING)
        for hint in [hint for hint, (place, _) in self._hints.items() if place == replica]:
            del self._hints[hint]

    def hear(self, replica: int, sketch: str, since: Iterable[bytes]) -> None:
        """Replaces what was known of the replica by a sketch.

        Args:
            replica: Its number.
            sketch: `Snapshot.sketch`.
            since: Marks of the requests that were sent there after it was made.
        """
        self._finds[replica] = bool(sketch)
        self._set(replica, unfolded(sketch) if sketch else _NOTHING)
        for marks in since:
            self.send(replica, marks)

    def send(self, replica: int, marks: bytes, hint: bytes = b"", now: float = 0.0) -> float:
        """Notes that a request is sent to a replica.

        Args:
            replica: The replica.
            marks: The request's marks.
            hint: Its hint, or none.
            now: When it is sent, in seconds.

        Returns:
            How many blocks of its prompt it is expected to find at least.
        """
        if hint:
            self._hints[hint] = replica, self._hints.get(hint, (replica, now))[1]
            self._hints.move_to_end(hint)
            if len(self._hints) > MOST_HINTS:
                self._hints.popitem(last=False)
        if not marks or not self._finds[replica]:
            return 0.0
        if len(self._sent[replica]) == MOST_SENT:
            self._set(replica, self._sketch[replica])
        places, word, bit = places_of(marks).ravel(), replica >> 6, _BIT[replica & 63]
        column = self._bits[places, word]
        self._bits[places, word] = column | bit
        self._sent[replica].append(places)
        lacking = (column & bit == 0).nonzero()[0]
        found = lacking[0] // HASHES if len(lacking) else len(places) // HASHES
        return float(_BLOCKS[found])

    def hinted(self, hint: bytes) -> int | None:
        """The replica of the last request with this hint; None if unknown."""
        return self._hints[hint][0] if hint in self._hints else None

    def began(self, hint: bytes) -> float | None:
        """When the first request with this hint was sent; None if unknown."""
        return self._hints[hint][1] if hint in self._hints else None

    def blocks(self, marks: bytes) -> np.ndarray:
        """How many blocks of a prompt with these marks each replica would find at least, float64
        [replicas]."""
        if not marks:
            return np.zeros(self._count)
        there = self._bits.take(places_of(marks).T, axis=0)  # [hashes, marks, replicas / 64]
        there = np.bitwise_and.accumulate(there[0] & there[1] & there[2] & there[3], axis=0)
        bits = np.unpackbits(there.view(np.uint8), axis=1, count=self._count, bitorder="little")
        return _BLOCKS[np.add.reduce(bits, axis=0, dtype=np.uint8)]

    def _set(self, replica: int, now: np.ndarray) -> None:
        """Sets its sketch, uint8 [PLACES / 8], with nothing sent since."""
        differ = np.flatnonzero(self._sketch[replica] ^ now)
        self._sketch[replica] = now
        places = np.concatenate([np.add.outer(8 * differ, _EIGHT).ravel(), *self._sent[replica]])
        self._sent[replica].clear()
        there = now[places >> 3] >> (places & 7) & 1 > 0
        word, bit = replica >> 6, _BIT[replica & 63]
        column = self._bits[places, word]
        self._bits[places, word] = np.where(there, column | bit, column & ~bit)
