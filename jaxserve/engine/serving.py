"""The requests in the engine and the steps that serve them, on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.batching import build_batch, widening
from jaxserve.engine.compiles import CompileCounter, CompiledAfterWarmup
from jaxserve.engine.detokenize import Tokenizer
from jaxserve.engine.executor import Executor, Handle
from jaxserve.engine.output import COMPLETE, FinishReason, Output, TokenLogprobs
from jaxserve.engine.sampling import SampleResult, slot_params
from jaxserve.engine.sequence import NO_SLOT, Continuation
from jaxserve.engine.stats import EngineInfo, Observer, StepStats
from jaxserve.engine.stops import ContinuationText
from jaxserve.sched.kinds import HIDDEN
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.reachability import SloProblem
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.step import CopySlots, Discard, Load, Move, Save, Step, Widen
from jaxserve.sched.tiers import lengthening
from jaxserve.sched.watch import StepWatch, Watched


@dataclass(frozen=True)
class InFlight:
    """A launched step and whom its results belong to; rows i of the batch that sample. begin: when
    it was planned, in seconds; the others are as `StepStats` has them."""

    handle: Handle
    emitting: list[tuple[int, Continuation]]
    step: Step
    watched: Watched
    lengthening: float
    padded_tokens: int
    preemptions: int
    num_live: int
    num_received: int
    num_admitted: int
    after_idle: bool
    kv_used: int
    num_shared: int
    begin: float
    wake_time: float
    receive_time: float
    plan_time: float
    launch_time: float


class Serving:
    """Continuations by table row, from `admit` to `end`; `launch` and `finish` a step in turns.

    watch: predicts and measures the steps. compiles: an error after the warm-up, if given.
    on_over(request id) is told of each continuation that is over.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        watch: StepWatch,
        eos_ids: tuple[int, ...],
        compiles: CompileCounter | None,
        clock: Callable[[], float],
        on_over: Callable[[str], None],
    ) -> None:
        self.live: dict[int, Continuation] = {}
        self.observers: list[Observer] = []
        self.steps = 0
        self._executor, self._scheduler, self._tokenizer = executor, scheduler, tokenizer
        self._info, self._eos_ids, self._compiles = info, eos_ids, compiles
        self._watch, self._clock, self._on_over = watch, clock, on_over
        self._by_id: dict[str, list[Continuation]] = {}
        self._free_slots = list(range(scheduler.view.limits.max_rows - 1, -1, -1))
        self._arrivals = 0
        self._since = clock()  # when the thread was done with a step, or went on after it slept
        # Not told in any step yet.
        self._preemptions = self._received = 0
        self._wake_time = self._receive_time = 0.0

    def woke(self, arrival: float | None) -> None:
        """The thread has slept, until now; arrival: of the request that woke it, if one did."""
        self._since = self._clock()
        self._wake_time = 0.0 if arrival is None else self._since - arrival

    def knows(self, request_id: str) -> bool:
        """Whether any of its continuations is not over."""
        return request_id in self._by_id

    def admit(
        self,
        request: Request,
        on_output: Callable[[Output], None],
        problems: tuple[SloProblem, ...] = (),
    ) -> None:
        """Takes the request in, as many continuations as it asks for; they wait. problems: with its
        targets."""
        texts = [
            ContinuationText(self._tokenizer, request.sampling, self._eos_ids, request.prompt)
            for _ in range(request.sampling.n)
        ]
        continuations = self._by_id[request.id] = []
        for index, text in enumerate(texts):
            row = self._scheduler.add(request)
            number, self._arrivals = self._arrivals, self._arrivals + 1
            self._received += 1
            continuation = Continuation(request, index, row, number, text, on_output, problems)
            continuations.append(continuation)
            self.live[row] = continuation
            for observer in self.observers:
                observer.on_arrival(number, request)

    def cancel(self, request_id: str) -> None:
        """Ends what there is of it."""
        for continuation in list(self._by_id.get(request_id, ())):
            self.end(continuation, FinishReason.CANCELLED)

    def launch(self, *, idle: bool) -> InFlight | None:
        """Plans the next step and starts it; None if there is nothing to do yet."""
        if not self.live:
            return None
        begin = self._clock()
        scheduler = self._scheduler
        self._receive_time += begin - self._since
        num_live, step = len(self.live), self._schedule(begin)
        kv_used = int(scheduler.pool.as_tokens(scheduler.pool.num_used))
        num_shared = scheduler.pool.num_shared
        planned = self._clock()
        for row in step.preempted.tolist():
            self._release_slot(self.live[row])
        self._preemptions += len(step.preempted)
        for move in step.moves:
            self._carry_out(move)
        if not len(step):
            if idle and not step.plan.operations:
                raise self._invalid(f"it plans nothing for {num_live} requests")
            self._watch.moved(step)
            self._since = self._clock()
            return None
        members = [self.live[row] for row in step.rows.tolist()]
        admitted = [member for member in members if member.slot == NO_SLOT]
        for member in admitted:
            self._take_slot(member, begin)
        slots = np.array([member.slot for member in members], np.int32)
        layout, batch = build_batch(
            self._executor.buckets, step, scheduler.pool, slots, self._tokens_of
        )
        emits = step.emits[batch.order]
        emitting = [(i, members[batch.order[i]]) for i in np.flatnonzero(emits).tolist()]
        handle = self._executor.submit(layout, batch.buffer, full=step.sampling)
        for row in scheduler.release_finished(step).tolist():
            self._release_slot(self.live[row])
        watched = self._watch.launched(step, self._clock())
        flying = InFlight(
            handle,
            emitting,
            step,
            watched,
            lengthening(step, scheduler.view, watched.predicted),
            layout.tokens,
            self._preemptions,
            num_live=num_live,
            num_received=self._received,
            num_admitted=len(admitted),
            after_idle=idle,
            kv_used=kv_used,
            num_shared=num_shared,
            begin=begin,
            wake_time=self._wake_time,
            receive_time=self._receive_time,
            plan_time=planned - begin,
            launch_time=self._clock() - planned,
        )
        self._preemptions = self._received = 0
        self._wake_time = self._receive_time = 0.0
        self._since = self._clock()
        return flying

    def _schedule(self, now: float) -> Step:
        try:
            return self._scheduler.schedule(now)
        except InvalidPlan as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, problem: str) -> InvalidPlan:
        return InvalidPlan(f"policy {self._info.policy}: {problem}")

    def _tokens_of(self, row: int, first: int, end: int) -> Sequence[int]:
        return self.live[row].tokens(first, end)

    def _carry_out(self, move: Move) -> None:
        executor = self._executor
        match move:
            case Widen():
                for layout, packed in widening(executor.buckets, move):
                    executor.widen(layout, packed)
            case CopySlots(places):
                executor.copy_slots(places)
            case Save(keys, counts, slots):
                executor.save(keys, counts, slots)
            case Load(keys, counts, slots):
                executor.load(keys, counts, slots)
            case Discard(keys):
                executor.discard(keys)

    def finish(self, step: InFlight) -> None:
        """Takes in a step's tokens; late ones of requests that are over are dropped."""
        result = step.handle.result()
        now = self._clock()
        device_time = self._watch.finished(step.watched, now)
        mine = [(i, c) for i, c in step.emitting if not c.finished]
        table = self._scheduler.table
        self._scheduler.receive(np.array([c.row for _, c in mine], np.int64), now)
        tokens = result.tokens.tolist()
        for i, continuation in mine:
            self._observe_token(continuation, now)
            reason = continuation.feed(
                tokens[i],
                now,
                int(table.preemptions[continuation.row]),
                _logprobs(result, i, continuation.request.sampling.logprobs),
            )
            if reason is not None:
                self.forget(continuation, reason, now)
        self.steps += 1
        if self._compiles is not None and self._compiles.count:
            raise CompiledAfterWarmup(
                f"{self._compiles.count} compilation(s) after the warm-up; the last step had "
                f"{len(step.step)} rows and {step.padded_tokens} padded tokens"
            )
        self._report(step, tuple(c.number for _, c in mine), now, device_time)

    def _report(
        self, step: InFlight, received: tuple[int, ...], now: float, device_time: float
    ) -> None:
        """Tells the observers of a step whose tokens came now, to whom."""
        booked, self._since = step.step, self._clock()
        stats = StepStats(
            num_rows=len(booked),
            num_decodes=booked.num_decodes,
            num_decode_tokens=booked.num_decode_tokens,
            num_prefill_tokens=booked.num_prefill_tokens,
            num_recomputed_tokens=booked.num_recomputed_tokens,
            padded_tokens=step.padded_tokens,
            preemptions=step.preemptions,
            num_live=step.num_live,
            num_received=step.num_received,
            num_admitted=step.num_admitted,
            num_moves=sum(not isinstance(move, Discard) for move in booked.moves),
            num_emitting=len(step.emitting),
            after_idle=step.after_idle,
            features=step.watched.features,
            received=received,
            kv_used=step.kv_used,
            num_hidden=int(np.count_nonzero(booked.plan.kinds == HIDDEN)),
            num_shared=step.num_shared,
            end=now,
            step_time=now - step.begin,
            device_time=device_time,
            predicted_time=step.watched.predicted,
            lengthening=step.lengthening,
            wake_time=step.wake_time,
            receive_time=step.receive_time,
            plan_time=step.plan_time,
            launch_time=step.launch_time,
            finish_time=self._since - now,
        )
        for observer in self.observers:
            observer.on_step(stats)

    def _observe_token(self, continuation: Continuation, now: float) -> None:
        request = continuation.request
        for observer in self.observers:
            if not continuation.token_times:
                observer.on_first_token(now - request.arrival, request.tier)
            else:
                observer.on_inter_token(now - continuation.token_times[-1], request.tier)

    def _take_slot(self, member: Continuation, now: float) -> None:
        member.slot = self._free_slots.pop()
        if member.first_scheduled is None:
            member.first_scheduled = now
        self._executor.admit(
            member.slot,
            slot_params(
                member.request,
                member.index,
                member.output_tokens,
                self._info.vocab_size,
                self._eos_ids,
            ),
        )

    def _release_slot(self, member: Continuation) -> None:
        """Those restored from the host have none until they are in a batch."""
        if member.slot != NO_SLOT:
            self._free_slots.append(member.slot)
            member.slot = NO_SLOT

    def stop(self) -> None:
        """Ends the executor, and tells the observers, for the last time."""
        self._executor.close()
        observers, self.observers = self.observers, []
        for observer in observers:
            observer.on_stop()

    def end(self, continuation: Continuation, reason: FinishReason, error: str = "") -> None:
        """Ends a continuation from outside the model."""
        now = self._clock()
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        continuation.end(reason, now, preemptions, error)
        self.forget(continuation, reason, now)

    def forget(self, continuation: Continuation, reason: FinishReason, now: float) -> None:
        """Frees all that a finished continuation holds."""
        request = continuation.request
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        self._release_slot(continuation)
        self._scheduler.finish(continuation.row, complete=reason in COMPLETE)
        del self.live[continuation.row]
        siblings = self._by_id[request.id]
        siblings.remove(continuation)
        if not siblings:
            del self._by_id[request.id]
        stats = continuation.stats(reason, now, preemptions)
        for observer in self.observers:
            observer.on_finish(stats)
        self._on_over(request.id)


def _logprobs(result: SampleResult, i: int, wanted: int | None) -> tuple[TokenLogprobs, ...]:
    if wanted is None:
        return ()
    assert result.chosen_logprob is not None
    assert result.top_ids is not None and result.top_logprobs is not None
    ids, values = result.top_ids[i, :wanted], result.top_logprobs[i, :wanted]
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return (TokenLogprobs(int(result.tokens[i]), float(result.chosen_logprob[i]), top),)
