"""A router's knowledge of its replicas."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cache.prefix_sketch import marks_of
from jaxserve.sched.request import Request
from jaxserve.sched.routing.known_prefixes import MOST_SENT, KnownPrefixes
from jaxserve.sched.routing.snapshot import (
    KNOWN,
    Snapshot,
    add_request,
    prompt_seconds,
    remove_request,
    reset_known,
)


class Role(IntEnum):
    """What a replica computes, where requests may move behind their prompts."""

    ANY = 0
    PROMPTS = 1
    DECODES = 2


class RoutingRequest(NamedTuple):
    """A router's view of a call.

    Attributes:
        prompt_len: tokens of a prompt; their mean if the call has several.
        tier: 0 for real-time.
        ttft: target in seconds, inf for none; likewise tbt and jct.
        sequences: continuations that the engine computes.
        prompts: how many of them compute their prompt. Others of the same prompt find it cached.
        marks: the common prefix of its prompts, from `marks_of`; empty without reuse.
        hint: the same bytes for calls that begin alike, according to the client, or for calls of a
            program; or empty.
        of_program: whether the hint is a program's.
        program_deadline: seconds from the program's first call to the end of its last; inf for
            none.
        calls_left: calls of the program that are to come after this one.
        fingerprint: system fingerprint of the replicas that can serve it; "" for all.
    """

    prompt_len: int
    tier: int = 0
    ttft: float = np.inf
    tbt: float = np.inf
    jct: float = np.inf
    sequences: int = 1
    prompts: int = 1
    marks: bytes = b""
    hint: bytes = b""
    of_program: bool = False
    program_deadline: float = np.inf
    calls_left: int = 0
    fingerprint: str = ""

    @classmethod
    def from_request(cls, request: Request, block_size: int) -> RoutingRequest:
        """The router's view of a request with one continuation. block_size: tokens of a block."""
        slo = request.slo
        ttft, tbt, jct = (np.inf if t is None else t for t in (slo.ttft, slo.tbt, slo.jct))
        length = len(request.prompt)
        marks = marks_of(request.block_keys or (), (length - 1) // block_size)
        return cls(length, int(request.tier), ttft, tbt, jct, marks=marks)

    def after(self, tokens: int, fingerprint: str) -> RoutingRequest:
        """The router's view of the same call once a replica has generated a part of its answer:
        that has to be computed, too, and the first token has come.

        Args:
            tokens: Tokens generated, of all continuations.
            fingerprint: The replica's system fingerprint.
        """
        if not tokens:
            return self
        length = self.prompt_len + -(-tokens // self.sequences)
        return self._replace(prompt_len=length, ttft=np.inf, fingerprint=fingerprint)


_NAMES = KNOWN.names or ()


def _columns(known: np.ndarray) -> SimpleNamespace:
    """All replicas at once: the fields of KNOWN, float64 [replicas], by name."""
    return SimpleNamespace(**dict(zip(_NAMES, known, strict=True)))


def _nothing_known(count: int) -> np.ndarray:
    """Unknown state of that many replicas, float64 [fields of KNOWN, replicas]: fields are read
    across replicas."""
    known = np.zeros((len(_NAMES), count))
    for name, value in (("dead", True), ("block_size", 1.0), ("tbt", np.inf), ("output", np.inf)):
        known[_NAMES.index(name)] = value
    return known


def _nothing_sent(count: int) -> list[deque[tuple[float, RoutingRequest, float]]]:
    """For each of that many replicas: when, what, and how many tokens are expected to be found."""
    return [deque(maxlen=MOST_SENT) for _ in range(count)]


def _nothing_left(count: int) -> list[deque[tuple[float, RoutingRequest, bool]]]:
    """For each of that many replicas: when, what, and whether it decoded."""
    return [deque(maxlen=MOST_SENT) for _ in range(count)]


class Fleet:
    """What a router knows of replicas 0 to count - 1. Nothing is known initially, and they count as
    down until they are found or a snapshot comes.

    Attributes:
        columns: The last snapshots, updated by what has been sent since.
        prefixes: Prefixes of each replica; None if not used.
        roles: `Role` of each replica, int8 [replicas].
        prompts: Seconds of prompts that each has got, over a long time and over a short one,
            float64 [2, replicas]; `Moves` forgets old ones.
        packed: Whether prompts go there rather than elsewhere, bool [replicas]; `Moves` says so.
        left: When a request last left each because it was behind, seconds, float64 [replicas].
        coming: Until when caches are on their way to each, one after the other, likewise.
        per_token: Seconds for each token of them.
        apart: Whether any has a role.
    """

    def __init__(self, count: int) -> None:
        self._known = _nothing_known(count)
        self.columns = _columns(self._known)
        self._sent = _nothing_sent(count)
        self._left: list[deque[tuple[float, RoutingRequest, bool]]] = _nothing_left(count)
        self.prefixes: KnownPrefixes | None = None
        self.roles, self.prompts = np.zeros(count, np.int8), np.zeros((2, count))
        self.left = np.full(count, -np.inf)
        self.coming, self.per_token = np.zeros(count), 0.0
        self.packed = np.zeros(count, bool)
        self.apart = False

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def up(self) -> np.ndarray:
        """Which replicas may get requests, bool [replicas]."""
        return np.asarray(self.columns.dead + self.columns.draining == 0)

    def watch_prefixes(self) -> None:
        """Tracks `prefixes` from now on."""
        self.prefixes = KnownPrefixes(len(self))

    def found(self, ask: RoutingRequest) -> np.ndarray | float:
        """Tokens of the request's prompt that each replica would find cached, [replicas]; or 0 for
        none."""
        if self.prefixes is None or not ask.marks:
            return 0.0
        return self.prefixes.blocks(ask.marks) * self.columns.block_size

    def in_program(self, ask: RoutingRequest, now: float) -> RoutingRequest:
        """The request, to end within its share of the time that its program has left, each call to
        come having as much. As it is if the program is late. It begins with the first call sent."""
        if ask.program_deadline == np.inf:
            return ask
        began = None if self.prefixes is None else self.prefixes.began(ask.hint)
        left = ask.program_deadline if began is None else began + ask.program_deadline - now
        if left <= 0:
            return ask
        return ask._replace(jct=min(ask.jct, left / (1 + ask.calls_left)))

    def grow(self, count: int) -> None:
        """Adds `count` replicas with the next numbers."""
        self._known = np.concatenate([self._known, _nothing_known(count)], axis=1)
        self.columns = _columns(self._known)
        self._sent += _nothing_sent(count)
        self._left += _nothing_left(count)
        self.roles = np.concatenate([self.roles, np.zeros(count, np.int8)])
        self.prompts = np.concatenate([self.prompts, np.zeros((2, count))], axis=1)
        self.left = np.concatenate([self.left, np.full(count, -np.inf)])
        self.coming = np.concatenate([self.coming, np.zeros(count)])
        self.packed = np.concatenate([self.packed, np.zeros(count, bool)])
        if self.prefixes is not None:
            self.prefixes.grow(count)

    def forget(self, replica: int) -> None:
        """Forgets a replica that is gone; its number is free for another one."""
        self._known[:, replica] = _nothing_known(1)[:, 0]
        self._sent[replica].clear()
        self._left[replica].clear()
        self.prompts[:, replica], self.packed[replica] = 0.0, False
        self.left[replica], self.coming[replica] = -np.inf, 0.0
        self.set_role(replica, Role.ANY)
        if self.prefixes is not None:
            self.prefixes.forget(replica)

    def set_role(self, replica: int, role: Role) -> None:
        """Has the replica compute only that, until it is forgotten."""
        self.roles[replica] = role
        self.apart = bool(self.roles.any())
        if self.apart:
            self.packed[:] = False

    def taking(self, up: np.ndarray, *, prompts: bool) -> np.ndarray:
        """Which of the replicas that are up take prompts, or requests behind them: those for both
        and for the one, or all of them if none of these is up.

        Args:
            up: bool [replicas].
            prompts: Which of the two.

        Returns:
            bool [replicas].
        """
        if not self.apart:
            return up
        mine = up & (self.roles != (Role.DECODES if prompts else Role.PROMPTS))
        return mine if mine.any() else up

    def find(self, replica: int) -> None:
        """The replica is up, but has not sent a snapshot yet."""
        self.columns.dead[replica] = False

    def hear(self, replica: int, snapshot: Snapshot) -> None:
        """Takes a snapshot, which also shows that the replica is up. One older than the last is
        ignored."""
        known = self.row(replica)
        if snapshot.time < known.time:
            return
        sent = self._sent[replica]
        while sent and sent[0][0] <= snapshot.time:
            sent.popleft()
        reset_known(known, snapshot)
        for time, ask, found in sent:
            add_request(known, ask, found, time)
        left = self._left[replica]
        while left and left[0][0] <= snapshot.time:
            left.popleft()
        for _, ask, begun in left:
            remove_request(known, ask, begun)
        if self.prefixes is not None:
            since = [ask.marks for _, ask, _ in sent]
            self.prefixes.hear(replica, snapshot.sketch, since)
        known.dead = False
        self._known[:, replica] = [*vars(known).values()]

    def send(self, replica: int, ask: RoutingRequest, now: float, *, moves: bool = False) -> None:
        """Notes a request that is sent to a replica.

        Args:
            replica: The replica.
            ask: The request.
            now: Seconds, on the snapshots' clock.
            moves: Whether its cache comes along.
        """
        known, found = self.row(replica), float(ask.prompt_len if moves else 0.0)
        if self.prefixes is not None and not moves:
            found = self.prefixes.send(replica, ask.marks, ask.hint, now) * known.block_size
        self._sent[replica].append((now, ask, found))
        if moves:
            begins = max(float(self.coming[replica]), now)
            self.coming[replica] = begins + ask.prompt_len * self.per_token
        else:
            self.prompts[:, replica] += prompt_seconds(known, ask, found)
        add_request(known, ask, found, now)
        self._known[:, replica] = [*vars(known).values()]

    def leave(self, replica: int, ask: RoutingRequest, now: float, *, begun: bool) -> None:
        """Notes that a request which its last snapshot counts goes on elsewhere.

        Args:
            replica: The replica.
            ask: The request.
            now: Seconds, on the snapshots' clock.
            begun: Whether it decodes there, rather than waits.
        """
        known = self.row(replica)
        self._left[replica].append((now, ask, begun))
        if not begun:
            gone = self.prompts[:, replica] - prompt_seconds(known, ask, 0.0)
            self.prompts[:, replica] = np.maximum(gone, 0.0)
        remove_request(known, ask, begun)
        self.left[replica] = now
        self._known[:, replica] = [*vars(known).values()]

    def lose(self, replica: int) -> None:
        """The replica is down: it gets nothing until a new snapshot comes."""
        self.columns.dead[replica] = True
        self._sent[replica].clear()
        self._left[replica].clear()

    def row(self, replica: int) -> SimpleNamespace:
        """A copy of what is known of a replica, with Python's own numbers, which are faster one by
        one."""
        values = self._known[:, replica].tolist()
        return SimpleNamespace(**dict(zip(_NAMES, values, strict=True)))
