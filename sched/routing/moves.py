"""Where a request goes on after its first token: where it is, or at another replica, with its cache
(DistServe, Zhong et al., OSDI 2024; Llumnix, Sun et al., OSDI 2024).

No replica is for prompts or for decodes unless it has a `Role`. A prompt goes where it comes first,
whatever its own target between tokens is; behind it the request goes where its tokens are predicted
to be in time. So replicas with tight targets attract decodes and repel prompts by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from jaxserve.sched.routing.estimate import START, miss, violation
from jaxserve.sched.routing.fleet import Fleet, RoutingRequest
from jaxserve.sched.routing.snapshot import prompt_blocks, prompt_seconds
from jaxserve.sched.slo.classes import time_of

GAIN = 0.05  # targets that a move has to save
LATELY = 60.0  # seconds over which prompts are counted
MOST = 0.5  # targets of others that a prompt may be worth: behind it come more that are late
PACKED = 0.1  # targets that a prompt gains where all of the time is for prompts
LESS = 0.02  # how late tokens become by a prompt where they are late by others
FEW = 0.01  # share of the time for prompts that makes the 99th percentile of decodes late


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
    late, more prompts cost them nothing. So prompts gather where prompts have been, and decodes
    where none have.

    Args:
        fleet: The replicas.
        link: What lies between them.
    """

    def __init__(self, fleet: Fleet, link: Link) -> None:
        self._fleet, self._link, self._time = fleet, link, 0.0

    def begins_at(self, up: np.ndarray, ask: RoutingRequest, now: float) -> int:
        """The replica that computes a prompt.

        Args:
            up: bool [replicas], those that take requests.
            ask: The request.
            now: Seconds, on the snapshots' clock.
        """
        s, found = self._fleet.columns, self._fleet.found(ask)
        mine = self._fleet.taking(up, prompts=True)
        work, short = s.best_effort_work, s.best_effort_short
        if ask.tier == 0:
            work, short = s.realtime_work, s.realtime_short
        # Its own time between tokens is a matter of where it goes on.
        value = violation(s, work, short, ask._replace(tbt=np.inf), found, now)
        beside = miss((s.decode + s.prefill) / s.tbt)
        victims = np.minimum(s.running * np.maximum(1.0 - self._late(now), LESS), MOST)
        value += beside * (victims - 1.0) - PACKED * self._fleet.prompts / LATELY
        place = int(np.where(mine, value, np.inf).argmin())
        each = found if isinstance(found, float) else found[place]
        row = {name: column[place] for name, column in vars(s).items()}
        self._fleet.prompts[place] += float(prompt_seconds(SimpleNamespace(**row), ask, each))
        return place

    def goes_on_at(self, up: np.ndarray, here: int, ask: RoutingRequest, now: float) -> int:
        """The replica at which a request goes on after its first token.

        Args:
            up: bool [replicas], those that take requests.
            here: Where it is.
            ask: The request, all of its tokens counted as a prompt.
            now: Seconds, on the snapshots' clock.
        """
        s, link, count = self._fleet.columns, self._link, len(self._fleet)
        away = np.arange(count) != here
        decode = s.decode + away * (s.row + ask.prompt_len * s.read)
        longest = decode + s.prefill * self._late(now)
        blocks = np.maximum(s.realtime_short + prompt_blocks(s, ask), 0.0) * s.per_block
        rows = np.maximum(s.rows_short + 1.0, 0.0) * s.per_row
        pause = away * (link.seconds(ask.prompt_len) + np.maximum(blocks, rows))
        late = miss(longest / np.minimum(s.tbt, ask.tbt)) + miss(pause / ask.tbt)
        value = late + START * longest / min(ask.tbt, 1.0) + GAIN * away
        value += self._fleet.prompts / LATELY
        may = self._fleet.taking(up, prompts=False)
        return int(np.where(may, value, np.inf).argmin()) if may.any() else here

    def _late(self, now: float) -> np.ndarray:
        """To what degree tokens of each replica are late by prompts, 0 to 1, [replicas]."""
        self._fleet.prompts *= np.exp((self._time - now) / LATELY)
        self._time = now
        return np.minimum(self._fleet.prompts / (LATELY * FEW), 1.0)
