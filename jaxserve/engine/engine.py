"""The engine: requests in, tokens out, one thread that schedules and owns the device state.

The loop launches step N, finishes step N-1 on the host while the device works (stop conditions,
detokenising, streaming), and plans N+1. Sampled tokens feed the next step on the device, so
nothing waits for them.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.engine.batching import build_batch, widening
from jaxserve.engine.compiles import CompileCounter, CompiledAfterWarmup
from jaxserve.engine.detokenize import Tokenizer
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.executor import Executor, Handle
from jaxserve.engine.output import FinishReason, Output, TokenLogprobs
from jaxserve.engine.sampling import SampleResult, slot_params
from jaxserve.engine.sequence import NO_SLOT, Continuation, time_or
from jaxserve.engine.stats import EngineInfo, EngineStats, Observer, RequestStats, StepStats
from jaxserve.engine.stops import ContinuationText
from jaxserve.sched.kinds import CacheKind
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.request import InvalidRequest, Request, Tier, validate
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.step import CopyBlocks, Discard, Load, Move, Save, Step, Widen
from jaxserve.sched.table import State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """overlap: finish a step while the next one runs. forbid_compile: a compilation after the
    warm-up, or an implicit transfer to the device, is an engine failure."""

    overlap: bool = True
    forbid_compile: bool = False


@dataclass(frozen=True)
class _InFlight:
    """A launched step and whom its results belong to; rows i of the batch that sample."""

    handle: Handle
    emitting: list[tuple[int, Continuation]]
    step: Step
    padded_tokens: int
    launched: float
    host_time: float


@dataclass(frozen=True)
class _Submit:
    request: Request
    on_output: Callable[[Output], None]


@dataclass(frozen=True)
class _Cancel:
    request_id: str


class Engine:
    """Serves requests on one model. `submit`, `cancel`, `stats` and `drain` are thread-safe."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        eos_ids: tuple[int, ...],
        options: EngineOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self._executor = executor
        self._scheduler = scheduler
        self._info = info
        self._eos_ids = eos_ids
        self._options = options or EngineOptions()
        self._clock = clock
        self._compiles = CompileCounter()
        self._live: dict[int, Continuation] = {}  # by table row
        self._by_id: dict[str, list[Continuation]] = {}
        self._free_slots = list(range(scheduler.view.limits.max_rows - 1, -1, -1))
        self._observers: list[Observer] = []
        self._failure_listeners: list[Callable[[BaseException], None]] = []
        self._steps = 0
        self._thread: threading.Thread | None = None
        # Shared between threads, under the condition's lock.
        self._wake = threading.Condition()
        self._inbox: deque[_Submit | _Cancel] = deque()
        self._ids: dict[str, int] = {}  # id -> continuations not yet over
        self._open = True
        self._stop = False
        self._failure: BaseException | None = None

    # What any thread may call.

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens included as the model wants them."""
        return self.tokenizer.encode(text)

    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Queues a request. on_output gets every `Output` on the engine thread and must not block.

        The arrival time is now. Raises InvalidRequest, QueueFull or EngineStopped; if it raises,
        on_output is never called.
        """
        info = self._info
        validate(
            request,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            pool_tokens=info.pool_tokens,
        )
        n = request.sampling.n
        with self._wake:
            if self._failure is not None:
                raise EngineStopped(f"the engine has failed: {self._failure}")
            if not self._open:
                raise EngineStopped("the engine is shutting down")
            if request.id in self._ids:
                raise InvalidRequest("request_id", f"{request.id!r} is already being served")
            limit = self._scheduler.table.capacity
            if n > limit:
                raise InvalidRequest("n", f"{n} continuations; at most {limit} fit the queue")
            if sum(self._ids.values()) + n > limit:
                raise QueueFull(
                    f"{limit} continuations are queued or running, as many as scheduler.max_queue "
                    "and scheduler.max_rows allow; try again later"
                )
            self._ids[request.id] = n
            stamped = dataclasses.replace(request, arrival=self._clock())
            self._inbox.append(_Submit(stamped, on_output))
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Ends a request; its blocks are free within one step. Unknown or ended ids are ignored."""
        with self._wake:
            self._inbox.append(_Cancel(request_id))
            self._wake.notify()

    def stats(self) -> EngineStats:
        """A snapshot, taken while the engine runs: its counts may be one step apart."""
        table, pool = self._scheduler.table, self._scheduler.pool
        _, rows = pool.holders()
        kinds, tiers = pool.kind[rows], table.tier[rows]
        blocks = {
            (kind.name.lower(), tier.name.lower()): int(((kinds == kind) & (tiers == tier)).sum())
            for kind in CacheKind
            for tier in Tier
        }
        with self._wake:
            queued = sum(isinstance(c, _Submit) for c in self._inbox)
        return EngineStats(
            waiting=int((table.state == State.WAITING).sum()) + queued,
            running=int(np.isin(table.state, (State.RUNNING, State.DRAINING)).sum()),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks=blocks,
            preemptions=self._scheduler.preemptions,
            compiles_after_warmup=self._compiles.count,
            steps=self._steps,
        )

    def add_observer(self, observer: Observer) -> None:
        self._observers.append(observer)

    def add_failure_listener(self, listener: Callable[[BaseException], None]) -> None:
        """listener(exception) is called once if the engine fails, on the engine thread, or here
        and now if it has failed already."""
        with self._wake:
            self._failure_listeners.append(listener)
            failure = self._failure
        if failure is not None:
            listener(failure)

    # Life.

    def start(self) -> None:
        """Starts the engine thread. The executor is warm (see `build_engine`)."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    def drain(self, grace_s: float) -> bool:
        """Takes no more requests, lets those inside end for up to grace_s seconds, cancels the
        rest. True if none was left to cancel. Waits until all have ended."""
        with self._wake:
            self._open = False
            clean = self._wake.wait_for(lambda: not self._ids, timeout=grace_s)
            self._inbox.extend(_Cancel(name) for name in self._ids)
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._ids)
        return clean

    def stop(self) -> None:
        """Cancels everything and ends the thread. Idempotent."""
        if self._thread is None:
            self._end_unstarted()
            return
        self.drain(0.0)
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        self._thread.join()

    def _end_unstarted(self) -> None:
        with self._wake:
            self._open = False
            commands = list(self._inbox)
            self._inbox.clear()
            self._ids.clear()
        for command in commands:
            if isinstance(command, _Submit):
                _refuse(command, FinishReason.CANCELLED)

    # The loop, on the engine thread.

    def _run(self) -> None:
        self._compiles.start()
        guard = "disallow" if self._options.forbid_compile else "allow"
        try:
            with jax.transfer_guard_host_to_device(guard):
                self._loop()
        except BaseException as error:
            self._fail(error)

    def _loop(self) -> None:
        pending: _InFlight | None = None
        while self._receive(wait=pending is None and not self._live):
            launched = self._launch(idle=pending is None)
            if pending is not None:
                self._finish_step(pending)
            pending = launched
            if pending is not None and not self._options.overlap:
                self._finish_step(pending)
                pending = None

    def _receive(self, *, wait: bool) -> bool:
        """Takes in what other threads asked for; False when the engine is to end."""
        with self._wake:
            if wait:
                self._wake.wait_for(lambda: self._inbox or self._stop)
            if self._stop:
                return False
            commands = len(self._inbox)
        for _ in range(commands):
            command = self._inbox[0]  # it stays there until done, so that a failure finds it
            if isinstance(command, _Submit):
                self._admit(command)
            else:
                for continuation in list(self._by_id.get(command.request_id, ())):
                    self._end(continuation, FinishReason.CANCELLED)
            self._inbox.popleft()
        return True

    def _admit(self, command: _Submit) -> None:
        request = command.request
        texts = [
            ContinuationText(self.tokenizer, request.sampling, self._eos_ids, request.prompt)
            for _ in range(request.sampling.n)
        ]
        continuations = self._by_id[request.id] = []
        for index, text in enumerate(texts):
            row = self._scheduler.add(request)
            continuation = Continuation(request, index, row, text, command.on_output)
            continuations.append(continuation)
            self._live[row] = continuation

    def _launch(self, *, idle: bool) -> _InFlight | None:
        """Plans the next step and starts it; None if there is nothing to do yet."""
        if not self._live:
            return None
        begin = self._clock()
        scheduler = self._scheduler
        step = scheduler.schedule(begin)
        for row in step.preempted.tolist():
            self._release_slot(self._live[row])
        for move in step.moves:
            self._carry_out(move)
        if not len(step):
            if idle and not step.plan.operations:
                raise InvalidPlan(f"the policy plans nothing for {len(self._live)} requests")
            return None
        members = [self._live[row] for row in step.rows.tolist()]
        for member in members:
            if member.slot == NO_SLOT:
                self._take_slot(member, begin)
        slots = np.array([member.slot for member in members], np.int32)
        layout, batch = build_batch(
            self._executor.buckets, step, scheduler.pool, slots, self._tokens_of
        )
        emits = step.emits[batch.order]
        emitting = [(i, members[batch.order[i]]) for i in np.flatnonzero(emits).tolist()]
        full = any(not member.request.sampling.is_plain_greedy for _, member in emitting)
        handle = self._executor.submit(layout, batch.buffer, full=full)
        for row in scheduler.release_finished(step).tolist():
            self._release_slot(self._live[row])
        return _InFlight(
            handle, emitting, step, layout.tokens, launched=begin, host_time=self._clock() - begin
        )

    def _tokens_of(self, row: int, first: int, end: int) -> Sequence[int]:
        return self._live[row].tokens(first, end)

    def _carry_out(self, move: Move) -> None:
        executor = self._executor
        match move:
            case Widen():
                for layout, packed in widening(executor.buckets, move):
                    executor.widen(layout, packed)
            case CopyBlocks(pairs):
                executor.copy_blocks(pairs)
            case Save(key, slots):
                executor.save(key, slots)
            case Load(key, slots):
                executor.load(key, slots)
            case Discard(keys):
                executor.discard(keys)

    def _finish_step(self, step: _InFlight) -> None:
        """Takes in a step's tokens; late ones of requests that are over are dropped."""
        result, booked = step.handle.result(), step.step
        now = self._clock()
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
                self._forget(continuation, reason, now)
        self._steps += 1
        host_time = step.host_time + self._clock() - now
        if self._options.forbid_compile and self._compiles.count:
            raise CompiledAfterWarmup(
                f"{self._compiles.count} compilation(s) after the warm-up; the last step had "
                f"{len(booked)} rows and {step.padded_tokens} padded tokens"
            )
        stats = StepStats(
            num_rows=len(booked),
            num_decodes=booked.num_decodes,
            num_decode_tokens=booked.num_decode_tokens,
            num_prefill_tokens=booked.num_prefill_tokens,
            num_recomputed_tokens=booked.num_recomputed_tokens,
            padded_tokens=step.padded_tokens,
            step_time=now - step.launched,
            host_time=host_time,
            preemptions=len(booked.preempted),
        )
        for observer in self._observers:
            observer.on_step(stats)

    def _observe_token(self, continuation: Continuation, now: float) -> None:
        request = continuation.request
        for observer in self._observers:
            if continuation.last_token is None:
                observer.on_first_token(now - request.arrival, request.tier)
            else:
                observer.on_inter_token(now - continuation.last_token, request.tier)

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
        self._free_slots.append(member.slot)
        member.slot = NO_SLOT

    def _end(self, continuation: Continuation, reason: FinishReason, error: str = "") -> None:
        """Ends a continuation from outside the model."""
        now = self._clock()
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        continuation.end(reason, now, preemptions, error)
        self._forget(continuation, reason, now)

    def _forget(self, continuation: Continuation, reason: FinishReason, now: float) -> None:
        """Frees all that a finished continuation holds."""
        request = continuation.request
        preemptions = int(self._scheduler.table.preemptions[continuation.row])
        if continuation.slot != NO_SLOT:
            self._release_slot(continuation)
        self._scheduler.finish(continuation.row)
        del self._live[continuation.row]
        siblings = self._by_id[request.id]
        siblings.remove(continuation)
        if not siblings:
            del self._by_id[request.id]
        ttft = continuation.first_token
        stats = RequestStats(
            finish_reason=reason,
            tier=request.tier,
            prompt_tokens=len(request.prompt),
            output_tokens=len(continuation.output_tokens),
            preemptions=preemptions,
            queue_time=time_or(continuation.first_scheduled, now) - request.arrival,
            ttft=None if ttft is None else ttft - request.arrival,
            e2e=now - request.arrival,
        )
        for observer in self._observers:
            observer.on_finish(stats)
        with self._wake:
            self._ids[request.id] -= 1
            if not self._ids[request.id]:
                del self._ids[request.id]
                self._wake.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Ends every request with the error; nobody is left waiting, whatever else goes wrong."""
        log.error("the engine failed: %s", error, exc_info=error)
        message = f"{type(error).__name__}: {error}"
        with self._wake:
            self._failure = error
            self._open = False
            commands = list(self._inbox)
            self._inbox.clear()
            listeners = list(self._failure_listeners)
        for listener in listeners:
            _attempt(listener, error)
        for continuation in list(self._live.values()):
            if not _attempt(self._end, continuation, FinishReason.ERROR, message):
                # Its caller raised, or its state is what failed: free what there is, quietly.
                _attempt(self._forget, continuation, FinishReason.ERROR, self._clock())
        for command in commands:
            if isinstance(command, _Submit) and command.request.id not in self._by_id:
                _attempt(_refuse, command, FinishReason.ERROR, message)
        with self._wake:
            self._ids.clear()
            self._wake.notify_all()


def _attempt(act: Callable[..., None], *args: object) -> bool:
    """Whether it went well; if not, it is logged."""
    try:
        act(*args)
    except Exception:
        log.exception("while the engine was ending its requests")
        return False
    return True


def _refuse(command: _Submit, reason: FinishReason, error: str = "") -> None:
    """Ends a request that never got as far as the scheduler."""
    request = command.request
    for index in range(request.sampling.n):
        command.on_output(Output(request.id, index, finish_reason=reason, error=error))


def _logprobs(result: SampleResult, i: int, wanted: int | None) -> tuple[TokenLogprobs, ...]:
    if wanted is None:
        return ()
    assert result.chosen_logprob is not None
    assert result.top_ids is not None and result.top_logprobs is not None
    ids, values = result.top_ids[i, :wanted], result.top_logprobs[i, :wanted]
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return (TokenLogprobs(int(result.tokens[i]), float(result.chosen_logprob[i]), top),)
