"""The engine: requests in, tokens out. One thread schedules and owns the device state.

The loop launches step N, finishes step N-1 on the host while the device works (stop conditions,
detokenising, streaming), and plans N+1. Sampled tokens feed the next step on the device, so it does
not wait for them. Only tokens constrained by a grammar wait: they are sampled once the host has the
previous token, while the device already computes their logits.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np

from jaxserve.engine.adapters import Adapter, AdapterLoad, AdapterSlots, UnknownAdapter
from jaxserve.engine.block_keys import BlockKeys, KeyChain
from jaxserve.engine.device.buckets import ASKED, Buckets
from jaxserve.engine.device.compilations import CompileCounter, StepCompiler
from jaxserve.engine.device.executor import Executor
from jaxserve.engine.device.host_copies import Saved
from jaxserve.engine.device.sampling_state import RequestRow
from jaxserve.engine.drafts.drafting import Drafting, Drafts
from jaxserve.engine.errors import AdapterError, EngineStopped, HostLost
from jaxserve.engine.failures import attempt, describe, refuse, with_traceback
from jaxserve.engine.in_flight import InFlight
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.request_places import RequestPlaces
from jaxserve.engine.stats import EngineInfo, EngineStats, Observer
from jaxserve.engine.step_loop import StepLoop, Submit
from jaxserve.engine.text.detokenizer import Detokenizer, Tokenizer
from jaxserve.engine.text.grammar_process import GrammarLimits
from jaxserve.engine.text.grammars import GrammarMatcher, Grammars
from jaxserve.engine.text.matcher import Matcher
from jaxserve.engine.text.stop_conditions import ContinuationText
from jaxserve.engine.text.thinking_matcher import MarkerTokens, ThinkingMatcher
from jaxserve.engine.ttft_estimator import LiveTtftEstimator
from jaxserve.sched.cache.pool_map import pool_map
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.cost.reachability import slo_problems
from jaxserve.sched.request import Grammar, InvalidRequest, Request, Thinking, Tier, validate
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.tiers import blocks_used
from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.sched.state.request_table import DRAINING, HELD, RUNNING, WAITING
from jaxserve.sched.step_timing import StepWatch
from jaxserve.weights.lora import LoadedAdapter

log = logging.getLogger(__name__)


MOST_DRAFTING = 8  # continuations per request: each indexes its prompt, on the caller's thread


class _Command(enum.Enum):
    """Commands to the engine's thread, besides requests and cancellations."""

    RESET_PREFIX_CACHE = enum.auto()


@dataclasses.dataclass(frozen=True)
class _ToolCalls:
    """See `Engine.note_tools`."""

    request_id: str
    tools: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _Export:
    """See `Engine.export`. done: completed or failed afterwards. sent: what is on its way, or was
    sent before."""

    request_id: str
    most_bytes: int
    done: Future[dict[bytes, Saved]]
    sent: dict[bytes, Saved | None]


@dataclasses.dataclass(frozen=True)
class _PutAdapter:
    """Asks to put an adapter into a slot and its columns. done: completed or failed afterwards."""

    slot: int
    first: int
    adapter: LoadedAdapter
    done: Future[None]


class Engine:
    """Serves requests on one model. Any thread may call the public methods.

    Args:
        executor: runs its steps. Nobody else uses it once the engine has started.
        scheduler: plans the steps.
        tokenizer: the model's.
        info: result of `info`.
        cost_model: predicts steps for the scheduler's policy. It learns from served steps.
        eos_ids: tokens that end a continuation.
        overlap: whether to finish a step on the host while the next one runs.
        forbid_compile: whether a compilation after the warm-up, or an implicit transfer to the
            device, is an engine failure.
        share_between_keys: whether tenants share cached prefixes.
        block_secret: secret of the keys of blocks, see `BlockKeys`.
        adapters: room for adapters; None for none.
        grammar_limits: limits of grammars; None for the default.
        compiler: compiles further steps of the executor while it serves; None for none.
        clock: seconds; `Request.arrival` is on it.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        info: EngineInfo,
        *,
        cost_model: OnlineCostModel,
        eos_ids: tuple[int, ...],
        overlap: bool = True,
        forbid_compile: bool = False,
        share_between_keys: bool = False,
        block_secret: bytes | None = None,
        adapters: AdapterSlots | None = None,
        grammar_limits: GrammarLimits | None = None,
        compiler: StepCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.executor = executor
        self._scheduler = scheduler
        self._info, self._eos_ids = info, eos_ids
        self._overlap, self._forbid_compile = overlap, forbid_compile
        self._clock, self._adapters = clock, adapters
        self._cost_model, self._compiler = cost_model, compiler
        self._compiles = CompileCounter()
        self._step_loop = StepLoop(
            executor,
            scheduler,
            info,
            watch=StepWatch(cost_model, executor.buckets.padding),
            compiles=self._compiles if self._forbid_compile else None,
            clock=clock,
            on_over=self._over,
            overlap=overlap,
        )
        step_loop = self._step_loop
        self._ttft_estimator = LiveTtftEstimator(
            scheduler, step_loop.watch, clock, lambda: step_loop.arrivals
        )
        self._block_keys: BlockKeys | None = None
        if scheduler.cache is not None:
            size, shared = scheduler.pool.block_size, share_between_keys
            self._block_keys = BlockKeys(size, shared=shared, secret=block_secret)
        self._drafts = Drafts(shared=share_between_keys) if scheduler.policy.speculates else None
        self._grammars = Grammars(tokenizer.definition(), info.vocab_size, eos_ids, grammar_limits)
        self._marker_tokens = MarkerTokens(tokenizer.piece, info.vocab_size, eos_ids)
        self._failure_listeners: list[Callable[[BaseException], None]] = []
        self._thread: threading.Thread | None = None
        # Shared between threads, under the condition's lock.
        self._wake = threading.Condition()
        # Strings are ids of requests to cancel.
        self._inbox: deque[
            Submit | str | _Command | _PutAdapter | _ToolCalls | _Export | Buckets
        ] = deque()
        self._using: dict[str, Adapter] = {}  # by request id
        self._places = RequestPlaces(scheduler.table.capacity)
        self._open, self._stop = True, False
        self._failure: BaseException | None = None

    # Methods for any thread.

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a prompt.

        Args:
            text: the prompt.
            special: whether to add the model's special tokens if the text has none.

        Raises:
            InvalidRequest: the text is too long to be served. Most such texts are not encoded.
        """
        return self.tokenizer.encode(text, self._longest_prompt, special=special)

    def max_text_bytes(self) -> int | None:
        """UTF-8 bytes of the longest text that may be served; None if no limit is known."""
        return self.tokenizer.max_bytes(self._longest_prompt)

    @property
    def _longest_prompt(self) -> int:
        return min(self._info.max_model_len, self._info.pool_tokens) - 1

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a single token, for display."""
        return self.tokenizer.piece(token_id)

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Makes the text of a continuation of the prompt while its tokens arrive."""
        return self.tokenizer.detokenizer(prompt)

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        """Compiles the grammar, so that a request with both can be submitted at once. Raises the
        errors of `Grammars.compile`."""
        self._grammars.compile(grammar)
        if thinking is not None:
            self._marker_tokens.find(thinking)

    def knows_grammar(self, grammar: Grammar) -> bool:
        """See `Grammars.known`."""
        return self._grammars.known(grammar)

    def info(self) -> EngineInfo:
        """Description of the served model; the same object from start to stop."""
        return self._info

    def check(self, request: Request) -> None:
        """Checks a request's size and token ids, and compiles its grammar.

        Raises:
            InvalidRequest: this engine cannot serve it.
        """
        info = self._info
        validate(
            request,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            pool_tokens=info.pool_tokens,
            d_model=info.d_model,
        )
        if not info.causal and request.pooling is None:
            raise InvalidRequest(
                "model",
                "tokens of this model see those behind them (is_causal is false in its "
                "config.json): it makes vectors only",
            )
        if request.sampling.deterministic and info.not_deterministic:
            raise InvalidRequest("deterministic", info.not_deterministic)
        self._places.check(request)
        self._adapter(request)
        if request.sampling.grammar is not None:
            self._grammars.check(request.sampling.grammar, request.tenant)
            self.check_grammar(request.sampling.grammar, request.sampling.thinking)

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        """Queues a request that has passed `check`. Its host-side state is built on the calling
        thread, so that an error there affects only the caller.

        Args:
            request: its id must not be in use. Its times count from its arrival, or from now if it
                has none.
            on_output: gets every `Output` on the engine thread and must not block; it is never
                called if this raises.

        Raises:
            InvalidRequest: the id is being served, or its adapter is unloaded.
            QueueFull: the queue is full.
            EngineStopped: after `drain`, `stop` or a failure.
        """
        if not request.adapter:
            return self._submit(request, on_output, None)
        slots = self._slots(request.adapter)
        adapter = slots.acquire(request.adapter)
        try:
            self._submit(request, on_output, adapter)
        except BaseException:
            slots.release(adapter)
            raise

    def _submit(
        self, request: Request, on_output: Callable[[Output], None], adapter: Adapter | None
    ) -> None:
        info = self._info
        texts, row = self._texts(request), RequestRow(request, info.vocab_size, self._eos_ids)
        replays = [
            text.replay(each.tokens)
            for text, each in zip(texts, request.generated, strict=bool(request.generated))
        ]
        scheduler = self._scheduler
        keys = self._keys(request, adapter)
        if keys is not None:
            request = _known_by(request, keys)
        drafting = self._drafting(request, texts, adapter)
        alone = scheduler.alone(request)
        problems = slo_problems(request, scheduler.reachable(request, alone))
        with self._wake:
            if self._failure is not None:
                raise EngineStopped(f"the engine has failed: {self._failure}")
            if not self._open:
                raise EngineStopped("the engine is shutting down")
            self._places.reserve(request)
            now = self._clock()
            arrival = request.arrival or now
            stamped = dataclasses.replace(request, arrival=arrival, pages={})
            if adapter is not None:
                self._using[request.id] = adapter
            self._inbox.append(
                Submit(
                    request=stamped,
                    on_output=on_output,
                    texts=texts,
                    row=row,
                    alone=alone,
                    at=now,
                    problems=problems,
                    block_keys=keys,
                    drafting=drafting,
                    adapter=adapter,
                    replays=replays,
                    pages=request.pages,
                )
            )
            self._wake.notify()
        self._ttft_estimator.submitted(stamped, now)

    def with_keys(self, request: Request) -> Request:
        """The request with the keys of its prompt's blocks."""
        keys = self._keys(request, self._adapter(request))
        return request if keys is None else _known_by(request, keys)

    def _adapter(self, request: Request) -> Adapter | None:
        """The request's adapter as it is loaded now. Raises UnknownAdapter."""
        return self._slots(request.adapter).find(request.adapter) if request.adapter else None

    def _slots(self, name: str) -> AdapterSlots:
        if self._adapters is None:
            raise UnknownAdapter(name)
        return self._adapters

    def adapters(self) -> list[Adapter]:
        """Adapters that requests may name."""
        return [] if self._adapters is None else self._adapters.all()

    def load_adapter(self, name: str, path: str, root: Path | None = None) -> Adapter:
        """Loads an adapter, on the calling thread and then on the engine's, and waits for both.

        Args:
            name: its name, which must be free.
            path: its folder, as PEFT saves it.
            root: folder that must contain it; None for any.

        Raises:
            AdapterError: it cannot be used, or there is no room.
            EngineStopped: after `drain`, `stop` or a failure.
        """
        if self._adapters is None:
            raise AdapterError("there is no room for adapters here: lora.max_loras is 0")
        made = self._adapters.load(name, path, root, self._put_adapter)
        log.info("adapter %s, rank %d, is loaded from %s", name, made.rank, ascii(path))
        return made

    def _put_adapter(self, slot: int, first: int, adapter: LoadedAdapter) -> None:
        done: Future[None] = Future()
        with self._wake:
            if self._failure is not None or not self._open:
                raise EngineStopped("the engine is shutting down, or has failed")
            if self._thread is None:
                return self.executor.put_adapter(slot, first, adapter.arrays)
            self._inbox.append(_PutAdapter(slot, first, adapter, done))
            self._wake.notify()
        done.result()

    def unload_adapter(self, name: str) -> None:
        """Stops new requests from naming the adapter. Running requests continue. Raises
        UnknownAdapter."""
        self._slots(name).unload(name)
        log.info("adapter %s is unloaded", name)

    def _keys(self, request: Request, adapter: Adapter | None) -> KeyChain | None:
        """The keys of the prompt's blocks. None without reuse, and for requests that need the
        log-probabilities or the hidden states of all prompt tokens, which have to be computed."""
        pooled = request.pooling is not None and request.pooling.needs_all
        if self._block_keys is None or pooled or request.sampling.prompt_logprobs is not None:
            return None
        known, digest = request.block_keys or (), b"" if adapter is None else adapter.digest
        # Blocks written by other steps have other bits.
        asked = request.sampling.deterministic and self.executor.buckets.deterministic == ASKED
        apart = "deterministic" if asked else ""
        return self._block_keys.of(
            request.prompt,
            tenant=request.tenant,
            salt=request.cache_salt,
            known=known,
            adapter=digest,
            apart=apart,
        )

    def _drafting(
        self, request: Request, texts: Sequence[ContinuationText], adapter: Adapter | None
    ) -> list[Drafting]:
        """The drafting of each continuation; empty without drafts."""
        if self._drafts is None or request.pooling is not None:
            return []
        digest = b"" if adapter is None else adapter.digest
        return [
            self._drafts.of(
                request.prompt,
                tenant=request.tenant,
                salt=request.cache_salt,
                prediction=request.prediction,
                matcher=text.matcher,
                adapter=digest,
            )
            for text in texts[:MOST_DRAFTING]
        ]

    def _texts(self, request: Request) -> list[ContinuationText]:
        """Fresh text state for each continuation of the request."""
        sampling = request.sampling
        asked, thinking = sampling.grammar, sampling.thinking
        grammar: Callable[[], GrammarMatcher] | None = None
        if asked is not None:
            compiled = self._grammars.compile(asked)
            grammar = functools.partial(
                compiled.matcher, ignore_eos=sampling.ignore_eos, tenant=request.tenant
            )
        make: Callable[[], Matcher] | None = grammar
        if thinking is not None:
            make = functools.partial(ThinkingMatcher, thinking, self._marker_tokens, grammar)
        return [
            ContinuationText(
                self.tokenizer,
                sampling,
                self._eos_ids,
                prompt=request.prompt,
                matcher=None if make is None else make(),
            )
            for _ in range(sampling.n)
        ]

    def cancel(self, request_id: str) -> None:
        """Ends a request; its blocks are free within one step. Unknown or ended ids are ignored."""
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def note_tools(self, request_id: str, tools: Mapping[str, str]) -> None:
        """Notes that a request's answer asks for tools, before anybody can answer them.

        Args:
            request_id: the request.
            tools: names of the tools, by the ids of the calls.
        """
        with self._wake:
            self._inbox.append(_ToolCalls(request_id, tools))
            self._wake.notify()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes: requests submitted after this find none of them. Running
        requests keep the blocks that they read."""
        with self._wake:
            self._inbox.append(_Command.RESET_PREFIX_CACHE)
            self._wake.notify()

    def export(
        self, request_id: str, seconds: float, most_bytes: int, sent: Collection[bytes] = ()
    ) -> dict[bytes, np.ndarray]:
        """The full blocks of K and V that a running request has computed, by the keys of their
        tokens, for `Request.pages` of another engine with the same system fingerprint and secret.
        The request goes on meanwhile. Waits for the copies, on the calling thread.

        Args:
            request_id: the request.
            seconds: how long to wait.
            most_bytes: of the blocks, with those sent before; the first ones that are no more.
            sent: keys of those that were sent before.

        Returns:
            Empty without a prefix cache with host memory, or with several hosts.

        Raises:
            TimeoutError: it takes longer.
            EngineStopped: the engine has ended.
        """
        due = self._clock() + seconds
        saved = self.exporting(request_id, most_bytes, sent).result(seconds)
        return {key: one.wait(due - self._clock()) for key, one in saved.items()}

    def exporting(
        self, request_id: str, most_bytes: int, sent: Collection[bytes] = ()
    ) -> Future[dict[bytes, Saved]]:
        """Begins to `export`. Raises EngineStopped."""
        done: Future[dict[bytes, Saved]] = Future()
        with self._wake:
            if self._failure is not None or self._thread is None or self._stop:
                raise EngineStopped("the engine has ended")
            self._inbox.append(_Export(request_id, most_bytes, done, dict.fromkeys(sent)))
            self._wake.notify()
        return done

    def recompute_seconds(self, keys: Sequence[bytes]) -> float:
        """See `Scheduler.recompute_seconds`."""
        return self._scheduler.recompute_seconds(keys)

    def stats(self) -> EngineStats:
        """A snapshot, taken while the engine runs: its counts may be one step apart."""
        with self._wake:
            queued = sum(isinstance(c, Submit) for c in self._inbox)
        scheduler, failures = self._scheduler, self._step_loop.failures
        table, pool, host = scheduler.table, scheduler.pool, scheduler.host
        cache = scheduler.cache
        return EngineStats(
            waiting=int(np.isin(table.state, (WAITING, HELD)).sum()) + queued,
            running=int(np.isin(table.state, (RUNNING, DRAINING)).sum()),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks=blocks_used(pool, table.tier),
            host_slots_total=host.capacity,
            host_slots_used=host.num_used,
            slots_checkpointed=host.num_saved,
            slots_restored=host.num_restored,
            host_full=host.num_full,
            preemptions=scheduler.preemptions,
            compiles_after_warmup=self._compiles.count,
            sizes_to_compile=0 if self._compiler is None else self._compiler.left,
            steps=self._step_loop.steps,
            step_time_error=self._cost_model.error,
            expected_wait=self._ttft_estimator.by_tier(),
            request_failures=failures.requests,
            corrupted_requests=failures.not_finite,
            grammar_breaches=self._grammars.breaches,
            step_failures=failures.steps,
            observer_failures=failures.observers,
            prefix_cache_queries={} if cache is None else _by_tier(cache.num_queried),
            prefix_cache_hits={} if cache is None else _by_tier(cache.num_hit),
            prefix_cache_host_hits={} if cache is None else _by_tier(cache.num_host_hit),
            prefix_cache_host_tokens=0 if cache is None else cache.num_on_host * pool.block_size,
            prefix_cache_evicted=0 if cache is None else cache.num_evicted * pool.block_size,
            programs_running=scheduler.programs.num_running,
            programs_waiting=scheduler.programs.num_waiting,
        )

    def expected_wait(self, request: Request) -> Wait:
        """The expected wait for the first token of a request that is submitted now, counted from
        its arrival."""
        return self._ttft_estimator.wait(self.with_keys(request))

    def backlog(self) -> Backlog:
        """The work left at the last step. Its time is on the engine's clock."""
        return self._ttft_estimator.backlog

    def block_map(self) -> np.ndarray:
        """What each block holds, uint8 [num_blocks] of `sched.cache.pool_map.BlockUse`. Taken while
        the engine runs: parts of it may be one step apart."""
        return pool_map(self._scheduler.pool, self._scheduler.table.tier)

    def live_counts(self) -> dict[tuple[str, str, bool], int]:
        """Continuations by (SLO class, tier, whether they hold a cache), at most one step apart."""
        held = self._scheduler.pool.held
        return Counter(
            (one.request.slo_class, one.request.tier.name.lower(), bool(held[row]))
            for row, one in list(self._step_loop.live.items())
        )

    def adapter_load(self) -> AdapterLoad:
        """Adapters of running and waiting requests, at most one step apart."""
        if self._adapters is None:
            return AdapterLoad(0)
        held, names = self._scheduler.pool.held, (set[str](), set[str]())
        for row, one in list(self._step_loop.live.items()):
            if one.request.adapter:
                names[not held[row]].add(one.request.adapter)
        running, waiting = (tuple(sorted(each)) for each in names)
        return AdapterLoad(self._adapters.count, running, waiting)

    def add_observer(self, observer: Observer) -> None:
        """Calls the observer for every step and token from now on, on the engine thread: it must
        return quickly. Its exceptions are logged and counted (`EngineStats.observer_failures`)."""
        self._step_loop.observers.add(observer)

    def add_failure_listener(self, listener: Callable[[BaseException], None]) -> None:
        """Calls listener(exception) once if the engine fails: on the engine thread, on the thread
        that calls `abandon`, or right now if it has failed already."""
        with self._wake:
            self._failure_listeners.append(listener)
            failure = self._failure
        if failure is not None:
            listener(failure)

    # Start and stop.

    def start(self) -> None:
        """Starts the engine thread, and one that compiles what the executor's warm-up has left out
        (see `build_engine`)."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()
        if self._compiler is not None:
            self._compiler.start(self._compiled)

    def _compiled(self, buckets: Buckets) -> None:
        """The executor has these layouts from now on."""
        with self._wake:
            self._inbox.append(buckets)
            self._wake.notify()

    def drain(self, grace_s: float) -> bool:
        """Refuses new requests and waits until the present ones have ended.

        Args:
            grace_s: seconds after which they are cancelled.

        Returns:
            Whether all ended by themselves.
        """
        with self._wake:
            self._open = False
            clean = self._wake.wait_for(lambda: not self._places, timeout=grace_s)
            self._inbox.extend(self._places.ids)
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._places)
        return clean

    def stop(self) -> None:
        """Cancels everything and ends the threads, after the program that is being compiled.
        Idempotent."""
        self._grammars.close()
        if self._thread is None:
            self._end_unstarted()
            return
        self.drain(0.0)
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        self._thread.join()
        if self._compiler is not None:
            self._compiler.stop()

    def _end_unstarted(self) -> None:
        with self._wake:
            self._open = False
            commands = list(self._inbox)
            self._inbox.clear()
            self._places.clear()
        for command in commands:
            if isinstance(command, Submit):
                refuse(command.request, command.on_output, FinishReason.CANCELLED)
        self._step_loop.stop()

    def abandon(self, error: BaseException) -> None:
        """Fails the engine from another thread, in case its own is stuck waiting for a device. It
        refuses new requests. The failure listeners end the present ones."""
        with self._wake:
            if self._failure is not None:
                return
            self._failure, self._open = error, False
            listeners = list(self._failure_listeners)
        for listener in listeners:
            attempt(listener, error)

    # The loop, on the engine thread.

    def _run(self) -> None:
        self._compiles.start()
        guard = "disallow" if self._forbid_compile else "allow"
        try:
            with jax.transfer_guard_host_to_device(guard):
                self._loop()
        except BaseException as error:
            self._fail(error)
        finally:
            self._step_loop.stop()
            self._refuse_adapters()

    def _refuse_adapters(self) -> None:
        """Fails pending loads, so that nobody waits for a slot that will not be filled."""
        with self._wake:
            left = [command for command in self._inbox if isinstance(command, _PutAdapter)]
        for command in left:
            command.done.set_exception(EngineStopped("the engine has ended"))

    def _loop(self) -> None:
        pending: InFlight | None = None
        self._step_loop.woke(None)
        while self._receive(wait=pending is None and not self._step_loop.live):
            if pending is not None and self._step_loop.waits_for(pending):
                self._step_loop.finish(pending)
                pending = None
                if not self._receive(wait=False):  # include requests that have come meanwhile
                    break
            launched = self._step_loop.launch(pending)
            self._ttft_estimator.publish(pending, launched)  # newcomers queue behind it
            if pending is not None:
                self._step_loop.finish(pending)
            pending = None if launched is None else self._step_loop.sample(launched)
            if pending is not None and not self._overlap:
                self._step_loop.finish(pending)
                pending = None
            if not self._step_loop.live:  # it may sleep now, so leave no outdated estimate
                self._ttft_estimator.publish(pending)

    def _receive(self, *, wait: bool) -> bool:
        """Handles commands of other threads. False if the engine is to end."""
        with self._wake:
            if wait and not (self._inbox or self._stop):
                ready = functools.partial(self._wake.wait_for, lambda: self._inbox or self._stop)
                while not ready(timeout=self._step_loop.rest()):
                    self._step_loop.expire()
                first = self._inbox[0] if self._inbox else None
                self._step_loop.woke(first.at if isinstance(first, Submit) else None)
            if self._stop:
                return False
            commands = len(self._inbox)
        for _ in range(commands):
            command = self._inbox.popleft()
            if isinstance(command, Submit):
                self._step_loop.admit(command)
            elif command is _Command.RESET_PREFIX_CACHE:
                self._step_loop.reset_prefix_cache()
            elif isinstance(command, _PutAdapter):
                self._fill(command)
            elif isinstance(command, _ToolCalls):
                self._step_loop.note_tools(command.request_id, command.tools)
            elif isinstance(command, Buckets):
                self._use(command)
            elif isinstance(command, _Export):
                self._export(command)
            else:
                self._step_loop.cancel(command)
        return True

    def _use(self, buckets: Buckets) -> None:
        """Runs batches with these layouts, which are compiled, from the next plan on."""
        assert self._compiler is not None
        self._compiler.use(buckets)
        self._step_loop.pad(buckets.padding)

    def _fill(self, command: _PutAdapter) -> None:
        """Puts an adapter into its slot. A failure ends the engine only if the device has lost
        something."""
        try:
            self.executor.put_adapter(command.slot, command.first, command.adapter.arrays)
        except BaseException as error:
            command.done.set_exception(error)
            if not isinstance(error, Exception) or not self.executor.intact:
                raise
        else:
            command.done.set_result(None)

    def _export(self, command: _Export) -> None:
        """Exports a part of a request's cache, and the rest after the next step. A failure is only
        whoever asks for it to know, as for `_fill`."""
        try:
            given = command.request_id, command.sent, command.most_bytes
            more = self._step_loop.export(*given)
        except BaseException as error:
            command.done.set_exception(error)
            if not isinstance(error, Exception) or not self.executor.intact:
                raise
        else:
            if more:
                self._inbox.append(command)
            else:
                saved = {key: one for key, one in command.sent.items() if one is not None}
                command.done.set_result(saved)

    def _over(self, request_id: str) -> None:
        used: Adapter | None = None
        with self._wake:
            if self._places.end(request_id):
                used = self._using.pop(request_id, None)
                self._wake.notify_all()
        if used is not None and self._adapters is not None:
            self._adapters.release(used)

    def _fail(self, error: BaseException) -> None:
        """Ends every request with the error, so that no caller is left waiting."""
        log.error("the engine failed: %s", with_traceback(error))
        self.abandon(error)
        if isinstance(error, HostLost):
            return
        message = describe(error)
        with self._wake:
            commands = list(self._inbox)
            self._inbox.clear()
        step_loop = self._step_loop
        for continuation in list(step_loop.live.values()):
            attempt(
                functools.partial(step_loop.end_failed, engine_failed=True), continuation, message
            )
        for command in commands:
            if isinstance(command, Submit):
                request, last = command.request, FinishReason.ERROR
                refuse(request, command.on_output, last, message, engine_failed=True)
            elif isinstance(command, _PutAdapter):
                command.done.set_exception(EngineStopped(message))
        with self._wake:
            self._places.clear()
            self._wake.notify_all()


def _known_by(request: Request, keys: KeyChain) -> Request:
    return dataclasses.replace(request, block_keys=tuple(keys.keys))


def _by_tier(counts: np.ndarray) -> dict[str, int]:
    return {tier.name.lower(): int(counts[tier]) for tier in Tier}
