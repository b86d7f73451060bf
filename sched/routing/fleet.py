"""What one router knows of its replicas."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from jaxserve.sched.request import Request
from jaxserve.sched.routing.snapshot import KNOWN, Snapshot, add_request, reset_known


class RoutingRequest(NamedTuple):
    """What a router sees of a call.

    Attributes:
        prompt_len: tokens of a prompt; their mean where the call has several.
        tier: 0 for real-time.
        ttft: target in seconds, inf for none; so are tbt and jct.
        sequences: continuations that the engine computes, each with its prompt.
    """

    prompt_len: int
    tier: int = 0
    ttft: float = np.inf
    tbt: float = np.inf
    jct: float = np.inf
    sequences: int = 1

    @classmethod
    def from_request(cls, request: Request) -> RoutingRequest:
        """What a router sees of it, its one continuation."""
        slo = request.slo
        ttft, tbt, jct = (np.inf if t is None else t for t in (slo.ttft, slo.tbt, slo.jct))
        return cls(len(request.prompt), int(request.tier), ttft, tbt, jct)


_NAMES = KNOWN.names or ()


def _columns(known: np.ndarray) -> SimpleNamespace:
    """All replicas at once: the fields of KNOWN, arrays [replicas], by name."""
    return SimpleNamespace(**{name: known[name] for name in _NAMES})


def _nothing_known(count: int) -> np.ndarray:
    known = np.zeros(count, KNOWN)
    for name, value in (("dead", True), ("block_size", 1.0), ("tbt", np.inf)):
        known[name] = value
    return known


class Fleet:
    """What a router knows of replicas 0 to count - 1. Nothing is known of them at first, and they
    are down until they are found or heard of.

    Attributes:
        columns: The last snapshots, with what has been sent since.
    """

    def __init__(self, count: int) -> None:
        self._known = _nothing_known(count)
        self.columns = _columns(self._known)
        self._sent: list[deque[tuple[float, RoutingRequest]]] = [deque() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def up(self) -> np.ndarray:
        """Which replicas may get requests, bool [replicas]."""
        return np.asarray(~(self.columns.dead | self.columns.draining))

    def grow(self, count: int) -> None:
        """Adds `count` replicas with the next numbers."""
        self._known = np.concatenate([self._known, _nothing_known(count)])
        self.columns = _columns(self._known)
        self._sent += [deque() for _ in range(count)]

    def forget(self, replica: int) -> None:
        """The replica is gone; its number is free for another one."""
        self._known[replica] = _nothing_known(1)[0]
        self._sent[replica].clear()

    def find(self, replica: int) -> None:
        """The replica is up, but has not sent a snapshot yet."""
        self._known["dead"][replica] = False

    def hear(self, replica: int, snapshot: Snapshot) -> None:
        """Takes in a snapshot, which also shows that the replica is up. One older than the last is
        ignored."""
        known = self._row(replica)
        if snapshot.time < known.time:
            return
        sent = self._sent[replica]
        while sent and sent[0][0] <= snapshot.time:
            sent.popleft()
        reset_known(known, snapshot)
        for time, ask in sent:
            add_request(known, ask, time)
        known.dead = False
        self._known[replica] = tuple(vars(known).values())

    def send(self, replica: int, ask: RoutingRequest, now: float) -> None:
        """Notes a request that is sent there now."""
        self._sent[replica].append((now, ask))
        known = self._row(replica)
        add_request(known, ask, now)
        self._known[replica] = tuple(vars(known).values())

    def lose(self, replica: int) -> None:
        """The replica is down: it gets nothing until it is heard of again."""
        self._known["dead"][replica] = True
        self._sent[replica].clear()

    def _row(self, replica: int) -> SimpleNamespace:
        """A copy; numbers of Python's own are quicker one by one."""
        values = self._known[replica].item()
        return SimpleNamespace(**dict(zip(_NAMES, values, strict=True)))
