"""One simulated replica: the engine's loop on a virtual clock.

The engine launches step N, finishes N - 1 on the host while N runs, and plans N + 1: so a plan is
made when the step before the last ends, and starts when the last one does. It is the same here,
with the cost model in place of a device. If drafts are in flight, or the scheduler expects to
draft, the step in flight is finished first, and the next one is planned when its tokens are known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cache.cache_kinds import HIDDEN
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.host_overhead import BURST
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.cost.step_residuals import Draws
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.request import Request
from jaxserve.sched.routing.take_snapshot import Lately
from jaxserve.sched.row_columns import grow_columns
from jaxserve.sched.slo.tiers import lengthening
from jaxserve.sched.state.request_table import DRAINING, FREE
from jaxserve.sched.step import Discard, Step
from jaxserve.sched.step_timing import HostTimes, StepWatch, Watched
from jaxserve.simulator.replica.clock import Clock
from jaxserve.simulator.replica.drafter import Drafter, Guesses
from jaxserve.simulator.replica.multi_step import Decoding, InFlight, Stretch, stretch
from jaxserve.simulator.replica.outputs import Outputs
from jaxserve.simulator.replica.scheduler_state import SimulatedScheduler
from jaxserve.simulator.settings import BATCH, BatchRows, Setting
from jaxserve.simulator.workloads.shared_prefixes import BlockKeys


@dataclass(frozen=True, slots=True)
class _Step:
    """A launched step.

    Attributes:
        rows: Rows of the plan.
        emitting: Rows that sample.
        requests: Numbers of the requests in these rows at the launch.
        end: When the device is done.
        drafts: int64, number of drafted tokens after each of `emitting`; None without drafts.
        steady: Whether every live request decodes in it and continues.
        watched: Its prediction.
    """

    rows: np.ndarray
    emitting: np.ndarray
    requests: np.ndarray
    drafts: np.ndarray | None
    end: float
    steady: bool
    watched: Watched


class Replica:
    """One replica on the virtual clock.

    Args:
        scheduler: Plans its steps.
        setting: Its limits, costs and clocks.
        outputs: Outputs of all requests, by number; the replica fills them in.
        number: Number of the replica.
        coasts: Whether predictable steps may be run several at once (`multi_step.py`).
        record_rows: Whether to record which requests were in each batch.
        block_keys: Block keys of the workload's requests; None without prefix caching.
        guesses: Guesses for drafts; None if the policy does not draft.

    Attributes:
        next_time: When the loop runs next; inf if it is idle.
        live: Requests that have not ended.
        dead: Whether it has died.
        slowdown: Factor of its step times.
        lately: Recent statistics for snapshots.
        began: Requests whose first token has come, since their reader last emptied it.
        rows_log: Which requests were in each batch, if recorded.
    """

    def __init__(
        self,
        scheduler: SimulatedScheduler,
        setting: Setting,
        *,
        outputs: Outputs,
        number: int = 0,
        coasts: bool = False,
        record_rows: bool = False,
        block_keys: BlockKeys | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.next_time = math.inf
        self.live = 0
        self.dead, self.slowdown = False, 1.0  # factor of step times
        self.lately = Lately()
        self.began: list[int] = []
        self._left: set[int] = set()  # requests that went on elsewhere during the step in flight
        self.rows_log: list[BatchRows] = []
        self._block_keys = block_keys
        self._drafter = None if guesses is None else Drafter(scheduler, guesses, outputs)
        self._host_times, self._launching = HostTimes(), 0.0  # the latter of the last step
        self._setting, self._cost = setting, setting.cost_model
        self._outputs = outputs
        self._came = 0  # requests that the host has not received yet
        self._woken = -math.inf  # when the first arrival that just woke it up came
        self._watch = StepWatch(scheduler.view.cost_model, setting.padding)
        scheduler.view.device.ratios = self._watch.ratios
        self._learns = isinstance(scheduler.view.cost_model, OnlineCostModel)
        self._coasts, self._record_rows = coasts, record_rows
        self._request_of = np.zeros(scheduler.table.capacity, np.int64)
        self._has_slot = np.zeros(scheduler.table.capacity, bool)  # for sampling
        self._pending: _Step | None = None  # launched, its tokens not yet on the host
        self._last: _Step | None = None  # launched in the last iteration, or None
        self._gone: list[int] = []  # requests that have lost their cache since the last batch
        self._moved = np.zeros(2, np.int64)  # slots saved and loaded without a batch since then
        self._clock = Clock(setting.host)
        scatter = setting.scatter
        self._draws = None if scatter is None else Draws(scatter, setting.seed, number)
        self._batches = 0  # launched
        self._log: list[tuple[float, ...]] = []
        self._log_parts: list[np.ndarray] = []

    @property
    def now(self) -> float:
        """How far its host has come."""
        return self._clock.now

    @property
    def device_free(self) -> float:
        """When the device has finished all work launched so far."""
        return self._clock.device_free

    def receive(
        self,
        number: int,
        request: Request,
        now: float,
        times: Sequence[float] = (),
        sent: Sequence[bytes] = (),
    ) -> None:
        """A request arrives. Call this only after the loop has run up to `now`.

        Args:
            number: Its number in the workload.
            request: The request.
            now: Seconds.
            times: When the tokens came that another replica has generated of it.
            sent: Keys of the pages that come along.
        """
        output = int(self._outputs.lengths[number])
        keys: tuple[bytes, ...] = ()
        if times and request.block_keys is not None and self._block_keys is not None:
            known = self._block_keys.of(number, len(request.prompt) + len(times))
            keys = as_keys(known[len(request.block_keys) :])
        row = self.scheduler.add(
            request, output, number, adapter=int(request.adapter or 0), times=times, keys=keys
        )
        grow_columns(self, self.scheduler.table.capacity, _request_of=0, _has_slot=False)
        self._request_of[row] = number
        if self._drafter is not None:
            self._drafter.begin(row, request.tenant)
        if sent:
            self.scheduler.adopt(row, dict.fromkeys(sent, number))
        self.live += 1
        self._came += 1
        if self.next_time == math.inf:
            self._woken = now
        if now - self._woken <= BURST:
            self.next_time = self._clock.wake(now)

    def leave(self, number: int) -> list[bytes]:
        """A request goes on elsewhere, and a token of it that is in flight is lost. Returns the
        keys of the pages that go along."""
        scheduler, row = self.scheduler, self._row(number)
        pages, save = scheduler.pages(row)
        if save is not None:
            plain, saved = BatchFeatures(1, 1, 0, 0, 1, 1, 0), sum(save.counts)
            took = self._cost.batch_time(plain._replace(saved_slots=saved))
            self._clock.move(1, float(took - self._cost.batch_time(plain)))
            self._moved[0] += saved
        self._outputs.preemptions[number] = scheduler.table.preemptions[row]
        self._has_slot[row] = False
        if self._pending is not None:
            self._left.add(number)
        self.live -= 1
        scheduler.finish(row, complete=False)
        return [key for key, _ in pages]

    def pages(self, number: int) -> list[bytes]:
        """Keys of the pages that would go along if a request left now."""
        pages, _ = self.scheduler.pages(self._row(number))
        return [key for key, _ in pages]

    def _row(self, number: int) -> int:
        there = self.scheduler.table.state != FREE
        return int(np.flatnonzero((self._request_of == number) & there)[0])

    def die(self) -> None:
        """Stops the replica; its requests lose all state."""
        self.dead, self.next_time = True, math.inf
        table = self.scheduler.table
        for row in np.flatnonzero(table.state != FREE).tolist():
            self._outputs.preemptions[self._request_of[row]] = table.preemptions[row]
            self.scheduler.finish(row, complete=False)
        self.live, self._pending = 0, None

    def run(self, horizon: float) -> None:
        """Runs one iteration of the loop, or several predictable ones, up to `horizon`. horizon:
        when the next outside event happens, such as an arrival."""
        last, self._woken = self._last, -math.inf
        if not (
            last is not None
            and last.steady
            and len(last.rows) == self.live
            and self._coasts
            and horizon > self._clock.now
            and self._coast(last, horizon)
        ):
            self._once()
        busy = self.live or self._pending is not None
        self.next_time = self._clock.now if busy else math.inf

    def _once(self) -> None:
        pending = self._pending
        if pending is not None and self._waits(pending):
            self._finish(pending)
            self._pending = self._last = None
            return  # new arrivals take part in the next plan
        launched = self._launch()
        if pending is not None:
            self._finish(pending)
        self._pending = self._last = launched
        if launched is not None and not self._setting.overlap:
            self._finish(launched)
            self._pending = None

    def _waits(self, pending: _Step) -> bool:
        """Whether the next plan needs the tokens of the step in flight."""
        if self._drafter is None:
            return False
        return pending.drafts is not None or self.scheduler.would_draft(self._clock.now)

    def stop(self, end: float) -> np.ndarray:
        """Ends the simulation. Preemptions of requests that have not ended are recorded.

        Args:
            end: Batches that begin later are dropped; inf to keep all.

        Returns:
            Records of BATCH, in the order in which they ran.
        """
        table = self.scheduler.table
        going = np.flatnonzero(table.state != FREE)
        self._outputs.preemptions[self._request_of[going]] = table.preemptions[going]
        self._flush_log()
        log = np.concatenate([np.zeros(0, BATCH), *self._log_parts])
        log = log[log["start"] < end]
        del self.rows_log[len(log) :]
        return log

    def _launch(self) -> _Step | None:
        """Plans the next step and starts it; None if there is nothing to do yet."""
        if not self.live:
            return None
        scheduler, clock = self.scheduler, self._clock
        began = clock.now
        if self._draws is not None:
            clock.pace = float(self._draws.of_host(self._batches, 1)[0])
        clock.receive(self._came)
        self._came = 0
        flying = () if self._pending is None else (self._pending.watched,)
        free_at = self._watch.free_at(*flying, host_gap_s=scheduler.view.device.host_gap_s)
        step = scheduler.schedule(clock.now, free_at, self._watch.overrun)
        clock.plan(self.live)
        if len(step.preempted):
            self._gone += self._request_of[step.preempted].tolist()
            self._has_slot[step.preempted] = False
        moves = sum(not isinstance(move, Discard) for move in step.moves)
        if not len(step):
            if self._pending is None and not step.plan.operations:
                raise InvalidPlan(f"it plans nothing for {self.live} requests")
            if moves:
                self._move(step, moves)
            return None
        features = step.features(self._setting.padding)
        duration = float(self._cost.batch_time(features))
        if self._draws is not None:
            prompts = features.num_prefills > 0
            (drawn,) = self._draws.residuals(self._batches, np.array([duration]), prompts=prompts)
            duration *= float(drawn)
        duration *= self.slowdown
        self._batches += 1
        self.lately.stepped(self.slowdown)
        admitted, idle = self._admit(step.rows), self._pending is None
        start, end = clock.launch(len(step), admitted, moves, duration, idle=idle)
        self._launching = clock.now - began
        self._log.append(
            (
                start,
                duration,
                features.num_tokens,
                features.num_decodes,
                features.num_prefills,
                int(scheduler.pool.as_tokens(scheduler.pool.num_used)),
                len(self._gone),
                0 if step.hidden is None else int(np.count_nonzero(step.hidden)),
                step.num_recomputed_tokens,
                features.saved_slots + int(self._moved[0]),
                features.loaded_slots + int(self._moved[1]),
                scheduler.pool.num_shared,
            )
        )
        launched = self._launched(step, features, end)
        if self._record_rows:
            self._record(step, launched.watched.predicted if self._learns else duration)
        self._gone.clear()
        self._moved[:] = 0
        return launched

    def _launched(self, step: Step, features: BatchFeatures, end: float) -> _Step:
        emitting, generated = step.rows, step.generated
        if np.count_nonzero(step.emits) < len(emitting):
            emitting, generated = emitting[step.emits], generated[step.emits]
        requests, drafts = self._request_of[emitting], step.plan.drafts
        if drafts is not None:
            drafts = drafts[step.emits]
            self._outputs.drafted[requests] += drafts
        done = self.scheduler.release_finished(step)
        if len(done):
            self._has_slot[done] = False
        steady = features.num_decodes == self.live and not len(done)
        steady = steady and bool((generated < self._outputs.lengths[requests]).all())
        watched = self._watch.launched(step, self._clock.now, features=features)
        return _Step(step.rows, emitting, requests, drafts, end, steady, watched)

    def _admit(self, rows: np.ndarray) -> int:
        """How many of these rows take a slot for sampling now."""
        if not self._setting.host.admit:
            return 0
        admitted = len(rows) - int(np.count_nonzero(self._has_slot[rows]))
        self._has_slot[rows] = True
        return admitted

    def _move(self, step: Step, moves: int) -> None:
        """Moves caches without a batch: the device is busy with them, and the host continues."""
        padding, nothing = self._setting.padding, dataclasses.replace(step, moves=())
        features = step.features(padding)
        self._moved += (features.saved_slots, features.loaded_slots)
        took = self._cost.batch_time(features)
        took -= self._cost.batch_time(nothing.features(padding))
        self._clock.move(moves, float(took))
        self._watch.moved(step)

    def _finish(self, step: _Step) -> None:
        """The step's tokens reach the host; requests that have all of theirs end."""
        now = self._clock.land(step.end)
        self._watch.finished(step.watched, now)
        self._take_in(step, now)
        self._clock.finish(len(step.emitting))
        if self.scheduler.policy.speculates and self._setting.overlap:
            took = self._launching + self._clock.now - now
            self.scheduler.view.device.host_gap_s = self._host_times.note(took)

    def _take_in(self, step: _Step, now: float) -> None:
        table, outputs = self.scheduler.table, self._outputs
        rows, requests, drafts = step.emitting, step.requests, step.drafts
        # A request whose last token was in flight has taken part once more, in vain.
        over = outputs.over[requests]
        if self._left:
            over = over | np.isin(requests, [*self._left])
            self._left.clear()  # later steps were launched without them
        if np.count_nonzero(over):
            rows, requests = rows[~over], requests[~over]
            drafts = None if drafts is None else drafts[~over]
        before, counts = table.received[rows], None
        came = np.ones(len(rows), np.int64)
        if self._drafter is not None and drafts is not None:
            came += self._drafter.right(requests, before, drafts)
            counts = came = np.minimum(came, outputs.lengths[requests] - before)
            outputs.accepted[requests] += came - 1
        first = outputs.offsets[requests] + before
        for token in range(int(came.max(initial=0))):
            outputs.times[(first + token)[came > token]] = now
        self.scheduler.receive(rows, now, counts)
        over = before + came >= outputs.lengths[requests]
        going = ~over
        if self._block_keys is not None:
            self._know(rows[going], requests[going], came[going], self._block_keys)
        if self._drafter is not None:
            self._drafter.observe(rows[going], requests[going], before[going], came[going])
        if self._setting.routing.looks:
            first = rows[before == 0]
            in_time = now - table.arrival[first] <= table.ttft[first]
            self.lately.began(len(first), int(np.count_nonzero(in_time)))
            if self._setting.routing.link is not None:
                self.began += requests[going & (before == 0)].tolist()
            self.lately.ended(outputs.lengths[requests[over]])
        if np.count_nonzero(over):
            for row in rows[over].tolist():
                self._end(row)

    def _know(
        self, rows: np.ndarray, requests: np.ndarray, came: np.ndarray, keys: BlockKeys
    ) -> None:
        """Adds new tokens of these requests, which may have completed blocks."""
        table, size = self.scheduler.table, keys.block_size
        known = table.prompt_len[rows] + table.received[rows]
        full = known // size - (known - came) // size
        for i in np.flatnonzero((full > 0) & (requests < len(keys))).tolist():
            new = keys.of(int(requests[i]), int(known[i]))[-int(full[i]) :]
            self.scheduler.know(int(rows[i]), as_keys(new))

    def _end(self, row: int) -> None:
        number = int(self._request_of[row])
        self._outputs.found[number] = self.scheduler.table.cached_at_start[row]
        self._outputs.end(number)
        self._has_slot[row] = False
        self._outputs.preemptions[number] = self.scheduler.table.preemptions[row]
        self.scheduler.finish(row)
        if self._drafter is not None:
            self._drafter.end(row)
        self.live -= 1

    def _coast(self, last: _Step, horizon: float) -> bool:
        """Runs as many steps as are predictable at once; False if there are none."""
        table, rows = self.scheduler.table, last.rows
        pool, overlap = self.scheduler.pool, self._setting.overlap
        if (
            table.num_sampling
            or pool.shares
            or pool.groups
            or np.count_nonzero(pool.kind[rows] == HIDDEN)
        ):
            return False  # a run of steps does not count such caches
        if self._record_rows and np.ptp(table.tier[rows]):
            return False  # nor the cost of one tier for the other
        lengths = self._outputs.lengths[self._request_of[rows]]
        left = lengths - table.generated[rows]
        most = int(left.max())
        early = left[lengths < table.max_tokens[rows]]
        if overlap and len(early):
            # A request that ends before its limit takes part once more, so the run ends with its
            # last token.
            most = min(most, int(early.min()))
        decoding = Decoding(table.computed[rows], pool.room(rows), left, most)
        pending = self._pending
        flying = None if pending is None else InFlight(pending.end, len(pending.emitting))
        ahead = (self._draws, self._batches)
        found = stretch(decoding, pool, self._setting, self._clock, flying, horizon, ahead)
        if found is None:
            return False
        if pending is not None:
            self._take_in(pending, found.reached_first)
        self._batches += len(found)
        took = np.minimum(left, len(found))
        if self._record_rows:
            self.rows_log += BatchRows.of_decodes(self._request_of[rows], took)
        self._flush_log()
        self._log_parts.append(found.log)
        self._book(rows, took, left, found)
        return True

    def _book(self, rows: np.ndarray, took: np.ndarray, left: np.ndarray, found: Stretch) -> None:
        """Leaves the scheduler as if it had planned each of the steps."""
        scheduler, table, steps = self.scheduler, self.scheduler.table, len(found)
        reached = np.array(found.reached)
        there = np.minimum(took, len(reached))  # tokens that are on the host
        step = np.arange(int(there.sum())) - np.repeat(np.cumsum(there) - there, there)
        outputs = self._outputs
        first = outputs.offsets[self._request_of[rows]] + table.received[rows]
        outputs.times[np.repeat(first, there) + step] = reached[step]
        scheduler.advance(rows, took)
        scheduler.receive_several(rows, there, reached)
        self._clock = found.clock
        if found.done > self._watch.done:
            self._watch.done = found.done
        over = (took == left) & (took <= len(reached))
        if self._setting.routing.looks:
            lengths = outputs.lengths[self._request_of[rows]]
            for count in np.unique(took[over]).tolist():
                self.lately.ended(lengths[over & (took == count)])
        for row in rows[over][np.argsort(took[over], kind="stable")].tolist():
            self._end(row)
        going = rows[~over]
        drained = table.generated[going] >= table.max_tokens[going]
        for row in going[drained].tolist():
            scheduler.pool.release(row)
        self._has_slot[going[drained]] = False
        table.move(going[drained], DRAINING)
        running = going[~drained]
        scheduler.pool.grow_all(running, table.computed[running])
        here = rows[took == steps]
        ended = (took == left)[took == steps].any()
        requests, end = self._request_of[here], found.clock.device_free
        self._last = _Step(here, here, requests, None, end, not ended, found.last)
        self._pending = self._last if self._setting.overlap else None

    # Records of the batches.

    def _flush_log(self) -> None:
        if self._log:
            self._log_parts.append(np.array(self._log, BATCH))
            self._log = []

    def _record(self, step: Step, took: float) -> None:
        """Records the batch's requests. took: its predicted time."""
        requests, gone = self._request_of[step.rows], np.array(self._gone, np.int64)
        longer = lengthening(step, self.scheduler.view, took)
        self.rows_log.append(BatchRows(requests, step.plan.num_tokens, step.decodes, gone, longer))


def as_keys(ids: np.ndarray) -> tuple[bytes, ...]:
    """Ids of blocks, int64 [n], as pseudo-random distinct keys for the scheduler."""
    mixed = ids.astype(np.uint64)
    parts = []
    for _ in range(2):  # SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), which is a bijection
        mixed = mixed + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        parts.append(mixed)
    raw = np.stack(parts, axis=1).tobytes()
    return tuple(raw[first : first + 16] for first in range(0, len(raw), 16))
