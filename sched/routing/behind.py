"""Which requests leave a replica because they are behind: their targets would be missed there, and
another replica makes them, the move's own cost counted (Llumnix, Sun et al., OSDI 2024).

A request that waits for its first token leaves its place in the queue, and nothing else; one that
runs takes its cache along.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.sched.routing.estimate import first_token, miss
from jaxserve.sched.routing.fleet import Fleet, RoutingRequest
from jaxserve.sched.routing.moves import Link, Moves, prompt_value, queue_of
from jaxserve.sched.routing.snapshot import prompt_blocks, prompt_seconds

BEHIND = 0.25  # likelihood of missing its own targets from which a request is behind
CLEAR = 0.2  # targets that a move has to save
AGAIN = 5.0  # seconds that a request stays where it has moved, and none moves whence some did
MOST_MOVES = 3  # of a request that was behind
IN_VAIN = 3  # requests behind for which no place was found; then there is none for others


class Sent(NamedTuple):
    """A request that has been sent to a replica, and has not ended. Seconds are on the snapshots'
    clock.

    Attributes:
        ask: The request, with the tokens generated so far, `RoutingRequest.after`; its targets are
            those that it came with.
        arrived: When it came, seconds.
        sent: When it was sent to this replica, seconds.
        begun: Whether a token of it has come from there.
        moved: How often it has moved because it was behind.
    """

    ask: RoutingRequest
    arrived: float
    sent: float
    begun: bool
    moved: int = 0


class Behind:
    """Finds them.

    Args:
        fleet: The replicas.
        link: What lies between them.
        moves: Where requests begin and go on.
    """

    def __init__(self, fleet: Fleet, link: Link, moves: Moves) -> None:
        self._fleet, self._link, self._moves = fleet, link, moves

    def leave(
        self, up: np.ndarray, here: int, there: Sequence[Sent], now: float
    ) -> list[tuple[int, int]]:
        """See `Router.behind`, which returns it.

        Args:
            up: bool [replicas], those that take requests.
            here, there, now: As there.
        """
        by_tier = self._fleet.row(here).by_tier
        numbers = sorted(range(len(there)), key=lambda number: there[number].sent)
        waiting = [number for number in numbers if not there[number].begun]
        found = list[tuple[int, int]]()
        for tier in (0, 1):
            queue = [n for n in waiting if (there[n].ask.tier > 0) * (by_tier > 0) == tier]
            if queue:
                found += self._waiting(up, here, there, queue, now)
        return found + self._running(up, here, there, now)

    def _waiting(
        self, up: np.ndarray, here: int, there: Sequence[Sent], queue: list[int], now: float
    ) -> list[tuple[int, int]]:
        """Those that wait for their first token. queue: numbers in `there`, in order."""
        fleet, found, in_vain = self._fleet, list[tuple[int, int]](), 0
        may, known = self._others(up, here, now, prompts=True), fleet.row(here)
        asks = [there[number].ask for number in queue]
        seconds = [float(prompt_seconds(known, ask, 0.0)) for ask in asks]
        blocks = [float(prompt_blocks(known, ask)) for ask in asks]
        # Some of that is computed already, or found in the prefix cache.
        share = min(1.0, queue_of(known, asks[0])[0] / max(sum(seconds[1:]), 1e-9))
        behind = [*itertools.accumulate(reversed(seconds), initial=0.0)][-2::-1]
        wanted = [*itertools.accumulate(reversed(blocks))][::-1]
        rows = [*itertools.accumulate(ask.sequences for ask in reversed(asks))][::-1]
        output = known.mean_output
        for place, number in enumerate(queue):
            one, known = there[number], fleet.row(here)
            ask = self._left(one, now, self._link.seconds(0))
            if ask is None or one.sent > known.time or in_vain >= IN_VAIN:
                continue
            work, short = queue_of(known, ask)
            rest, own = work - share * behind[place], seconds[place]
            cached = ask.prompt_len * max(1.0 - rest / max(own, 1e-9), 0.0)
            known.rows_short -= rows[place]
            at = known, max(rest - own, 0.0), short - wanted[place]
            here_missed = _missed(first_token(*at, ask, cached, now), known, output, ask)
            if here_missed < BEHIND:
                continue
            value = prompt_value(*at, ask, cached, self._moves.late[here], now)
            values = np.where(may, self._moves.prompt_values(ask, now), np.inf)
            to = int(values.argmin())
            s = fleet.row(to)
            each = fleet.found(ask)
            each = each if isinstance(each, float) else float(each[to])
            first = first_token(s, *queue_of(s, ask), ask, each, now)
            saved = here_missed - _missed(first, s, output, ask)
            if not (may[to] and min(value - values[to], saved) >= CLEAR):
                in_vain += 1
                continue
            fleet.leave(here, one.ask, now, begun=False)
            fleet.send(to, one.ask, now)
            self._moves.pack(to, one.ask, now)
            found.append((number, to))
        return found

    def _running(
        self, up: np.ndarray, here: int, there: Sequence[Sent], now: float
    ) -> list[tuple[int, int]]:
        """Those that decode, the shortest first: they cost the least to move."""
        fleet, found, in_vain = self._fleet, list[tuple[int, int]](), 0
        may = self._others(up, here, now, prompts=False)
        if not may.any():
            return found
        running = [
            number
            for number, one in enumerate(there)
            if one.begun and min(one.ask.tbt, one.ask.jct) < np.inf
        ]
        known, late = fleet.row(here), float(self._moves.late[here])
        longest = known.decode + known.prefill * late
        for number in sorted(running, key=lambda number: there[number].ask.prompt_len):
            one = there[number]
            ask = self._left(one, now, 0.0)
            if ask is None or one.sent > known.time or in_vain >= IN_VAIN:
                continue
            if miss(longest / ask.tbt) + miss(known.mean_output * longest / ask.jct) < BEHIND:
                continue
            values, missed = self._moves.decode_values(here, ask, now)
            to = int(np.where(may, values, np.inf).argmin())
            saved = min(values[here] - values[to], missed[here] - missed[to])
            if not (may[to] and saved >= CLEAR):
                in_vain += 1
                continue
            fleet.leave(here, ask, now, begun=True)
            fleet.send(to, ask, now, moves=True)
            found.append((number, to))
            known = fleet.row(here)
            longest = known.decode + known.prefill * late
        return found

    def _others(self, up: np.ndarray, here: int, now: float, *, prompts: bool) -> np.ndarray:
        """Which other replicas take prompts, or what comes behind them, bool [replicas]. None that
        others have just left: it may be worse than its snapshots say."""
        may = self._fleet.taking(up, prompts=prompts) & (now - self._fleet.left >= AGAIN)
        may[here] = False
        return may

    def _left(self, one: Sent, now: float, way: float) -> RoutingRequest | None:
        """The request with what is left of its targets behind the way; None if it does not move."""
        ask, gone = one.ask, now - one.arrived + way
        if one.moved >= MOST_MOVES or (one.moved and now - one.sent < AGAIN):
            return None
        ttft, jct = ask.ttft - gone, ask.jct - gone
        if not one.begun and ttft <= 0:
            return None  # nobody makes it any more
        return ask._replace(ttft=ttft, jct=jct if jct > 0 else np.inf)


def _missed(first: float, s: Any, output: float, ask: RoutingRequest) -> float:
    """How likely a request misses its targets that waits for its first token.

    Args:
        first: Predicted seconds until then.
        s: What is known of the replica.
        output: Tokens of an output.
        ask: The request.
    """
    return float(miss(first / ask.ttft) + miss((first + output * s.decode) / ask.jct))
