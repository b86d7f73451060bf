"""The live requests and the steps that serve them, on the engine thread."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.config import MAX_LORAS
from jaxserve.engine import failures
from jaxserve.engine.adapters import Adapter
from jaxserve.engine.block_keys import KeyChain
from jaxserve.engine.device.batch_layout import Layout, PackedBatch
from jaxserve.engine.device.batching import build_batch, carry_out, sampling_rows
from jaxserve.engine.device.cache_moves import ROOM
from jaxserve.engine.device.compilations import CompileCounter, CompiledAfterWarmup
from jaxserve.engine.device.executor import Executor, Handle, PendingSample
from jaxserve.engine.device.host_copies import Saved
from jaxserve.engine.device.pooling_step import Pooled
from jaxserve.engine.device.sampling import NOT_FINITE, SampleResult, mask_words
from jaxserve.engine.device.sampling_state import (
    COUNT_MASK,
    RequestRow,
    SlotParams,
    has_penalty,
    plain_slot,
)
from jaxserve.engine.drafts.drafting import Drafting
from jaxserve.engine.drafts.speculator import Speculator
from jaxserve.engine.errors import NotFinite
from jaxserve.engine.in_flight import Emitting, InFlight
from jaxserve.engine.output import COMPLETE, FinishReason, Output
from jaxserve.engine.pooling import Pooling, pooled_pieces, vector_of
from jaxserve.engine.prompt_logprobs import PromptLogprobs, entries, prompt_logprob_pieces
from jaxserve.engine.sequence import NO_ROW, NO_SLOT, Continuation
from jaxserve.engine.stats import EngineInfo, StepStats
from jaxserve.engine.text.stop_conditions import ContinuationText
from jaxserve.sched.cache.block_sizes import slots_for
from jaxserve.sched.cache.cache_kinds import HIDDEN
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.reachability import Alone, SloProblem
from jaxserve.sched.plan import BatchPlan, InvalidPlan, Join
from jaxserve.sched.programs.program_table import NO_ANSWER
from jaxserve.sched.programs.verdict import ProgramVerdict
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo.tiers import lengthening
from jaxserve.sched.speculation.acceptance import AcceptanceRates
from jaxserve.sched.speculation.choice import MOST
from jaxserve.sched.step import Discard, Step
from jaxserve.sched.step_timing import HostTimes, StepWatch


@dataclasses.dataclass(frozen=True)
class Submit:
    """A request to serve, prepared on its caller's thread.

    Attributes:
        request: the submitted request.
        on_output: the caller's callback.
        texts: turn tokens into text, one for each of the request's continuations.
        row: its sampling parameters for the device.
        alone: latencies that an idle engine would reach.
        at: when it was submitted, in seconds on the engine's clock.
        problems: what is wrong with its latency targets.
        block_keys: keys of its prompt; None without reuse.
        drafting: drafts for its first continuations, one for each.
        adapter: the adapter that it uses; None for the base model.
        replays: of each continuation, the text of what another engine has generated, and why it has
            ended with that, if it has; empty for a request that begins here.
        pages: as `Request.pages`, which the request is without, since it stays until it ends.
    """

    request: Request
    on_output: Callable[[Output], None]
    texts: Sequence[ContinuationText]
    row: RequestRow
    alone: Alone
    at: float
    problems: tuple[SloProblem, ...] = ()
    block_keys: KeyChain | None = None
    drafting: Sequence[Drafting] = ()
    adapter: Adapter | None = None
    replays: Sequence[tuple[str, FinishReason | None]] = ()
    pages: Mapping[bytes, np.ndarray] = dataclasses.field(default_factory=dict)


class RowResult(NamedTuple):
    """A row's result of a step.

    Attributes:
        emitting: The row.
        num_taken: Number of its new tokens.
        num_accepted: How many of them had been drafted.
    """

    emitting: Emitting
    num_taken: int
    num_accepted: int


MOST_COUNTED = int(COUNT_MASK) - MOST  # output tokens whose counts cannot overflow, with drafts


class StepLoop:
    """Runs the live continuations, by table row: `admit` adds continuations, and `launch` and
    `finish` alternate to run their steps.

    A failure of one continuation ends only that one. A failure of a step ends the continuations in
    it (`failures.py`). An exception from here ends the engine.

    Args:
        executor: runs the steps.
        scheduler: plans them.
        info: what is served.
        watch: predicts and measures step times.
        compiles: counts compilations; one after the warm-up is an error. None to allow them.
        clock: seconds; `Request.arrival` is on it.
        on_over: called with the request's id for each continuation that has ended.
        overlap: whether the next step is planned while one is in flight, if it can be.

    Attributes:
        live: continuations that have not ended, by row of the scheduler's table.
        failures: counts of what failed.
        observers: receive the engine's events.
        steps: finished steps.
        arrivals: continuations so far, including those that could not be admitted.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        info: EngineInfo,
        *,
        watch: StepWatch,
        compiles: CompileCounter | None,
        clock: Callable[[], float],
        on_over: Callable[[str], None],
        overlap: bool = True,
    ) -> None:
        self.live: dict[int, Continuation] = {}
        self.failures = failures.Failures()
        self.observers = failures.Observers(self.failures)
        self.steps = 0
        self._executor, self._scheduler = executor, scheduler
        self._info, self._compiles = info, compiles
        self.watch, self._clock, self._on_over = watch, clock, on_over
        scheduler.view.device.ratios = watch.ratios
        scheduler.programs.on_verdict = self._tell_program
        self._by_id: dict[str, list[Continuation]] = {}
        self._columns = np.zeros(MAX_LORAS + 1, np.int32)  # by adapter, end of its columns
        self._free_slots = list(range(scheduler.view.limits.max_rows - 1, -1, -1))
        self._plain = plain_slot(info.vocab_size)
        self._overlap, self._rates = overlap, AcceptanceRates()
        self._host_times = HostTimes()
        self._newcomers: list[Continuation] = []  # since the last plan
        # Continuations that failed while their step was built. They end after its launch.
        self._failed: list[tuple[Continuation, BaseException]] = []
        self.arrivals = 0  # continuations so far, including those that could not be admitted
        self._since = clock()  # when the thread was last done with a step, or woke up
        # Counts that were not reported with a step yet.
        self._preemptions = self._received = 0
        self._wake_time = self._receive_time = 0.0

    def woke(self, submitted: float | None) -> None:
        """The thread has just woken up. submitted: when the request that woke it was submitted, if
        one did."""
        self._since = self._clock()
        self._wake_time = 0.0 if submitted is None else self._since - submitted

    def admit(self, command: Submit) -> None:
        """Adds all continuations of the request to the waiting ones."""
        request = command.request
        adapter = 0 if command.adapter is None else command.adapter.number
        if command.adapter is not None:
            self._columns[adapter] = command.adapter.columns.stop
        mine = self._by_id[request.id] = []
        left = list(range(request.sampling.n))
        number, self.arrivals = self.arrivals, self.arrivals + len(left)
        try:
            while left:
                index, ended = left[0], self._ended(command, left[0])
                one = self._continuation(command, index, number + index)
                chain, before = one.block_keys, one.output_tokens
                keys = [] if chain is None else chain.extend(before)
                if ended:
                    one.replay(*command.replays[index])
                    left.pop(0)
                    self._on_over(request.id)
                    continue
                one.row = self._scheduler.add(
                    request,
                    alone=command.alone,
                    first=mine[0].row if mine else None,
                    adapter=adapter,
                    times=one.token_times,
                    keys=keys,
                )
                mine.append(one)
                left.pop(0)
                self.live[one.row] = one
                brought = self._adopt(one, command.pages)
                if command.replays:
                    one.replay(*command.replays[index])
                if before and one.speculator is not None:
                    self._propose(one, one.speculator, before)
                self._received += 1
                self._newcomers.append(one)
                self._tell_arrival(one, len(before), brought)
        except BaseException as error:
            self._refuse(command, mine, left, error)
        if not mine:
            self._by_id.pop(request.id, None)

    def _ended(self, command: Submit, index: int) -> bool:
        """Whether a continuation has ended at another engine."""
        return bool(command.replays) and command.replays[index][1] is not None

    def _continuation(self, command: Submit, index: int, number: int) -> Continuation:
        keys = command.block_keys
        return Continuation(
            request=command.request,
            index=index,
            row=NO_ROW,
            number=number,
            text=command.texts[index],
            sampling_row=command.row,
            on_output=command.on_output,
            problems=command.problems,
            block_keys=None if keys is None else keys.copy(),
            speculator=self._speculator(command, index),
            submitted=command.at,
        )

    def _speculator(self, command: Submit, index: int) -> Speculator | None:
        if index >= len(command.drafting):
            return None
        request = command.request
        sampling = request.sampling
        most = min(sampling.max_tokens, MOST_COUNTED if has_penalty(sampling) else sys.maxsize)
        return Speculator(command.drafting[index], self._rates.of(request.tenant), most)

    def _tell_arrival(self, one: Continuation, before: int, brought: int) -> None:
        call = self._scheduler.programs.call_of(one.row)
        if call is not None:
            told = call._replace(pause=None) if one.index else call
            self.observers.notify(lambda observer: observer.on_program_call(one.number, told))
        if one.request.moved or before:
            self.observers.notify(lambda observer: observer.on_moved(one.number, before, brought))
        self.observers.notify(lambda observer: observer.on_arrival(one.number, one.request))

    def _refuse(
        self,
        command: Submit,
        begun: list[Continuation],
        rest: Sequence[int],
        error: BaseException,
    ) -> None:
        """Ends a request that cannot be admitted completely: those of its continuations that are
        live, and the rest."""
        request = command.request
        failures.refuse(
            request, command.on_output, FinishReason.ERROR, failures.describe(error), rest
        )
        for _ in rest:
            self.failures.of_request(error, request.id)
            self._on_over(request.id)
        for continuation in list(begun):
            self._fail(continuation, error)

    def cancel(self, request_id: str) -> None:
        """Ends the request's remaining continuations."""
        for continuation in list(self._by_id.get(request_id, ())):
            try:
                self._end(continuation, FinishReason.CANCELLED)
            except BaseException as error:
                self._fail(continuation, error)

    def export(self, request_id: str, sent: dict[bytes, Saved | None], most_bytes: int) -> bool:
        """Sends some of the request's cached blocks on their way to host memory: so few that the
        next step need not wait for their copies.

        Args:
            request_id: the request.
            sent: those that are on their way, by key, to which it adds; None for those that the
                other engine has.
            most_bytes: of all of them.

        Returns:
            Whether it has added any, so that there may be more.
        """
        before, executor = len(sent), self._executor
        for one in self._by_id.get(request_id, ()) if executor.sends else ():
            few = max(1, ROOM // slots_for(self._scheduler.pool.block_size))
            most = min(most_bytes // executor.page_bytes, before + few)
            pages, save = self._scheduler.pages(one.row, sent, most)
            try:
                if save is not None:
                    executor.save(save.keys, save.counts, save.slots)
                sent |= {key: executor.saved(kept) for key, kept in pages}
            finally:
                if save is not None:
                    executor.discard(save.keys)
        return len(sent) > before

    def _adopt(self, one: Continuation, pages: Mapping[bytes, np.ndarray]) -> int:
        """Keeps the cached blocks that came along with a continuation, as far as they fit. Returns
        how many tokens they are, from the first on."""
        executor, chain = self._executor, one.block_keys
        if not pages or not executor.sends or chain is None:
            return 0
        fitting = {key: page for key, page in pages.items() if executor.fits(page)}
        kept = self._scheduler.adopt(one.row, fitting)
        executor.keep(dict(kept))
        brought = sum(1 for _ in itertools.takewhile(fitting.__contains__, chain.keys))
        for _, last in kept[-1:]:  # those before it are here, or came along
            brought = 1 + next(i for i, key in enumerate(chain.keys) if fitting.get(key) is last)
        return brought * self._scheduler.pool.block_size

    def note_tools(self, request_id: str, tools: Mapping[str, str]) -> None:
        """See `ProgramTable.note_tools`."""
        self._scheduler.programs.note_tools(request_id, tools)

    def rest(self) -> float | None:
        """Seconds until `expire` may have something to do; None for never."""
        when = self._scheduler.programs.next_check
        return None if when == math.inf else max(when - self._clock(), 0.0)

    def expire(self) -> None:
        """Ends programs that have fallen silent."""
        self._scheduler.programs.expire(self._clock())

    def _tell_program(self, verdict: ProgramVerdict) -> None:
        self.observers.notify(lambda observer: observer.on_program(verdict))

    def pad(self, padding: Padding) -> None:
        """Plans and predicts with other sizes of steps from now on."""
        self._scheduler.view = dataclasses.replace(self._scheduler.view, padding=padding)
        self.watch.padding = padding

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._scheduler.forget_all()

    def waits_for(self, pending: InFlight) -> bool:
        """Whether the next plan has to wait for the tokens of the step in flight: because their
        number is unknown, or because drafts after them are expected to pay off."""
        if pending.drafts:
            return True
        try:
            return self._scheduler.would_draft(self._clock())
        except BaseException:  # the plan raises it again, and handles it
            return True

    def launch(self, pending: InFlight | None) -> InFlight | None:
        """Plans and launches the next step. pending: the step in flight, if any, for which it does
        not wait. None if there is nothing to do, or if it failed."""
        if not self.live:
            return None
        # Plans worked before the newcomers came. If they are not the cause, the next plan fails,
        # too.
        suspects, step = self._newcomers, None
        if not suspects or self.failures.in_vain >= failures.OF_NEWCOMERS:
            suspects = list(self.live.values())
        begin = self._clock()
        self._receive_time += begin - self._since
        try:
            plan = self._plan(begin, pending)
            suspects, self._newcomers = list(self.live.values()), []
            num_live, step = len(self.live), self._scheduler.book(plan)
            suspects = self._members(step)
            flying = self._launch(step, begin, num_live=num_live, idle=pending is None)
            self._tell_given_up(step)
            return flying
        except BaseException as error:
            self._fail_step(error, suspects, step)
            return None

    def _plan(self, now: float, pending: InFlight | None) -> BatchPlan:
        flying = () if pending is None else (pending.watched,)
        try:
            host_gap_s = self._scheduler.view.device.host_gap_s
            free_at = self.watch.free_at(*flying, host_gap_s=host_gap_s)
            plan = self._scheduler.plan(now, free_at, self.watch.overrun)
            if pending is None and not len(plan) and not plan.operations:
                raise InvalidPlan(f"it plans nothing for {len(self.live)} requests")
        except InvalidPlan as error:
            raise InvalidPlan(f"policy {self._info.policy}: {error}") from error
        return plan

    def _members(self, step: Step) -> list[Continuation]:
        """The continuations that the step computes, or whose caches it moves."""
        rows = step.rows.tolist()
        for operation in step.plan.operations:
            rows += [operation.row] if isinstance(operation, Join) else operation.rows.tolist()
        return [self.live[row] for row in dict.fromkeys(rows)]

    def _launch(self, step: Step, begin: float, *, num_live: int, idle: bool) -> InFlight | None:
        scheduler = self._scheduler
        kv_used = int(scheduler.pool.as_tokens(scheduler.pool.num_used))
        num_shared = scheduler.pool.num_shared
        planned = self._clock()
        for row in step.preempted.tolist():
            self._release_slot(self.live[row], preempted=begin)
        self._preemptions += len(step.preempted)
        for move in step.moves:
            carry_out(self._executor, move)
        if not len(step):
            self.watch.moved(step)
            self._since = self._clock()
            return None
        members = [self.live[row] for row in step.rows.tolist()]
        admitted = [member for member in members if member.slot == NO_SLOT]
        for member in admitted:
            self._take_slot(member, begin)
        layout, batch, prompts, pooling = self._batch(step, members)
        emitting = [_emitting(i, members[j], step, j) for i, j in sampling_rows(step, batch)]
        handle = self._start(layout, batch, emitting, prompts, pooling, full=step.sampling)
        for row in scheduler.release_finished(step).tolist():
            self._release_slot(self.live[row])
        watched = self.watch.launched(step, self._clock(), usual=prompts is None)
        stats = StepStats(
            num_rows=len(step),
            num_decodes=step.num_decodes,
            num_decode_tokens=step.num_decode_tokens,
            num_prefill_tokens=step.num_prefill_tokens,
            num_recomputed_tokens=step.num_recomputed_tokens,
            num_draft_tokens=step.num_draft_tokens,
            padded_tokens=layout.tokens,
            preemptions=self._preemptions,
            num_live=num_live,
            num_received=self._received,
            num_admitted=len(admitted),
            num_moves=sum(not isinstance(move, Discard) for move in step.moves),
            num_emitting=len(emitting),
            after_idle=idle,
            features=watched.features,
            kv_used=kv_used,
            num_hidden=int(np.count_nonzero(step.plan.kinds == HIDDEN)),
            num_shared=num_shared,
            predicted_time=watched.predicted,
            lengthening=lengthening(step, scheduler.view, watched.predicted),
            wake_time=self._wake_time,
            receive_time=self._receive_time,
            plan_time=planned - begin,
            launch_time=self._clock() - planned,
        )
        flying = InFlight(handle, emitting, prompts, pooling, watched, begin, stats)
        self._end_failed_members()
        self._preemptions = self._received = 0
        self._wake_time = self._receive_time = 0.0
        self._since = self._clock()
        return flying

    def _tell_given_up(self, step: Step) -> None:
        for row in step.given_up.tolist():
            if (one := self.live.get(row)) is not None:
                self._observe_given_up(one.request)
                try:
                    one.expect_missed()
                except BaseException as error:
                    self._fail(one, error)

    def _observe_given_up(self, request: Request) -> None:
        self.observers.notify(lambda observer: observer.on_given_up(request))

    def _end_failed_members(self) -> None:
        """Ends the continuations that failed while their step was built. That step runs now, so
        later steps may take what they held."""
        failed, self._failed = self._failed, []
        if failed:
            self._scheduler.forget_all()  # their blocks were computed from other tokens
        for continuation, error in failed:
            self._fail(continuation, error)

    def _batch(
        self, step: Step, members: Sequence[Continuation]
    ) -> tuple[Layout, PackedBatch, PromptLogprobs | None, Pooling | None]:
        slots = np.array([member.slot for member in members], np.int32)
        buckets, pool = self._executor.buckets, self._scheduler.pool
        told, counted = prompt_logprob_pieces(members, step), pooled_pieces(members, step)
        adapters = self._scheduler.table.adapter[step.rows]
        columns = int(self._columns[adapters].max(initial=0))
        layout, batch = build_batch(
            buckets,
            step,
            pool,
            slots,
            self._tokens_of,
            drafts_of=self._draft_of,
            adapters=adapters if columns else None,
            columns=columns,
            mixed=bool(told or counted),
            deterministic=any(one.request.sampling.deterministic for one in members),
        )
        logprobs = PromptLogprobs.of_step(told, step, layout, batch)
        return layout, batch, logprobs, Pooling.of_step(counted, step, layout, batch)

    def _start(
        self,
        layout: Layout,
        batch: PackedBatch,
        emitting: Sequence[Emitting],
        prompts: PromptLogprobs | None,
        pooling: Pooling | None,
        *,
        full: bool,
    ) -> Handle | PendingSample:
        targets = None if prompts is None else prompts.targets
        wanted = None if pooling is None else pooling.wanted
        if any(map(_held, emitting)):
            return self._executor.compute(layout, batch.buffer, targets=targets, wanted=wanted)
        return self._executor.submit(
            layout, batch.buffer, full=full, targets=targets, wanted=wanted
        )

    def _tokens_of(self, row: int, first: int, end: int) -> Sequence[int]:
        try:
            return self.live[row].tokens(first, end)
        except BaseException as error:
            self._failed.append((self.live[row], error))
            return (0,) * (end - first)

    def _draft_of(self, row: int) -> Sequence[int]:
        return _draft_of(self.live[row])

    def sample(self, step: InFlight) -> InFlight | None:
        """Samples the tokens of a step with grammars, now that all earlier tokens are on the host.
        None if that failed."""
        if not isinstance(step.handle, PendingSample):
            return step
        begin = self._clock()
        try:
            masks = np.full((step.handle.rows, mask_words(self._info.vocab_size)), -1, np.int32)
            masks = masks.view(np.uint32)
            emitting = [
                one._replace(masked=self._mask(one, masks[one.at :])) for one in step.emitting
            ]
            handle = self._executor.sample(step.handle, masks)
        except BaseException as error:
            self._fail_step(error, step.recipients)
            return None
        self._since = self._clock()
        took = step.stats.launch_time + self._since - begin
        stats = dataclasses.replace(step.stats, launch_time=took)
        return dataclasses.replace(step, handle=handle, stats=stats, emitting=emitting)

    def _mask(self, one: Emitting, to: np.ndarray) -> int | None:
        """Writes the tokens that its grammar allows next to `to`, and those after its drafts to the
        following rows. Ends the continuation if none is allowed. Returns `Emitting.masked`."""
        continuation = one.continuation
        matcher = continuation.matcher
        if matcher is None or continuation.finished:
            return None
        try:
            masks = matcher.masks_along(one.draft) if one.draft else [matcher.mask()]
            known = list(itertools.takewhile(lambda mask: mask is not None, masks))
            for row, allowed in zip(to, known, strict=False):
                row[:] = allowed
            if known:
                return len(known)
            if problem := matcher.problem:
                self._end(continuation, FinishReason.ERROR, problem)
            else:
                self._end(continuation, FinishReason.STOP)
        except BaseException as error:
            self._fail(continuation, error)
        return 1

    def finish(self, step: InFlight) -> None:
        """Processes a step's tokens. Those of continuations that have ended are dropped."""
        assert not isinstance(step.handle, PendingSample)
        result = step.handle.result()  # raises errors of the device
        prompt = None if step.prompts is None else step.handle.prompt()
        pooled = None if step.pooling is None else step.handle.pooled()
        try:
            self._take_in(step, result, prompt, pooled)
        except BaseException as error:
            self._fail_step(error, step.recipients)
        self.steps += 1
        if self._compiles is not None and self._compiles.count:
            raise CompiledAfterWarmup(
                f"{self._compiles.count} compilation(s) after the warm-up; the last step had "
                f"{step.stats.num_rows} rows and {step.stats.padded_tokens} padded tokens"
            )

    def _take_in(
        self,
        step: InFlight,
        result: SampleResult,
        prompt: SampleResult | None,
        pooled: Pooled | None,
    ) -> None:
        now = self._clock()
        device_time = self.watch.finished(step.watched, now)
        if step.prompts is not None and prompt is not None:
            for continuation, error in step.prompts.deliver(prompt):
                self._fail(continuation, error)
        if step.pooling is not None and pooled is not None:
            for continuation, error in step.pooling.deliver(pooled):
                self._fail(continuation, error)
        sampled = result.tokens.tolist()
        mine = [
            (one, one.tokens(sampled)) for one in step.emitting if not one.continuation.finished
        ]
        rows = np.array([one.continuation.row for one, _ in mine], np.int64)
        counts = None
        if step.drafts:
            counts = np.array([len(tokens) for _, tokens in mine], np.int64)
        self._scheduler.receive(rows, now, counts)
        results: list[RowResult] = []
        for one, tokens in mine:
            continuation, before = one.continuation, len(one.continuation.output_tokens)
            try:
                self._feed(one, tokens, result, now)
            except BaseException as error:
                self._fail(continuation, error)
            taken = len(continuation.output_tokens) - before
            results.append(RowResult(one, taken, min(taken, len(tokens) - 1)))
        self.failures.went_well()
        self._report(step, results, now, device_time)

    def _feed(self, one: Emitting, tokens: Sequence[int], result: SampleResult, now: float) -> None:
        continuation = one.continuation
        broken = tokens[-1] == NOT_FINITE and continuation.request.pooling is None
        tokens = tokens[:-1] if broken else tokens  # the end of the text comes first
        end, reason = one.at + len(tokens), None
        came = continuation.token_times
        last, before = (came[-1] if came else None), len(came)
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        try:
            if continuation.request.pooling is not None:
                vector = vector_of(continuation)
                reason = continuation.end_pooled(tokens[0], vector, now, preemptions)
            elif tokens:
                reason = continuation.feed(
                    tokens,
                    now,
                    preemptions,
                    entries(result, one.at, end, continuation.request.sampling.logprobs),
                    drafted=len(one.draft),
                )
        finally:
            self._observe_tokens(continuation.request, last, len(came) - before, now)
        if broken and reason is None:
            raise NotFinite
        chain = continuation.block_keys
        if chain is not None and (reason is None or one.draft):
            keys = chain.extend(tokens[: len(came) - before])
            if keys:
                self._scheduler.know(continuation.row, keys)
        if reason is not None:
            self._forget(continuation, reason, now)
            return
        if continuation.speculator is not None:
            self._propose(continuation, continuation.speculator, tokens)

    def _propose(
        self, continuation: Continuation, speculator: Speculator, tokens: Sequence[int]
    ) -> None:
        """Offers the scheduler drafts that may follow the tokens. If the drafters fail, the
        continuation goes on without drafts."""
        try:
            speculator.receive(tokens)
            draft = speculator.draft
            length = 0 if draft is None else len(draft.tokens)
            self._scheduler.offer(continuation.row, length, speculator.acceptance)
        except BaseException as error:
            self.failures.of_request(error, continuation.request.id)
            continuation.speculator = None
            self._scheduler.offer(continuation.row, 0, 0.0)

    def _report(
        self, step: InFlight, results: Sequence[RowResult], now: float, device_time: float
    ) -> None:
        """Reports a step that has just ended to the observers."""
        self._since = self._clock()
        accepted, rejected = Counter[str](), Counter[str]()
        for emitting, _, num_accepted in results if step.drafts else ():
            if emitting.draft:
                accepted[emitting.source] += num_accepted
                rejected[emitting.source] += len(emitting.draft) - num_accepted
        stats = dataclasses.replace(
            step.stats,
            received=tuple(
                result.emitting.continuation.number
                for result in results
                for _ in range(result.num_taken)
            ),
            accepted=accepted,
            rejected=rejected,
            end=now,
            step_time=now - step.begin,
            device_time=device_time,
            finish_time=self._since - now,
        )
        if self._overlap and self._scheduler.policy.speculates:
            self._scheduler.view.device.host_gap_s = self._host_times.note(stats.host_time)
        self.observers.notify(lambda observer: observer.on_step(stats))

    def _observe_tokens(self, request: Request, last: float | None, count: int, now: float) -> None:
        """Reports tokens that have just come. last: time of the token before, if there was one."""
        if not count:
            return
        if last is not None:
            since = (now - last) / count
            for _ in range(count):
                self.observers.notify(lambda observer: observer.on_inter_token(since, request.tier))
        else:
            ttft = now - request.arrival
            self.observers.notify(lambda observer: observer.on_first_token(ttft, request.tier))

    def _take_slot(self, member: Continuation, now: float) -> None:
        member.slot = self._free_slots.pop()
        self._scheduler.pool.mirrored[member.row] = 0
        if member.first_scheduled is None:
            member.first_scheduled = now
            member.cached_tokens = int(self._scheduler.table.cached_at_start[member.row])
        self._executor.admit(member.slot, self._slot_params(member))

    def _slot_params(self, member: Continuation) -> SlotParams:
        try:
            return member.slot_params()
        except BaseException as error:
            self._failed.append((member, error))
            return self._plain

    def _release_slot(self, member: Continuation, preempted: float | None = None) -> None:
        """Frees its device slot, if it has one (after a restore it has none until it is in a
        batch). preempted: when it lost its cache, if it did."""
        if preempted is not None:
            member.preempted.append(preempted)
        if member.slot != NO_SLOT:
            self._free_slots.append(member.slot)
            member.slot = NO_SLOT

    def stop(self) -> None:
        """Closes the executor and sends the observers their last event."""
        self._executor.close()
        observers, self.observers = self.observers, failures.Observers(self.failures)
        observers.notify(lambda observer: observer.on_stop())

    # Ends of continuations.

    def _end(self, continuation: Continuation, reason: FinishReason, error: str = "") -> None:
        """Ends a continuation from outside the model."""
        now = self._clock()
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        continuation.end(reason, now, preemptions, error)
        self._forget(continuation, reason, now)

    def _fail(self, continuation: Continuation, error: BaseException) -> None:
        """Ends this continuation alone for an error, unless it has ended."""
        if self.live.get(continuation.row) is continuation:
            self.failures.of_request(error, continuation.request.id)
            self.end_failed(continuation, failures.describe(error))

    def _fail_step(
        self, error: BaseException, suspects: Iterable[Continuation], step: Step | None = None
    ) -> None:
        """Ends the suspects: the continuations that may have caused a step's failure, or whose
        caches are in an unknown state. step: the booked step, if the launch failed. Raises the
        error if the engine cannot go on."""
        if failures.ends_engine(error) or not self._executor.intact:
            raise error
        for move in () if step is None else step.moves:
            if isinstance(move, Discard):
                carry_out(self._executor, move)
        self._scheduler.forget_all()  # whatever it computed may be wrong
        self._end_failed_members()
        ended = [one for one in suspects if self.live.get(one.row) is one]
        self.failures.of_step(error, len(ended))
        for continuation in ended:
            self.end_failed(continuation, failures.describe(error))
        self._newcomers = []
        if not self.live and not self._scheduler.is_empty:
            raise error  # blocks have leaked
        self._since = self._clock()

    def end_failed(
        self, continuation: Continuation, problem: str, *, engine_failed: bool = False
    ) -> None:
        """Ends it with an error, and frees what it holds, whatever its caller raises."""
        now = self._clock()
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        with contextlib.suppress(BaseException):
            continuation.fail(now, preemptions, problem, engine_failed=engine_failed)
        self._forget(continuation, FinishReason.ERROR, now)

    def _forget(self, continuation: Continuation, reason: FinishReason, now: float) -> None:
        """Frees everything that a finished continuation holds."""
        request = continuation.request
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        self._release_slot(continuation)
        keys = continuation.block_keys
        self._scheduler.finish(
            continuation.row,
            complete=reason in COMPLETE,
            length=len(continuation.output_tokens),
            now=now,
            answer=NO_ANSWER if keys is None else keys.answer(len(request.prompt)),
        )
        del self.live[continuation.row]
        siblings = self._by_id[request.id]
        siblings.remove(continuation)
        if not siblings:
            del self._by_id[request.id]
        self._on_over(request.id)
        if continuation.speculator is not None:
            with contextlib.suppress(BaseException):
                continuation.speculator.end(continuation.output_tokens)
        try:
            stats = continuation.stats(reason, now, preemptions)
        except BaseException as error:
            self.failures.of_request(error, request.id)
        else:
            self.observers.notify(lambda observer: observer.on_finish(stats))


def _held(one: Emitting) -> bool:
    """Whether a grammar restricts its tokens. Tokens of an earlier step may not have come yet."""
    matcher = one.continuation.matcher
    return matcher is not None and matcher.holds(len(one.draft) + 2)


def _draft_of(continuation: Continuation) -> tuple[int, ...]:
    speculator = continuation.speculator
    draft = None if speculator is None else speculator.draft
    return () if draft is None else draft.tokens


def _emitting(at: int, member: Continuation, step: Step, number: int) -> Emitting:
    """The `Emitting` of the step's continuation of that number."""
    drafts = step.plan.drafts
    if drafts is None or not drafts[number] or member.speculator is None:
        return Emitting(at, member)
    draft = member.speculator.draft
    assert draft is not None
    return Emitting(at, member, draft.tokens[: int(drafts[number])], draft.source)
