"""The state of every request in the engine, one NumPy array a property.

A policy ranks thousands of requests with array operations; nothing here is per object.
Tokens are counted in three numbers: `prompt_len + generated` are known, `computed` of them are in
the cache, and the rest are pending. There are no phases: a prefill, a chunk, a refill after an
eviction and a decode are all "compute the next c of the pending tokens".
"""

from __future__ import annotations

import enum

import numpy as np

from jaxserve.sched.request import Request


class State(enum.IntEnum):
    """WAITING holds no cache, RUNNING holds some. DRAINING has launched its last token and waits
    for it to arrive; no policy sees it."""

    FREE = 0
    WAITING = 1
    RUNNING = 2
    DRAINING = 3


class RequestTable:
    """Struct of arrays over `capacity` rows. Times in seconds, lengths in tokens.

    generated counts tokens from the moment the step that makes them is launched; computed
    likewise. last_token is the time at which the last token reached the host (the arrival before
    the first). An absent SLO is infinite.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.state = np.zeros(capacity, np.int8)
        self.seq = np.zeros(capacity, np.int64)  # order of arrival
        self.arrival = np.zeros(capacity)
        self.last_token = np.zeros(capacity)
        self.prompt_len = np.zeros(capacity, np.int64)
        self.max_tokens = np.zeros(capacity, np.int64)
        self.generated = np.zeros(capacity, np.int64)
        self.received = np.zeros(capacity, np.int64)  # generated tokens that reached the host
        self.computed = np.zeros(capacity, np.int64)
        self.preemptions = np.zeros(capacity, np.int64)
        self.kind = np.zeros(capacity, np.int8)
        self.tier = np.zeros(capacity, np.int8)
        self.ttft = np.full(capacity, np.inf)
        self.tbt = np.full(capacity, np.inf)
        self.jct = np.full(capacity, np.inf)
        self._free = list(range(capacity - 1, -1, -1))
        self._next_seq = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(self, request: Request) -> int:
        """Gives the request a row and returns it. IndexError when the table is full."""
        row = self._free.pop()
        self.state[row] = State.WAITING
        self.seq[row] = self._next_seq
        self._next_seq += 1
        self.arrival[row] = self.last_token[row] = request.arrival
        self.prompt_len[row] = len(request.prompt)
        self.max_tokens[row] = request.sampling.max_tokens
        for column in (self.generated, self.received, self.computed, self.preemptions, self.kind):
            column[row] = 0
        self.tier[row] = request.tier
        for column, target in zip((self.ttft, self.tbt, self.jct), _targets(request), strict=True):
            column[row] = np.inf if target is None else target
        return row

    def remove(self, row: int) -> None:
        if self.state[row] == State.FREE:
            raise ValueError(f"row {row} is free already")
        self.state[row] = State.FREE
        self._free.append(row)

    def pending(self, rows: np.ndarray) -> np.ndarray:
        """Tokens known but not in the cache, [len(rows)]."""
        return self.prompt_len[rows] + self.generated[rows] - self.computed[rows]

    def decoding(self, rows: np.ndarray) -> np.ndarray:
        """Which rows have all but their newest generated token in the cache, bool [len(rows)]."""
        return (self.generated[rows] > 0) & (self.pending(rows) == 1)

    def in_state(self, state: State) -> np.ndarray:
        """Rows in `state`, in order of arrival."""
        rows = np.flatnonzero(self.state == state)
        return rows[np.argsort(self.seq[rows], kind="stable")]


def _targets(request: Request) -> tuple[float | None, float | None, float | None]:
    return request.slo.ttft, request.slo.tbt, request.slo.jct
