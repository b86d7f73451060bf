"""The requests in the engine and the steps that serve them, on the engine's thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.engine.batching import build_batch, carry_out, sampling_rows
from jaxserve.engine.commands import Submit
from jaxserve.engine.compiles import CompileCounter, CompiledAfterWarmup
from jaxserve.engine.detokenize import Tokenizer
from jaxserve.engine.executor import Executor, Handle, Undrawn
from jaxserve.engine.in_flight import InFlight
from jaxserve.engine.layout import Layout, PackedBatch
from jaxserve.engine.output import COMPLETE, FinishReason
from jaxserve.engine.prompt_logprobs import PromptLogprobs, entries, untold
from jaxserve.engine.sampling import mask_words, slot_params
from jaxserve.engine.sequence import NO_SLOT, Continuation
from jaxserve.engine.stats import EngineInfo, Observer, StepStats
from jaxserve.engine.stops import ContinuationText
from jaxserve.sched.kinds import HIDDEN
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.step import Discard, Step
from jaxserve.sched.tiers import lengthening
from jaxserve.sched.watch import StepWatch


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
        self.watch, self._clock, self._on_over = watch, clock, on_over
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

    def admit(self, command: Submit) -> None:
        """Takes the request in, as many continuations as it asks for; they wait."""
        request, on_output, problems = command.request, command.on_output, command.problems
        texts = [self._text(command) for _ in range(request.sampling.n)]
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

    def _text(self, command: Submit) -> ContinuationText:
        request, matcher = command.request, None
        if command.grammar is not None:
            matcher = command.grammar.matcher(ignore_eos=request.sampling.ignore_eos)
        return ContinuationText(
            self._tokenizer, request.sampling, self._eos_ids, request.prompt, matcher
        )

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
            self._release_slot(self.live[row], preempted=begin)
        self._preemptions += len(step.preempted)
        for move in step.moves:
            carry_out(self._executor, move)
        if not len(step):
            if idle and not step.plan.operations:
                raise self._invalid(f"it plans nothing for {num_live} requests")
            self.watch.moved(step)
            self._since = self._clock()
            return None
        members = [self.live[row] for row in step.rows.tolist()]
        admitted = [member for member in members if member.slot == NO_SLOT]
        for member in admitted:
            self._take_slot(member, begin)
        layout, batch, prompts = self._batch(step, members)
        emitting = [(i, members[j]) for i, j in sampling_rows(step, batch)]
        handle = self._start(layout, batch, emitting, prompts, full=step.sampling)
        for row in scheduler.release_finished(step).tolist():
            self._release_slot(self.live[row])
        watched = self.watch.launched(step, self._clock(), usual=prompts is None)
        flying = InFlight(
            handle,
            emitting,
            prompts,
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

    def _batch(
        self, step: Step, members: Sequence[Continuation]
    ) -> tuple[Layout, PackedBatch, PromptLogprobs | None]:
        slots = np.array([member.slot for member in members], np.int32)
        buckets, pool, pieces = self._executor.buckets, self._scheduler.pool, untold(members, step)
        layout, batch = build_batch(buckets, step, pool, slots, self._tokens_of, mixed=bool(pieces))
        return layout, batch, PromptLogprobs.of(pieces, step, layout, batch)

    def _start(
        self,
        layout: Layout,
        batch: PackedBatch,
        emitting: Sequence[tuple[int, Continuation]],
        prompts: PromptLogprobs | None,
        *,
        full: bool,
    ) -> Handle | Undrawn:
        targets = None if prompts is None else prompts.targets
        if any(member.matcher for _, member in emitting):
            return self._executor.compute(layout, batch.buffer, targets=targets)
        return self._executor.submit(layout, batch.buffer, full=full, targets=targets)

    def _schedule(self, now: float) -> Step:
        try:
            return self._scheduler.schedule(now)
        except InvalidPlan as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, problem: str) -> InvalidPlan:
        return InvalidPlan(f"policy {self._info.policy}: {problem}")

    def _tokens_of(self, row: int, first: int, end: int) -> Sequence[int]:
        return self.live[row].tokens(first, end)

    def draw(self, step: InFlight) -> InFlight:
        """Has the tokens drawn of a step in which grammars have a say, now that every token before
        them is here."""
        if not isinstance(step.handle, Undrawn):
            return step
        begin = self._clock()
        masks = np.full((step.handle.rows, mask_words(self._info.vocab_size)), -1, np.int32)
        masks = masks.view(np.uint32)
        for i, continuation in step.emitting:
            if continuation.matcher is None or continuation.finished:
                continue
            mask = continuation.matcher.mask()
            if mask is not None:
                masks[i] = mask
            elif problem := continuation.matcher.problem:
                self.end(continuation, FinishReason.ERROR, problem)
            else:
                self.end(continuation, FinishReason.STOP)
        handle = self._executor.draw(step.handle, masks)
        self._since = self._clock()
        took = step.launch_time + self._since - begin
        return dataclasses.replace(step, handle=handle, launch_time=took)

    def finish(self, step: InFlight) -> None:
        """Takes in a step's tokens; late ones of requests that are over are dropped."""
        assert not isinstance(step.handle, Undrawn)
        result = step.handle.result()
        now = self._clock()
        device_time = self.watch.finished(step.watched, now)
        if step.prompts is not None:
            step.prompts.tell(step.handle.prompt(), now)
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
                entries(result, i, i + 1, continuation.request.sampling.logprobs),
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

    def _release_slot(self, member: Continuation, preempted: float | None = None) -> None:
        """Those restored from the host have none until they are in a batch. preempted: when."""
        if preempted is not None:
            member.preempted.append(preempted)
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
