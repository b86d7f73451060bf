"""The expected wait of a newly arriving request for its first token.

A fluid estimate from a `Backlog`, which does not simulate a policy step by step. The first token
comes after the steps for its own prompt tokens and those before it, or after the decodes that
running requests need until they leave rows and blocks for all of them, whichever takes longer. Both
are priced by the scheduler's cost model. If something cannot be known, the estimate errs short, so
that too few late requests are refused rather than too many: policies without a known order
(`Policy.queue_priority`) are assumed to serve the newcomer first, caches do not grow, and nothing
is preempted for their growth. The policy says which requests make room for the newcomer
(`Policy.makes_room`).

A router has a coarser estimate of the same kind (`routing/estimate.py`), for all replicas at once
and from sums, since a snapshot contains no requests. It knows tiers, this one knows places in the
policy's order; it frees blocks and rows evenly, this one by output lengths; it spreads a step's
fixed price over tokens, this one counts steps. Neither can replace the other: this one needs a
backlog, and 25 us for one engine. If nothing is short and all come in order, the two differ by a
step and by rounding to whole tokens; a test checks that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.reachability import Alone
from jaxserve.sched.fairness.fair_share import Share
from jaxserve.sched.request import Request
from jaxserve.sched.slo.backlog import Backlog, Known
from jaxserve.sched.state.output_lengths import Survival

_POINTS = 48  # points in time at which remaining requests are counted
_SPAN = 3.0  # mean outputs until the last of these points


@dataclass(frozen=True)
class Wait:
    """Seconds until a request's first token: under the present load, and on an idle engine."""

    seconds: float
    alone: float


class _Work(NamedTuple):
    """Prompts to compute: their number, their tokens and the cost model's sums over them; how many
    of them have not begun, and the blocks that those take."""

    prompts: int
    tokens: int
    quad: int
    cached: int
    starts: int
    blocks: int


class _Came:
    """Work by standing, in arrays that double: a step may bring as many as the queue holds."""

    def __init__(self) -> None:
        self._count = 0
        self._standing = np.empty(16)
        self._work = np.empty((16, len(_Work._fields)), np.int64)

    def add(self, standing: float, work: _Work) -> None:
        """Adds work."""
        if self._count == len(self._standing):
            twice = (np.concatenate([a, a]) for a in (self._standing, self._work))
            self._standing, self._work = twice
        self._standing[self._count], self._work[self._count] = standing, work
        self._count += 1

    def until(self, place: float) -> np.ndarray:
        """Sums of the work that stands no later, int64 [6]."""
        before = self._standing[: self._count] <= place
        return self._work[: self._count][before].sum(axis=0)


class TtftEstimator:
    """Predicts from one backlog. Slow parts are computed once, on first use; then a query takes two
    bisections, and a query of the policy if memory or rows are short. Any thread may ask, one at a
    time."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._came: dict[str, _Came] = {}  # work that has come since, by tenant
        self._count = backlog.received
        self._free_at = backlog.free_at

    def arrived(self, request: Request, now: float, cached: int = 0) -> None:
        """Adds a request that was queued after the backlog was taken.

        Args:
            request: The request.
            now: When it was submitted, in seconds on the backlog's clock.
            cached: Cached tokens of its prompt.
        """
        if not len(self._backlog) and self._count == self._backlog.received:
            self._free_at = max(self._free_at, now)  # it was idle until now
        place = self._place(self._known(request, now, cached), now)
        self._count += request.sampling.n
        if place is not None:
            own = _Work(*(request.sampling.n * part for part in self._own(request, cached)))
            self._came.setdefault(request.tenant, _Came()).add(place, own)

    def wait(self, request: Request, now: float, cached: int = 0) -> Wait:
        """The wait of a request that is submitted now, from its arrival on; with several
        continuations, that of the first.

        Args:
            request: The request.
            now: Seconds, on the backlog's clock.
            cached: Cached tokens of its prompt.
        """
        backlog, own = self._backlog, self._own(request, cached)
        known = self._known(request, now, cached)
        place = self._place(known, now)
        alone = self._prefill(own, 0, 0.0)[0]
        total = _sum(own, self._before(place, request, own))
        lacking = total.starts - (backlog.max_rows - self._holders)
        short = total.blocks - backlog.free_blocks
        if max(lacking, short) > 0:
            rows, blocks = self._given_up(place, known, now)
            lacking, short = lacking - rows, short - blocks
        seconds = self._seconds(total, self._steps_until(lacking, short, total.starts))
        waited = now - (request.arrival or now)
        return Wait(waited + max(alone, seconds + (self._free_at - now)), alone)

    # Work before the request.

    def _known(self, request: Request, now: float, cached: int) -> Known:
        backlog = self._backlog
        alone = Alone.from_request(request, backlog.step_time, backlog.prefill_tokens)
        return Known.from_request(
            request,
            alone,
            arrival=request.arrival or now,
            seq=self._count,
            seed=backlog.known.seed,
            cached=cached,
        )

    def _place(self, known: Known, now: float) -> float | None:
        found = self._backlog.queue_priority(known, now)
        return None if found is None else float(found[0])

    def _own(self, request: Request, cached: int) -> _Work:
        size = len(request.prompt)
        blocks, tokens = int(blocks_for(size, self._backlog.block_size)), size - cached
        return _Work(1, tokens, tokens * (tokens + 2 * cached), cached, 1, blocks)

    def _before(self, place: float | None, request: Request, own: _Work) -> _Work:
        """The work before the request: running requests and its tenant's waiting ones that rank no
        later; of other tenants' waiting requests, no more than their share in that time."""
        if place is None:
            return _NOTHING
        tenant, shares = request.tenant, self._backlog.shares
        before = self._until(tenant, place)
        mine = _sum(before, own).tokens
        before = _sum(before, self._until(None, place))
        us = shares.get(tenant, Share())
        weight = us.weight if request.weight is None else request.weight
        for name in {*self._queues, *self._came} - {tenant, None}:
            assert name is not None
            theirs = self._until(name, place)
            ahead = mine / weight + self._counter(tenant) - self._counter(name)
            most = max(0.0, ahead) * shares.get(name, Share()).weight
            if theirs.tokens > most:
                theirs = _Work(*(int(part * most / theirs.tokens) for part in theirs))
            before = _sum(before, theirs)
        return before

    def _counter(self, tenant: str) -> float:
        """The tenant's counter. A tenant that was idle has not saved anything up
        (`FairShares.join`)."""
        counter = self._backlog.shares.get(tenant, Share()).counter
        return counter if tenant in self._queues else max(counter, self._least)

    @cached_property
    def _least(self) -> float:
        """The lowest counter of waiting tenants; the highest of all tenants if none waits."""
        shares = self._backlog.shares
        waiting = [shares[name].counter for name in self._queues if name is not None]
        return min(waiting, default=max((one.counter for one in shares.values()), default=0.0))

    def _until(self, tenant: str | None, place: float) -> _Work:
        """Work of the tenant's waiting requests up to that place; with None, of running
        requests."""
        found = np.zeros(6, np.int64)
        if tenant in self._queues:
            standing, sums = self._queues[tenant]
            found += sums[:, int(np.searchsorted(standing, place, side="right"))]
        if tenant is not None and tenant in self._came:
            found += self._came[tenant].until(place)
        return _Work(*map(int, found))

    @cached_property
    def _queues(self) -> dict[str | None, tuple[np.ndarray, np.ndarray]]:
        """By tenant, the waiting requests, and with None the running ones that have more to compute
        than a decode."""
        backlog, known = self._backlog, self._backlog.known
        pending = np.flatnonzero(~known.decoding)
        waits = known.waiting[pending]
        found: dict[str | None, tuple[np.ndarray, np.ndarray]] = {}
        found[None] = self._queue(pending[~waits])
        names, waiting = list(backlog.shares), pending[waits]
        for number in np.unique(backlog.tenants[waiting]).tolist():
            found[names[number]] = self._queue(waiting[backlog.tenants[waiting] == number])
        return found

    def _queue(self, pending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The requests by standing, [m], and sums of `_Work` over the first 0, 1, ... m of them,
        int64 [6, m + 1]."""
        backlog, known = self._backlog, self._backlog.known
        standing = self._standing
        if standing is not None:
            pending = pending[np.argsort(standing[pending], kind="stable")]
        cached = known.computed[pending]
        length = known.prompt_len[pending] + known.generated[pending]
        tokens, starts = length - cached, known.waiting[pending]
        sums = np.zeros((6, len(pending) + 1), np.int64)
        parts = (
            np.ones(len(pending), np.int64),
            tokens,
            tokens * (tokens + 2 * cached),
            cached,
            starts,
            starts * blocks_for(length, backlog.block_size),
        )
        np.cumsum(np.stack(parts), axis=1, out=sums[:, 1:])
        return (np.zeros(0) if standing is None else standing[pending]), sums

    @cached_property
    def _standing(self) -> np.ndarray | None:
        return self._backlog.queue_priority(self._backlog.known, self._backlog.time)

    def _given_up(self, place: float | None, known: Known, now: float) -> tuple[int, int]:
        """Rows and blocks that running requests would lose to the request."""
        blocks = self._backlog.blocks
        if place is None:  # it is assumed to be served first, so all make room
            return self._holders, int(blocks.sum())
        losers = self._backlog.makes_room(known, now)
        return int(np.count_nonzero(losers)), int(blocks[losers].sum())

    # Time of the work.

    def _seconds(self, work: _Work, steps: float) -> float:
        """Seconds of the prompts, and of decodes until this many steps have passed."""
        prefill, taken = self._prefill(work, self._decodes, self._read)
        if steps <= 0:
            return prefill
        # By then, requests for which there was room have started.
        rows = min(self._backlog.max_rows, self._holders + work.starts)
        mean = self._read / self._decodes if self._decodes else work.tokens / work.prompts
        decode = self._backlog.step_time(BatchFeatures(rows, rows, rows * mean, rows, 0, 0, 0))
        if self._backlog.policy.mixed_batches:
            steps = max(0.0, steps - taken)
        return prefill + decode * steps

    def _prefill(self, work: _Work, decodes: int, read: float) -> tuple[float, int]:
        """Seconds of the steps that compute prompts, beside this many decodes, and their number."""
        backlog = self._backlog
        if not backlog.policy.mixed_batches:
            decodes, read = 0, 0.0
        room = max(1, backlog.prefill_tokens - decodes)
        steps = max(1, -(-work.tokens // room))
        tokens = -(-work.tokens // steps) + decodes
        prompts = max(1.0, work.prompts / steps)
        quad, cached = work.quad / steps, work.cached / steps
        batch = BatchFeatures(tokens, tokens, read, decodes, quad, prompts, cached)
        return steps * backlog.step_time(batch), steps

    # Time until there is room.

    @cached_property
    def _holders(self) -> int:
        return int(np.count_nonzero(~self._backlog.known.waiting))

    @cached_property
    def _decodes(self) -> int:
        return int(np.count_nonzero(self._backlog.known.decoding))

    @cached_property
    def _read(self) -> float:
        known = self._backlog.known
        return float((known.computed[known.decoding] + 1).sum())

    def _steps_until(self, rows: float, blocks: float, starts: int) -> float:
        """Decodes until this many more rows and blocks are free. starts: requests that begin until
        then, which free theirs again."""
        if rows <= 0 and blocks <= 0:
            return 0.0
        times, left, freed = self._leaving
        every = max(1, min(self._backlog.max_rows, self._holders + starts))
        found = 0.0
        for lack, curve, share in (
            (rows, left, every),
            (blocks, freed, max(1.0, every * self._mean_blocks)),
        ):
            if lack <= 0:
                continue
            if lack <= curve[-1]:
                found = max(found, float(np.interp(lack, curve, times)))
            else:  # after as many decodes as an output has, all memory is freed once
                rest = (lack - curve[-1]) / share * self._mean
                found = max(found, float(times[-1]) + rest)
        return found

    @cached_property
    def _mean_blocks(self) -> float:
        runs = ~self._backlog.known.waiting
        return float(self._backlog.blocks[runs].mean()) if runs.any() else 0.0

    @cached_property
    def _leaving(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Decodes from now, [_POINTS], and by then the mean number of requests that have ended, and
        of free blocks, including those of requests that started in the place of others."""
        backlog, known = self._backlog, self._backlog.known
        runs, longer, mean = np.flatnonzero(~known.waiting), self._outputs.longer, self._mean
        times = np.linspace(0.0, _SPAN * self._outputs.mean, _POINTS)
        if not self._holders:
            return times, np.zeros(_POINTS), np.zeros(_POINTS)
        had = known.generated[runs][:, None]
        alive = longer(had + times) / np.maximum(longer(had), 1e-12)
        alive[(had + times >= known.most_output[runs][:, None])] = 0.0
        alive[(longer(had) <= 0)[:, 0], 1:] = 0.0
        gone = (1.0 - alive).sum(axis=0)
        # Renewals: of the requests that start, the share whose outputs end within the time left.
        going = longer(times)
        if len(self._limits):
            going = going * (self._limits[:, None] > times).mean(axis=0)
        again = np.maximum(1.0 - going, times / mean - 0.5)
        new = np.convolve(np.diff(gone, prepend=0.0), again)[:_POINTS]
        freed = backlog.blocks[runs] @ (1.0 - alive) + new * self._mean_blocks
        return times, np.maximum.accumulate(gone + new), np.maximum.accumulate(freed)

    @cached_property
    def _limits(self) -> np.ndarray:
        """Most tokens that each waiting request may write."""
        known = self._backlog.known
        return np.asarray(known.most_output[known.waiting])

    @cached_property
    def _mean(self) -> float:
        """Mean output length of the waiting requests, tokens."""
        if not len(self._limits):
            return self._outputs.mean
        return max(1.0, float(self._outputs.within(self._limits).mean()))

    @cached_property
    def _outputs(self) -> Survival:
        known = self._backlog.known
        return Survival(*self._backlog.output_lengths, known.generated[known.generated > 0])


_NOTHING = _Work(0, 0, 0, 0, 0, 0)


def _sum(a: _Work, b: _Work) -> _Work:
    return _Work(*(ours + theirs for ours, theirs in zip(a, b, strict=True)))
