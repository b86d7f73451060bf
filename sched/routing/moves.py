"""Where a request goes on after its first token: where it is, or at another replica, with its cache
(DistServe, Zhong et al., OSDI 2024; Llumnix, Sun et al., OSDI 2024).

No replica is for prompts or for decodes unless it has a `Role`. If prompts make tokens late, they
gather at a few replicas, one more of them if they would be late there, whatever their own target
between tokens is. Behind its prompt a request goes where its tokens are predicted to be in time.
Where prompts make no token late, it stays where it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.routing.estimate import NEAR, PATIENCE, START, miss, violation
from jaxserve.sched.routing.fleet import Fleet, Role, RoutingRequest
from jaxserve.sched.routing.snapshot import prompt_blocks
from jaxserve.sched.slo.classes import time_of

GAIN = 0.05  # targets that a move has to save
STEPS = 2.0  # that are under way, or planned, where a request comes
LATELY = np.array([60.0, 5.0])  # seconds over which prompts are counted: usually, and now
OFTEN = 0.01  # seconds between two looks at what was counted
BACK = 1.0  # seconds: then the clock was set back, rather than this asked a little late
SEEN = 1.0  # seconds of them before which their share of the time is not known
SLACK = 0.3  # replicas fewer than there are for prompts before one less is
MOST = 0.5  # targets of others that a prompt may be worth: behind it come more that are late
PACKED = 0.1  # targets that a prompt gains where prompts go
FEW = 0.01  # share of the time for prompts that makes the 99th percentile of decodes late
LESS = 0.02  # how late tokens become by a prompt where they are late by others


@dataclass(frozen=True)
class Link:
    """What lies between two replicas.

    Attributes:
        latency: Seconds of any move.
        per_token: Seconds for each cached token.

    Raises:
        ValueError: A number is negative.
    """

    latency: float
    per_token: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency < np.inf and 0 <= self.per_token < np.inf):
            raise ValueError(f"latency and per_token must be 0 or more, got {self}")

    def seconds(self, tokens: int) -> float:
        """How long the cache of so many tokens is on its way."""
        return self.latency + tokens * self.per_token


def parse_link(text: str) -> Link:
    """A link as `2ms:5ms`: the latency, and the time of 1000 tokens. ValueError otherwise."""
    latency, colon, each = text.partition(":")
    if not colon:
        raise ValueError(f"LATENCY:PER_1000 are two times, got {text!r:.40}")
    return Link(time_of("latency", latency), time_of("time of 1000 tokens", each) / 1000)


def parse_roles(text: str) -> tuple[int, int]:
    """Roles as `3:5`: how many replicas compute prompts only, and how many decodes only.
    ValueError otherwise."""
    numbers = text.split(":")
    if len(numbers) != 2 or not all(n.isascii() and n.isdigit() and len(n) < 7 for n in numbers):
        raise ValueError(f"PROMPTS:DECODES are two numbers of replicas, got {text!r:.40}")
    prompts, decodes = map(int, numbers)
    if not (prompts and decodes):
        raise ValueError(f"PROMPTS:DECODES are at least 1 each, got {text!r:.40}")
    return prompts, decodes


class Moves:
    """Decides where prompts are computed and where their requests go on.

    A prompt beside decodes makes them late, as many as run there; once a few of their tokens are
    late, more prompts cost them nothing. So it is better to have prompts at few replicas.

    Args:
        fleet: The replicas.
        link: What lies between them.
    """

    def __init__(self, fleet: Fleet, link: Link) -> None:
        self._fleet, self._link, self._time = fleet, link, math.inf
        self._seen = np.zeros(2)  # seconds over which they were counted, old ones less
        self._late = np.zeros(len(fleet))
        self._looked = False  # since packed replicas were last counted
        self._packs = False  # whether prompts made tokens late then
        self._packed_at = -math.inf
        fleet.per_token = link.per_token

    def begins_at(self, up: np.ndarray, ask: RoutingRequest, now: float) -> int:
        """The replica that computes a prompt.

        Args:
            up: bool [replicas], those that take requests.
            ask: The request.
            now: Seconds, on the snapshots' clock.
        """
        fleet = self._fleet
        self._look(now)
        if self._looked:
            self._unpack(up)
        values = np.where(fleet.taking(up, prompts=True), self.prompt_values(ask, now), np.inf)
        at = int(values.argmin())
        if up[at]:
            self.pack(at, ask, now)
        return at

    def pack(self, at: int, ask: RoutingRequest, now: float) -> None:
        """From now on prompts go there, as this one does, if they make tokens late.

        Args:
            at: The replica.
            ask: The request.
            now: Seconds, on the snapshots' clock.
        """
        fleet, s = self._fleet, self._fleet.columns
        if fleet.packed[at] or fleet.apart:
            return
        if not (self._packs or s.idle[at] < ask.tbt < (s.decode[at] + s.prefill[at]) / NEAR):
            return
        up = fleet.up
        left = np.count_nonzero(up & ~fleet.packed) - 1
        if left >= self._filled(up, ask):
            fleet.packed[at], self.late[at], self._packed_at = True, 1.0, now

    def _filled(self, up: np.ndarray, ask: RoutingRequest) -> float:
        """How many replicas decodes fill: with more of them, requests that come would wait there
        for longer than their time between tokens.

        Args:
            up: bool [replicas], those that take requests.
            ask: One that may come.
        """
        s = self._fleet.columns
        longest = (s.tbt - self._link.seconds(ask.prompt_len)) / STEPS
        filled = (s.decode - s.idle) / np.maximum(longest - s.idle, s.idle)
        return float(filled[up].sum())

    def prompt_values(self, ask: RoutingRequest, now: float) -> np.ndarray:
        """What a prompt would cost at each replica, in targets, [replicas]."""
        s, fleet = self._fleet.columns, self._fleet
        work, short = queue_of(s, ask)
        return np.asarray(prompt_value(s, work, short, ask, fleet.found(ask), self.late, now))

    @property
    def late(self) -> np.ndarray:
        """How likely prompts make the 99th percentile of decodes late at each replica, [replicas],
        by the prompts that it got lately: none are expected where they do not go any more."""
        if len(self._late) != len(self._fleet):  # it has grown
            self._count()
        return self._late

    def _shares(self) -> np.ndarray:
        """Of the time, for prompts, [2, replicas]."""
        return self._fleet.prompts / np.maximum(self._seen, SEEN)[:, None]

    def _count(self) -> None:
        self._late = np.minimum(self._shares().max(0) / FEW, self._fleet.packed)

    def _look(self, now: float) -> None:
        """Forgets old prompts: at most every OFTEN, so that decisions are fast."""
        gone = now - self._time
        if -BACK < gone < OFTEN:
            return
        kept, self._time = np.exp(-max(gone, 0.0) / LATELY), now
        self._fleet.prompts *= kept[:, None]
        self._seen = LATELY - (LATELY - self._seen) * kept
        self._count()
        self._looked = True

    def _unpack(self, up: np.ndarray) -> None:
        """Takes a replica away from those for prompts if these would fill fewer, or all of them if
        at most half of the replicas with targets between tokens would miss theirs by prompts: some
        may be slow. Targets that nobody makes do not count.

        Args:
            up: bool [replicas], those that take requests.
        """
        fleet, s, self._looked = self._fleet, self._fleet.columns, False
        tight = up & (s.tbt > s.idle) & (s.tbt < np.inf)
        missed = tight & (s.decode + s.prefill > NEAR * s.tbt)
        self._packs = bool(2 * np.count_nonzero(missed) > np.count_nonzero(tight))
        mine, shares = fleet.packed & up, self._shares()
        if not self._packs:
            fleet.packed[:] = False
        elif 0 <= self._time - self._packed_at < LATELY[1]:
            pass  # a burst may have begun, of which little was counted
        elif np.count_nonzero(mine) - 1 - SLACK > shares.sum(1).max():
            fleet.packed[np.where(mine, shares.max(0), np.inf).argmin()] = False
        self._count()

    def goes_on_at(self, up: np.ndarray, here: int, ask: RoutingRequest, now: float) -> int:
        """The replica at which a request goes on after its first token.

        Args:
            up: bool [replicas], those that take requests.
            here: Where it is.
            ask: The request, all of its tokens counted as a prompt.
            now: Seconds, on the snapshots' clock.
        """
        may = self._fleet.taking(up, prompts=False)
        values, _ = self.decode_values(here, ask, now)
        return int(np.where(may, values, np.inf).argmin()) if may.any() else here

    def decode_values(
        self, here: int, ask: RoutingRequest, now: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the tokens of a request that runs would cost at each replica.

        Args:
            here: Where it is.
            ask: The request, as `goes_on_at` has it.
            now: Seconds, on the snapshots' clock.

        Returns:
            In targets, of itself and others, and how likely it misses its own, both [replicas].
        """
        s, link = self._fleet.columns, self._link
        away = np.arange(len(self._fleet)) != here
        # Since their snapshots outputs have ended, in equal times.
        ended = np.minimum(np.maximum((now - s.time) / s.output, 0.0), 1.0)
        left = ended * s.running / np.maximum(s.unfinished, 1.0)
        decode = s.decode - left * (s.decode - s.idle)
        decode += away * (s.row + ask.prompt_len * s.read)
        self._look(now)
        late = self.late
        longest = decode + s.prefill * late
        if self._ahead(here, ask, longest[here]):
            way: Any = link.latency
        else:
            way = link.seconds(ask.prompt_len) + np.maximum(self._fleet.coming - now, 0.0)
        blocks = np.maximum(s.realtime_short + prompt_blocks(s, ask), 0.0) * s.per_block
        rows = np.maximum(s.rows_short + 1.0, 0.0) * s.per_row
        pause = away * (way + np.maximum(blocks, rows) + STEPS * decode)
        ends = miss((pause + s.mean_output[here] * longest) / ask.jct)
        paused = miss(pause / ask.tbt) + ends
        values = miss(longest / np.minimum(s.tbt, ask.tbt)) + paused + GAIN * away
        values += START * longest / min(ask.tbt, 1.0)
        values += late * (s.decode + s.prefill > NEAR * ask.tbt)
        return values, miss(longest / ask.tbt) + paused

    def sends_ahead(self, here: int, ask: RoutingRequest, now: float) -> bool:
        """Whether the cache of a request that is to move is sent while it goes on where it is: if
        the way is longer than a step there, it gets tokens meanwhile. Not where only prompts are.

        Args:
            here: Where it is.
            ask: The request, as `goes_on_at` has it.
            now: Seconds, on the snapshots' clock.
        """
        s = self._fleet.columns
        return self._ahead(here, ask, s.decode[here] + s.prefill[here] * self.late[here])

    def _ahead(self, here: int, ask: RoutingRequest, step: float) -> bool:
        decodes = self._fleet.roles[here] != Role.PROMPTS
        return bool(decodes and self._link.seconds(ask.prompt_len) > step)


def queue_of(s: Any, ask: RoutingRequest) -> tuple[Any, Any]:
    """Seconds of work before a request of this tier, and the blocks missing for it. s: what is
    known of a replica, or of all as columns."""
    if ask.tier == 0:
        return s.realtime_work, s.realtime_short
    return s.best_effort_work, s.best_effort_short


def prompt_value(
    s: Any,
    work: Any,
    short: Any,
    ask: RoutingRequest,
    found: Any,
    late: Any,
    now: float,
) -> Any:
    """What a prompt would cost, in targets.

    Args:
        s, work, short, ask, found, now: As `violation`.
        late: As `Moves.late`.
    """
    victims = np.minimum(s.running * (1.0 - (1.0 - LESS) * late), MOST)
    # Its own time between tokens is a matter of where it goes on: it will have to.
    asked = ask._replace(ttft=min(ask.ttft, PATIENCE), tbt=np.inf)
    value = violation(s, work, short, asked, found, now, victims)
    value += miss(s.prefill / ask.tbt)
    # Where prompts make no token of it late, they need not be apart.
    return value - PACKED * late * (s.decode + s.prefill > NEAR * ask.tbt)
