"""One simulated replica: the engine's loop on a virtual clock.

The engine launches step N, finishes N - 1 on the host while N runs, and plans N + 1: so a plan is
made when the step before the last ends, and starts when the last one does. Here it is the same,
with the cost model for a device.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost_model import BatchFeatures, CostModel
from jaxserve.sched.kinds import HIDDEN
from jaxserve.sched.online_cost import OnlineCostModel
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.request import Request
from jaxserve.sched.simulation.state import SimulatedScheduler
from jaxserve.sched.step import Step
from jaxserve.sched.table import State
from jaxserve.sched.watch import StepWatch, Watched

COAST_CELLS = 200_000  # rows x steps that are computed at once, at most
BATCH_COLUMNS = (
    "start",
    "duration",
    "num_tokens",
    "num_decodes",
    "num_prefills",
    "kv_used",
    "preemptions",
    "num_hidden",
)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Who was in a batch: requests [n] by their number in the workload, the tokens each computed
    and whether it was a decode; preempted: requests that lost their cache since the batch before it
    was planned."""

    requests: np.ndarray
    tokens: np.ndarray
    decoding: np.ndarray
    preempted: np.ndarray


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step. rows: of the plan; emitting: those that sample, and which requests they were
    then, by their number in the workload; steady: every request there is took part with a decode
    and goes on."""

    rows: np.ndarray
    emitting: np.ndarray
    requests: np.ndarray
    end: float
    steady: bool
    watched: Watched | None = None


class Replica:
    """Serves requests in virtual time. `next_time` is when its loop comes round next.

    output_len: int64, tokens that each request of the workload writes; a request ends when the
    host has them all, which its policy does not foresee. token_times: float64 over all of them;
    request i's start at offsets[i]. preemptions: int64 by request. Both are filled in.
    """

    def __init__(
        self,
        scheduler: SimulatedScheduler,
        cost_model: CostModel,
        *,
        output_len: np.ndarray,
        offsets: np.ndarray,
        token_times: np.ndarray,
        preemptions: np.ndarray,
        overlap: bool,
        coasts: bool = False,
        record_rows: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.cost_model = cost_model
        self.next_time = math.inf
        self.live = 0
        self.rows_log: list[BatchRows] = []
        self._lengths, self._offsets, self._token_times = output_len, offsets, token_times
        self._over = np.zeros(len(output_len), bool)
        self._preemptions = preemptions
        self._overlap, self._padding = overlap, scheduler.view.padding
        seen = scheduler.view.cost_model
        self._watch = StepWatch(seen, self._padding) if isinstance(seen, OnlineCostModel) else None
        self._coasts, self._record_rows = coasts, record_rows
        self._request_of = np.zeros(scheduler.table.capacity, np.int64)
        self._pending: _Step | None = None  # launched, its tokens not yet on the host
        self._last: _Step | None = None  # the last time round; None if nothing was launched
        self._gone: list[int] = []  # requests that have lost their cache since the last batch
        self._clock = 0.0
        self._device_free = 0.0
        self._log: list[tuple[float, ...]] = []
        self._log_parts: list[np.ndarray] = []

    def receive(self, number: int, request: Request) -> None:
        """The request, number `number` of the workload, arrives; not before `next_time` has passed
        what arrived earlier."""
        row = self.scheduler.add(request, int(self._lengths[number]))
        if row >= len(self._request_of):
            self._request_of = np.resize(self._request_of, self.scheduler.table.capacity)
        self._request_of[row] = number
        self.live += 1
        if self.next_time == math.inf:
            self._clock = self.next_time = max(self._clock, request.arrival)

    def run(self, horizon: float) -> None:
        """Once round the loop; several times, until `horizon`, where the outcome is certain.
        horizon: when the next request arrives anywhere."""
        last = self._last
        if not (
            last is not None
            and last.steady
            and len(last.rows) == self.live
            and self._coasts
            and self._coast(last, horizon)
        ):
            self._once()
        self.next_time = self._clock if self.live else math.inf

    def _once(self) -> None:
        pending = self._pending
        launched = self._launch()
        if pending is not None:
            self._finish(pending)
        self._pending = self._last = launched
        if launched is not None and not self._overlap:
            self._finish(launched)
            self._pending = None

    def batches(self) -> np.ndarray:
        """float64 [batches, len(BATCH_COLUMNS)], in the order in which they ran."""
        self._flush_log()
        if not self._log_parts:
            return np.zeros((0, len(BATCH_COLUMNS)))
        return np.concatenate(self._log_parts)

    def _launch(self) -> _Step | None:
        """Plans the next step and starts it; None if there is nothing to do yet."""
        if not self.live:
            return None
        scheduler = self.scheduler
        step = scheduler.schedule(self._clock)
        self._gone += self._request_of[step.preempted].tolist()
        if not len(step):
            if self._pending is None and not step.plan.operations:
                raise InvalidPlan(f"the policy plans nothing for {self.live} requests")
            if step.moves:
                self._move(step)
            return None
        features = step.features(self._padding)
        start = max(self._clock, self._device_free)
        duration = float(self.cost_model.batch_time(features))
        end = self._device_free = start + duration
        self._log.append(
            (
                start,
                duration,
                features.num_tokens,
                features.num_decodes,
                features.num_prefills,
                int(scheduler.pool.as_tokens(scheduler.pool.num_used)),
                len(self._gone),
                int(np.count_nonzero(step.plan.kinds == HIDDEN)),
            )
        )
        if self._record_rows:
            self._record(step)
        self._gone.clear()
        emitting, generated = step.rows, step.generated
        if np.count_nonzero(step.emits) < len(emitting):
            emitting, generated = emitting[step.emits], generated[step.emits]
        requests = self._request_of[emitting]
        # A request whose last token is still on its way takes part once more, for nothing.
        lengths = self._lengths[requests]
        real = generated <= lengths
        at = self._offsets[requests] + generated - 1
        self._token_times[at[real]] = end
        done = scheduler.release_finished(step)
        steady = features.num_decodes == self.live and not len(done)
        steady = steady and bool((generated < lengths).all())
        watched = None if self._watch is None else self._watch.launched(step, self._clock)
        return _Step(step.rows, emitting, requests, end, steady, watched)

    def _move(self, step: Step) -> None:
        """Operations without a batch: the device is at work on them, and the host goes on."""
        cost, nothing = self.cost_model, dataclasses.replace(step, moves=())
        took = cost.batch_time(step.features(self._padding))
        took -= cost.batch_time(nothing.features(self._padding))
        self._device_free = max(self._clock, self._device_free) + float(took)
        if self._watch is not None:
            self._watch.moved(step)

    def _finish(self, step: _Step) -> None:
        """The step's tokens reach the host; requests that have all of theirs are over."""
        table = self.scheduler.table
        self._clock = max(self._clock, step.end)
        if self._watch is not None and step.watched is not None:
            self._watch.finished(step.watched, self._clock)
        mine = ~self._over[step.requests]
        rows, requests = step.emitting, step.requests
        if np.count_nonzero(mine) < len(rows):  # late tokens belong to nobody
            rows, requests = rows[mine], requests[mine]
        self.scheduler.receive(rows, step.end)
        over = table.received[rows] >= self._lengths[requests]
        if np.count_nonzero(over):
            for row in rows[over].tolist():
                self._end(row)

    def _end(self, row: int) -> None:
        number = self._request_of[row]
        self._over[number] = True
        self._preemptions[number] = self.scheduler.table.preemptions[row]
        self.scheduler.finish(row)
        self.live -= 1

    # Coasting: while every request decodes, nobody waits and memory lasts, the plans of a policy
    # that leaves nobody out are known, and a stretch of steps is a few array operations.

    def _coast(self, last: _Step, horizon: float) -> bool:
        """Runs as many steps at once as are certain; False if that is none."""
        table, rows = self.scheduler.table, last.rows
        pool = self.scheduler.pool
        if table.num_sampling or pool.shares or np.count_nonzero(pool.kind[rows] == HIDDEN):
            return False  # what they hold or read is not what a stretch counts
        lengths = self._lengths[self._request_of[rows]]
        left = lengths - table.generated[rows]
        most = int(left.max())
        early = left[lengths < table.max_tokens[rows]]
        if self._overlap and len(early):
            # Who ends before its limit takes part once more: a stretch ends with its last token.
            most = min(most, int(early.min()))
        stretch = self._stretch(rows, left, most, horizon)
        if stretch is None:
            return False
        features, used, ends, durations = stretch
        took = np.minimum(left, len(ends))
        self._write_tokens(rows, took, ends)
        self._log_stretch(features, used, ends, durations)
        if self._record_rows:
            self._record_stretch(rows, took)
        if self._pending is not None:
            self._finish(self._pending)
        self._book(rows, took, left, ends)
        return True

    def _stretch(
        self, rows: np.ndarray, left: np.ndarray, most: int, horizon: float
    ) -> tuple[BatchFeatures, np.ndarray, np.ndarray, np.ndarray] | None:
        """Features, KV tokens used, ends and durations of up to `most` steps ahead. left: tokens
        that each of the rows still writes."""
        pool, context = self.scheduler.pool, self.scheduler.table.computed[rows]
        first = BatchFeatures.of_decodes(
            np.array([len(left)]), np.array([int(context.sum()) + len(left)]), self._padding
        )
        expected = float(self.cost_model.batch_time(first)[0])
        reach = most
        if horizon < math.inf:
            reach = min(reach, int((horizon - self._clock) / max(expected, 1e-9)) + 2)
        step = np.arange(1, max(1, min(reach, COAST_CELLS // len(left))) + 1)
        active = left[:, None] >= step
        length = (context[:, None] + step) * active
        blocks = pool.blocks_for(np.maximum(length, pool.room(rows)[:, None]))
        used = (blocks * active).sum(axis=0)
        features = BatchFeatures.of_decodes(active.sum(axis=0), length.sum(axis=0), self._padding)
        durations = np.asarray(self.cost_model.batch_time(features), np.float64)
        ends = self._device_free + np.cumsum(durations)
        # When each of them is planned: one step ahead of time with overlap.
        planned = np.concatenate([[self._clock, self._device_free], ends])
        planned = planned[: len(step)] if self._overlap else planned[1 : len(step) + 1]
        sure = (used <= pool.num_blocks) & (planned < horizon)
        steps = len(step) if sure.all() else int(np.argmin(sure))
        if not steps:
            return None
        features = BatchFeatures.of_decodes(
            features.num_decodes[:steps], features.decode_kv[:steps]
        )
        used = pool.as_tokens(used[:steps])
        return features, used, ends[:steps], durations[:steps]

    def _write_tokens(self, rows: np.ndarray, took: np.ndarray, ends: np.ndarray) -> None:
        first = self._offsets[self._request_of[rows]] + self.scheduler.table.generated[rows]
        step = np.arange(int(took.sum())) - np.repeat(np.cumsum(took) - took, took)
        self._token_times[np.repeat(first, took) + step] = ends[step]

    def _book(self, rows: np.ndarray, took: np.ndarray, left: np.ndarray, ends: np.ndarray) -> None:
        """Leaves the scheduler as if it had planned each of the steps."""
        scheduler, table, steps = self.scheduler, self.scheduler.table, len(ends)
        late = int(self._overlap)  # steps whose tokens are not on the host yet
        scheduler.advance(rows, took)
        table.received[rows] += np.minimum(took, steps - late)
        if steps > late:
            table.last_token[rows] = ends[np.minimum(took, steps - late) - 1]
            self._clock = float(ends[steps - late - 1])
        self._device_free = float(ends[-1])
        over = (took == left) & (took <= steps - late)
        for row in rows[over][np.argsort(took[over], kind="stable")].tolist():
            self._end(row)
        going = rows[~over]
        drained = table.generated[going] >= table.max_tokens[going]
        for row in going[drained].tolist():
            scheduler.pool.release(row)
        table.move(going[drained], State.DRAINING)
        running = going[~drained]
        scheduler.pool.grow_all(running, table.computed[running])
        here = rows[took == steps]
        ended = (took == left)[took == steps].any()
        requests = self._request_of[here]
        self._last = _Step(here, here, requests, self._device_free, steady=not ended)
        self._pending = self._last if self._overlap else None

    # What is kept of the batches.

    def _log_stretch(
        self, features: BatchFeatures, used: np.ndarray, ends: np.ndarray, durations: np.ndarray
    ) -> None:
        self._flush_log()
        part = np.zeros((len(ends), len(BATCH_COLUMNS)))
        part[:, 0] = ends - durations
        part[:, 1] = durations
        part[:, 2] = part[:, 3] = features.num_decodes
        part[:, 5] = used
        self._log_parts.append(part)

    def _flush_log(self) -> None:
        if self._log:
            self._log_parts.append(np.array(self._log, np.float64))
            self._log = []

    def _record(self, step: Step) -> None:
        requests, gone = self._request_of[step.rows], np.array(self._gone, np.int64)
        self.rows_log.append(BatchRows(requests, step.plan.num_tokens, step.decodes, gone))

    def _record_stretch(self, rows: np.ndarray, took: np.ndarray) -> None:
        requests, nobody = self._request_of[rows], np.zeros(0, np.int64)
        for step in range(1, int(took.max()) + 1):
            here = requests[took >= step]
            ones = np.ones(len(here), np.int64)
            self.rows_log.append(BatchRows(here, ones, ones > 0, nobody))
