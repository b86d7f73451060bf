"""An engine without a model, for tests of what stands before it.

Token k of every continuation is `FIRST + k`, its text " wk". Nothing happens by itself: a test
calls `step()`, or starts a thread that does (`run()`). The rules are the real engine's. The first
token comes after 200 ms, each later one 20 ms after the one before, the last one after 300 ms.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from jaxserve.client import Client, ServerError
from jaxserve.engine.adapters import Adapter, AdapterLoad, UnknownAdapter
from jaxserve.engine.errors import AdapterError, EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason, Output, Timings, TokenLogprobs, Usage
from jaxserve.engine.stats import EngineInfo, EngineStats, Observer, RequestStats, StepStats
from jaxserve.engine.text.detokenizer import Detokenizer
from jaxserve.sched.cache.pool_map import BlockUse
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.reachability import SloProblem
from jaxserve.sched.request import (
    Generated,
    Grammar,
    InvalidRequest,
    PoolingParams,
    PoolingType,
    Request,
    Thinking,
    validate,
)
from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.sched.slo.verdict import judge, tbt_that_counts

FIRST = 100
PATIENCE = 60.0  # seconds: however slow the machine is

INFO = EngineInfo(
    model="fake",
    family="none",
    num_params=1_000_000,
    num_layers=2,
    dtype="float32",
    vocab_size=100_000,
    max_model_len=4096,
    policy="fcfs",
    num_blocks=1024,
    block_size=16,
    pool_tokens=8192,
    pool_bytes=2**20,
    device="cpu",
    mesh_tensor=1,
    attention_backend="xla",
    cost_model="timed at the start",
    hidden_read="projected",
    rho=2.5e-6,
    d_model=4,
    system_fingerprint="fp_0123456789abcdef",
)


def step_stats(rows: int) -> StepStats:
    """A step of so many decodes, in a bucket twice as large."""
    return StepStats(
        num_rows=rows,
        num_decodes=rows,
        num_decode_tokens=rows,
        num_prefill_tokens=0,
        num_recomputed_tokens=0,
        padded_tokens=2 * rows,
        preemptions=0,
        num_live=rows,
        num_received=0,
        num_admitted=0,
        num_moves=0,
        num_emitting=rows,
        after_idle=False,
        features=BatchFeatures(rows, 2 * rows, 8 * rows, rows, 0, 0, 0),
        received=tuple(range(rows)),
        kv_used=32,
        num_hidden=0,
        num_shared=0,
        end=1.0,
        step_time=0.01,
        device_time=0.008,
        predicted_time=0.009,
        lengthening=0.002,
        wake_time=0.0,
        receive_time=0.00005,
        plan_time=0.0002,
        launch_time=0.00025,
        finish_time=0.0005,
    )


@dataclass
class Running:
    request: Request
    on_output: Callable[[Output], None]
    produced: dict[int, int] = field(default_factory=dict)  # unfinished index -> tokens so far
    given_up: set[int] = field(default_factory=set)


class _Decoding:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def feed(self, token_ids: Iterable[int]) -> str:
        return self._engine.decode(list(token_ids))

    def flush(self) -> str:
        return ""


class FakeEngine:
    def __init__(self, max_requests: int = 64) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.max_requests = max_requests
        self.requests: list[Request] = []
        self.live: dict[str, Running] = {}
        self.cancelled: list[str] = []
        self.observers: list[Observer] = []
        self.listeners: list[Callable[[BaseException], None]] = []
        self.open = True
        self.stopped = False
        self.failure: BaseException | None = None
        self.steps = 0
        self.served = INFO
        self.cached_tokens = 0  # of every prompt, as far as it has so many
        self.drafts = 0, 0  # of every continuation: right, and wrong
        self.resets = 0
        self.cache: dict[bytes, np.ndarray] = {}  # of every request
        self.known: set[bytes] = set()  # keys of blocks that need not be computed again
        self.recompute_s = 60.0  # of each other block
        self.tools: list[tuple[str, dict[str, str]]] = []  # as noted, by request
        self.loaded: dict[str, Adapter] = {}
        self.problems: tuple[SloProblem, ...] = ()
        self.gives_up = False  # whoever comes
        self.wait_s = Wait(seconds=0.25, alone=0.125)
        self.text: Callable[[int], str] = lambda k: f" w{k}"
        self.ends_at: int | None = None  # tokens after which a text ends by itself
        self.stop_string = ""  # that ends a text by itself
        self._thread: threading.Thread | None = None

    # The contract.

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        text.encode()  # raises for half a surrogate pair, as tokenizers do
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids)).encode("utf-8", "replace").decode()

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        return _Decoding(self)

    def max_text_bytes(self) -> int | None:
        return 4 * INFO.max_model_len

    def with_keys(self, request: Request) -> Request:
        return request

    def expected_wait(self, request: Request) -> Wait:
        return self.wait_s

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        if "bad" in grammar.text:
            raise InvalidRequest(grammar.field_name, "is bad")

    def knows_grammar(self, grammar: Grammar) -> bool:
        return False

    def info(self) -> EngineInfo:
        return self.served

    def adapters(self) -> list[Adapter]:
        return list(self.loaded.values())

    def load_adapter(self, name: str, path: str, root: Path | None = None) -> Adapter:
        if "bad" in path:
            raise AdapterError("it is bad")
        self.loaded[name] = Adapter(name, path, len(self.loaded))
        return self.loaded[name]

    def unload_adapter(self, name: str) -> None:
        if self.loaded.pop(name, None) is None:
            raise UnknownAdapter(name)

    def note_tools(self, request_id: str, tools: Mapping[str, str]) -> None:
        self.tools.append((request_id, dict(tools)))

    def export(
        self, request_id: str, seconds: float, most_bytes: int, sent: Collection[bytes] = ()
    ) -> dict[bytes, np.ndarray]:
        first = itertools.accumulate(page.nbytes for page in self.cache.values())
        fits = [size <= most_bytes for size in first]
        there = dict(itertools.compress(self.cache.items(), fits))
        return {key: page for key, page in there.items() if key not in sent}

    def recompute_seconds(self, keys: Sequence[bytes]) -> float:
        return self.recompute_s * sum(key not in self.known for key in keys)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def stats(self) -> EngineStats:
        with self.changed:
            running = len(self.live)
        return EngineStats(
            waiting=0,
            running=running,
            blocks_total=INFO.num_blocks,
            blocks_free=INFO.num_blocks - running,
            blocks={("kv", "realtime"): running, ("kv", "best_effort"): 0, ("kv", "shared"): 5},
            host_slots_total=640,
            host_slots_used=64,
            slots_checkpointed=300,
            slots_restored=200,
            host_full=2,
            preemptions=3,
            compiles_after_warmup=0,
            sizes_to_compile=0,
            steps=self.steps,
            step_time_error=0.125,
            expected_wait={"realtime": self.wait_s.seconds, "best_effort": 2 * self.wait_s.seconds},
            prefix_cache_queries={"realtime": 300, "best_effort": 100},
            prefix_cache_hits={"realtime": 240, "best_effort": 0},
            prefix_cache_host_hits={"realtime": 80, "best_effort": 0},
            prefix_cache_host_tokens=96,
            prefix_cache_evicted=160,
            programs_running=2,
            programs_waiting=5,
        )

    def block_map(self) -> np.ndarray:
        uses = np.zeros(INFO.num_blocks, np.uint8)
        uses[: 2 * len(self.live)] = BlockUse.K_REALTIME
        return uses

    def live_counts(self) -> dict[tuple[str, str, bool], int]:
        with self.changed:
            requests = [running.request for running in self.live.values()]
        return Counter((each.slo_class, each.tier.name.lower(), True) for each in requests)

    def adapter_load(self) -> AdapterLoad:
        with self.changed:
            running = {running.request.adapter for running in self.live.values()} - {""}
        return AdapterLoad(4, tuple(sorted(running)), ("late",))

    def check(self, request: Request) -> None:
        validate(
            request,
            max_model_len=INFO.max_model_len,
            vocab_size=INFO.vocab_size,
            pool_tokens=INFO.pool_tokens,
            d_model=INFO.d_model,
        )
        if request.sampling.grammar is not None:
            self.check_grammar(request.sampling.grammar)

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        with self.changed:
            if self.failure is not None or not self.open:
                raise EngineStopped(str(self.failure or "the engine is shutting down"))
            if len(self.live) >= self.max_requests:
                raise QueueFull(f"{self.max_requests} requests are queued; try again later")
            self.requests.append(request)
            indices = dict.fromkeys(range(request.sampling.n), 0)
            running = self.live[request.id] = Running(request, on_output, indices)
            for index, before in enumerate(request.generated):
                self._replay(running, index, before)
            if not running.produced:
                del self.live[request.id]
            if self.gives_up:
                self.give_up()
            self.changed.notify_all()

    def give_up(self) -> None:
        """The targets of whoever is there."""
        self.wait(lambda: self.live)
        with self.changed:
            for running in self.live.values():
                for index in running.produced:
                    running.given_up.add(index)
                    for observer in self.observers:
                        observer.on_given_up(running.request)
                    running.on_output(Output(running.request.id, index, expected_missed=True))

    def cancel(self, request_id: str) -> None:
        with self.changed:
            self.cancelled.append(request_id)
            running = self.live.pop(request_id, None)
            if running is not None:
                for index in running.produced:
                    self._finish(running, index, FinishReason.CANCELLED)
            self.changed.notify_all()

    def drain(self, grace_s: float) -> bool:
        with self.changed:
            self.open = False
            self.changed.notify_all()
            clean = self.changed.wait_for(lambda: not self.live, grace_s)
            for request_id in list(self.live):
                self.cancel(request_id)
            return clean

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def add_failure_listener(self, listener: Callable[[BaseException], None]) -> None:
        self.listeners.append(listener)

    def add_observer(self, observer: Observer) -> None:
        self.observers.append(observer)

    # What a test does.

    def wait(self, condition: Callable[[], object]) -> None:
        """Until the condition holds; it is looked at whenever the engine has changed."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), "it did not happen"

    def step(self, tokens: int = 1) -> None:
        """`tokens` tokens for each continuation."""
        with self.changed:
            self.steps += 1
            for running in list(self.live.values()):
                for index in list(running.produced):
                    for _ in range(tokens):
                        if index in running.produced:
                            self._token(running, index)
                if not running.produced:
                    del self.live[running.request.id]
            rows = len(self.live)
            for observer in self.observers:
                observer.on_step(step_stats(rows))
            self.changed.notify_all()

    def run(self) -> FakeEngine:
        """Steps whenever there is something to do, from a thread, until stop()."""

        def loop() -> None:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.live or self.stopped)
                    if self.stopped:
                        return
                self.step()

        self._thread = threading.Thread(target=loop, daemon=True)
        self._thread.start()
        return self

    def lose(self, error: BaseException) -> None:
        """It is abandoned: whoever listens hears of it, and those who wait hear nothing."""
        with self.changed:
            self.failure = error
            for listener in self.listeners:
                listener(error)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.lose(error)
            for running in self.live.values():
                for index in running.produced:
                    running.on_output(
                        Output(
                            running.request.id,
                            index,
                            finish_reason=FinishReason.ERROR,
                            error=str(error),
                            engine_failed=True,
                        )
                    )
            self.live.clear()
            self.changed.notify_all()

    def fail_silently(self, error: BaseException) -> None:
        """Fails without a word to those who wait; only the listeners hear of it."""
        with self.changed:
            self.failure = error
            self.live.clear()
        for listener in self.listeners:
            listener(error)

    def _replay(self, running: Running, index: int, before: Generated) -> None:
        done, request = len(before.tokens), running.request
        if not done:
            return
        assert before.tokens == tuple(range(FIRST, FIRST + done)), "others' tokens"
        pairs = zip(before.tokens, before.logprobs, strict=False)
        logprobs = tuple(TokenLogprobs(token, *found) for token, found in pairs)
        output = Output(
            request.id,
            index,
            before.tokens,
            "".join(map(self.text, range(done))),
            logprobs,
            token_times=before.times,
            expected_missed=before.given_up,
            replayed=True,
        )
        running.produced[index] = done
        if done in (self.ends_at, request.sampling.max_tokens):
            stops = done == self.ends_at
            reason = FinishReason.STOP if stops else FinishReason.LENGTH
            stop = self.stop_string if stops else ""
            self._finish(running, index, reason, dataclasses.replace(output, stop_string=stop))
            del running.produced[index]
        else:
            running.on_output(output)

    def _token(self, running: Running, index: int) -> None:
        done = running.produced[index]
        sampling = running.request.sampling
        for observer in self.observers:
            if done:
                observer.on_inter_token(0.02, running.request.tier)
            else:
                observer.on_first_token(0.2, running.request.tier)
        token = FIRST + done
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            top = tuple((token + i, -0.5 - i) for i in range(sampling.logprobs))
            logprobs = (TokenLogprobs(token, -0.5, top),)
        if sampling.prompt_logprobs is not None and not done:
            self._prompt(running, index, sampling.prompt_logprobs)
        now = (time.monotonic(),)
        output = Output(
            running.request.id, index, (token,), self.text(done), logprobs, token_times=now
        )
        if running.request.pooling is not None:
            vector = self._pooled(running.request, running.request.pooling)
            output = Output(running.request.id, index, pooled=vector)
        running.produced[index] = done + 1
        if done + 1 == self.ends_at:
            output = dataclasses.replace(output, stop_string=self.stop_string)
            self._finish(running, index, FinishReason.STOP, output)
            del running.produced[index]
        elif done + 1 < sampling.max_tokens:
            running.on_output(output)
        else:
            self._finish(running, index, FinishReason.LENGTH, output)
            del running.produced[index]

    def _pooled(self, request: Request, pooling: PoolingParams) -> np.ndarray:
        """Logits are ids, in tenths. Vectors have the prompt's length and a 1 at its kind's
        place."""
        if pooling.scored_token_ids:
            return np.array(pooling.scored_token_ids, np.float32) / 10
        found = np.zeros(INFO.d_model, np.float32)
        found[0] = len(request.prompt)
        found[1 + list(PoolingType).index(pooling.pooling)] = 1
        found = found[: pooling.dimensions]
        return found / np.linalg.norm(found) if pooling.normalize else found

    def _prompt(self, running: Running, index: int, k: int) -> None:
        """Of token t: -t / 8, and as much for t + 1 and those after it; in two pieces."""
        entries = tuple(
            TokenLogprobs(t, -t / 8, tuple((t + 1 + i, -(t + 1 + i) / 8) for i in range(k)))
            for t in running.request.prompt[1:]
        )
        for piece in (entries[:1], entries[1:]):
            running.on_output(Output(running.request.id, index, prompt_logprobs=piece))

    def _finish(
        self, running: Running, index: int, reason: FinishReason, last: Output | None = None
    ) -> None:
        request, produced = running.request, running.produced[index]
        times = [0.2 + 0.02 * k for k in range(produced)]
        if last is not None and produced > 1:
            times[-1] = 0.3
        gaps = [after - before for before, after in itertools.pairwise(times)]
        timings = Timings(
            queue=0.1,
            ttft=0.2,
            total=0.3,
            tbt=tbt_that_counts(times),
            tbt_mean=sum(gaps) / len(gaps) if gaps else None,
            tbt_max=max(gaps, default=None),
            moved=request.moved,
        )
        asked = dataclasses.replace(request, arrival=0.0)  # as times are
        verdict = judge(asked, times, 0.3, complete=last is not None, problems=self.problems)
        for observer in self.observers:
            observer.on_finish(
                RequestStats(
                    number=0,
                    finish_reason=reason,
                    tier=request.tier,
                    prompt_tokens=len(request.prompt),
                    output_tokens=produced,
                    preemptions=1,
                    queue_time=0.1,
                    ttft=0.2,
                    e2e=0.3,
                    verdict=verdict,
                    given_up=index in running.given_up,
                )
            )
        running.on_output(
            dataclasses.replace(
                last or Output(request.id, index),
                finish_reason=reason,
                usage=Usage(
                    len(request.prompt),
                    produced,
                    preemptions=1,
                    cached_tokens=min(self.cached_tokens, len(request.prompt) - 1),
                    accepted_draft_tokens=self.drafts[0],
                    rejected_draft_tokens=self.drafts[1],
                ),
                timings=timings,
                verdict=verdict,
            )
        )


def let_a_deadline_pass(client: Client, engine: FakeEngine, request_id: str) -> int:
    """
    A request that the engine has, and whose deadline passes while it does nothing.

    On a slow machine a deadline may pass before the call is read; then a longer one is tried.

    Returns:
        How many calls it took.
    """
    timeout = 0.3
    for calls in itertools.count(1):
        with pytest.raises(ServerError) as error:
            client.complete("hi", timeout=timeout, request_id=request_id)
        assert error.value.code == "DEADLINE_EXCEEDED"
        with engine.changed:
            if engine.changed.wait_for(lambda: request_id in engine.cancelled, timeout):
                return calls
        timeout *= 2
        assert timeout < PATIENCE, "no call reached the engine, or none is cancelled"
    raise AssertionError
