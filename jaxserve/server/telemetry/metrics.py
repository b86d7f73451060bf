"""Prometheus metrics of one engine.

Names and meanings follow vLLM's metrics if there is an equivalent (`jaxserve:` for their `vllm:`),
so that dashboards carry over. The exception is their histogram `iteration_tokens_total`: here only
counters have names in `_total`, as in OpenMetrics. `finished_reason` has their values too ("abort"
for a cancelled request). An observation costs the engine's thread about a microsecond: the counters
are plain, and the scraper reads them without a lock, so it may see a histogram's sum one
observation ahead of its count.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jaxserve.engine.output import FinishReason
from jaxserve.engine.stats import EngineStats, Observer, RequestStats, StepStats
from jaxserve.sched.programs.program_table import ProgramCall
from jaxserve.sched.programs.verdict import OUTCOMES, ProgramEnd, ProgramVerdict
from jaxserve.sched.request import NO_CLASS, Request, Tier
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.requests.call_outcome import CallTracker
from jaxserve.server.requests.engine_client import EngineClient

PREFIX = "jaxserve:"
READER: ContextVar[Caller | None] = ContextVar("READER", default=None)
"""The caller that scrapes. It sees only the names of adapters that it may use; None sees all."""
ADAPTER_LABELS = ("running_lora_adapters", "waiting_lora_adapters")
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_SHORT = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LONG = (0.01, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKENS = tuple(float(2**exponent) for exponent in range(18))
_LATENCIES = {  # by what is timed: the histogram's name and help
    "ttft": ("time_to_first_token_seconds", "Arrival to first token."),
    "tbt": ("inter_token_latency_seconds", "Between two tokens of a continuation."),
    "e2e": ("e2e_request_latency_seconds", "Arrival to last token."),
    "preprocess_time": ("request_preprocess_time_seconds", "Arrival to the engine's queue."),
    "queue_time": ("request_queue_time_seconds", "In the engine's queue, to first scheduled."),
}
_SIZES = {  # by field of StepStats, RequestStats or ProgramVerdict: name, help and bounds
    "step_time": ("step_time_seconds", "A batch, launch to tokens on the host.", _SHORT),
    "device_time": ("device_time_seconds", "A batch, on the device.", _SHORT),
    "predicted_time": ("predicted_time_seconds", "The same, as predicted.", _SHORT),
    "host_time": ("host_time_seconds", "Host work of a batch, hidden or not.", _SHORT),
    "num_tokens": ("iteration_tokens", "Tokens of a batch, without padding.", _TOKENS),
    "prompt_tokens": ("request_prompt_tokens", "Prompt length of a finished one.", _TOKENS),
    "output_tokens": ("request_generation_tokens", "Its output length.", _TOKENS),
    "took": ("program_seconds", "First call to the end of the last, of an ended program.", _LONG),
    "calls": ("program_calls", "Its calls.", _TOKENS),
}
_PAUSES = "program_pause_seconds", "Between a program's calls, by tool; of people without a name."
MOST_TOOLS = 64
"""Tools with pauses of their own, at most a quarter of them of one API key."""
SEVERAL, OTHER = "several", "other"
_OF_A_STEP = ("step_time", "device_time", "predicted_time", "host_time", "num_tokens")
_SUMS = {  # over all steps, by name
    "prompt_tokens": "Prompt tokens computed, each counted once.",
    "recomputed_tokens": (
        "Tokens computed again because a preemption had taken them from the cache."
    ),
    "padding_tokens": "Padding that batches carried.",
    "lengthened_steps": "Batches predicted to take longer than their real-time requests alone.",
    "lengthened_seconds": "By how much longer, all told.",
}
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


def seen_adapters(names: Iterable[str], may_see: Callable[[str], bool]) -> str:
    """The adapters that the caller may see, as a label's value."""
    return ",".join(filter(may_see, names))


class Histogram:
    """Counts of values up to each bound, and their sum. One writer, any number of readers.

    bounds: ascending, in the unit of the values; one more bucket takes values above the last bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value in the first bucket with a bound of at least the value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @classmethod
    def merged(cls, parts: Sequence[Histogram]) -> Histogram:
        """The values of all of these, which have the same bounds."""
        found = cls(parts[0]._bounds)
        found._counts = [sum(counts) for counts in zip(*(p._counts for p in parts), strict=True)]
        found._sum = sum(part._sum for part in parts)
        return found

    def count(self) -> int:
        """Values observed so far."""
        return sum(self._counts)

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, number of values up to it) for each bound and +Inf; and the sum of the
        values."""
        counts, total = list(self._counts), self._sum
        pairs, running = [], 0.0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs, total


class EngineMetrics(Collector, Observer):
    """Observer of the engine (its thread writes) and collector for Prometheus (a scrape reads)."""

    def __init__(self, engine: EngineClient, tracker: CallTracker) -> None:
        self._engine, self._tracker = engine, tracker
        self._info = engine.info()
        self._model = self._info.model
        self._times = {(of, tier): Histogram(_LATENCY) for of in _LATENCIES for tier in Tier}
        self._sizes = {of: Histogram(bounds) for of, (_, _, bounds) in _SIZES.items()}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._finished: defaultdict[FinishReason, int] = defaultdict(int)
        # (class, tier, target, met) -> continuations
        self._judged: defaultdict[tuple[str, Tier, str, bool], int] = defaultdict(int)
        # Drafted tokens by drafter: right, and wrong.
        self._accepted, self._rejected = Counter[str](), Counter[str]()
        self._given_up: defaultdict[tuple[str, str], int] = defaultdict(int)  # by class and tier
        self._programs = Counter[tuple[str, str, str]]()  # by class, ending and outcome
        # By tenant and tool. People have no name, and no tenant.
        self._pauses = {("", ""): Histogram(_LONG)}

    def on_step(self, stats: StepStats) -> None:
        """Counts a step's times, tokens and padding."""
        for of in _OF_A_STEP:
            self._sizes[of].observe(getattr(stats, of))
        self._sums["prompt_tokens"] += stats.num_prefill_tokens
        self._sums["recomputed_tokens"] += stats.num_recomputed_tokens
        self._sums["padding_tokens"] += stats.padded_tokens - stats.num_tokens
        self._sums["lengthened_steps"] += stats.lengthening > 0
        self._sums["lengthened_seconds"] += stats.lengthening
        self._accepted.update(stats.accepted)
        self._rejected.update(stats.rejected)

    def on_given_up(self, request: Request) -> None:
        """Counts the request by class and tier."""
        self._given_up[request.slo_class, request.tier.name.lower()] += 1

    def on_first_token(self, ttft: float, tier: Tier) -> None:
        """ttft: seconds from arrival."""
        self._times["ttft", tier].observe(ttft)

    def on_inter_token(self, tbt: float, tier: Tier) -> None:
        """tbt: seconds since the token before."""
        self._times["tbt", tier].observe(tbt)

    def on_finish(self, stats: RequestStats) -> None:
        """Counts why the continuation ended, its times and its lengths."""
        self._finished[stats.finish_reason] += 1
        for of in ("e2e", "preprocess_time", "queue_time"):
            self._times[of, stats.tier].observe(getattr(stats, of))
        for of in ("prompt_tokens", "output_tokens"):
            self._sizes[of].observe(getattr(stats, of))
        verdict = stats.verdict
        if verdict is not None:
            about = verdict.slo_class, verdict.tier
            self._judged[*about, "all", verdict.met] += 1
            for target in ALL_TARGETS:
                met = getattr(verdict, target)
                if met is not None:
                    self._judged[*about, target, met] += 1

    def on_program(self, verdict: ProgramVerdict) -> None:
        """Counts the program by its class, why it ended and what came of it."""
        self._programs[verdict.slo_class, str(verdict.end), verdict.outcome] += 1
        self._sizes["took"].observe(verdict.took)
        self._sizes["calls"].observe(verdict.calls)

    def on_program_call(self, number: int, call: ProgramCall) -> None:
        """Counts the pause before the call by its tool."""
        if call.pause is None:
            return
        tool = SEVERAL if len(call.tools) > 1 else next(iter(call.tools), "")
        of = (call.tenant, tool) if tool not in ("", SEVERAL) else ("", tool)
        if of not in self._pauses:
            mine = sum(tenant == of[0] for tenant, _ in self._pauses)
            if len(self._pauses) >= MOST_TOOLS or (of[0] and mine >= MOST_TOOLS // 4):
                of = "", OTHER
        self._pauses.setdefault(of, Histogram(_LONG)).observe(call.pause)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask the engine for a snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of a scrape: gauges of the moment, counters and histograms since the
        start."""
        yield from self._snapshot()
        yield from self._counters()
        yield from self._histograms()

    def _snapshot(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._live()
        text = "Programs in progress, by whether a call of theirs runs."
        programs = {("running",): stats.programs_running, ("waiting",): stats.programs_waiting}
        yield self._family(GaugeMetricFamily, "num_programs", text, programs, "state")
        text = "Share of pool blocks in use, 0 to 1."
        yield self._gauge("kv_cache_usage_perc", text, stats.kv_cache_usage)
        yield self._gauge("num_blocks", "Blocks of the pool.", stats.blocks_total)
        yield self._gauge("num_blocks_free", "Blocks in no use.", stats.blocks_free)
        yield self._cache_config()
        yield self._adapters()
        text = "Blocks in use, by what they cache and who fills them."
        blocks = dict(sorted(stats.blocks.items()))
        yield self._family(GaugeMetricFamily, "num_blocks_used", text, blocks, "kind", "tier")
        text = "Slots of host memory for caches; a token takes one, K and V take two."
        yield self._gauge("num_host_slots", text, stats.host_slots_total)
        text = "Slots of host memory that hold checkpoints."
        yield self._gauge("num_host_slots_used", text, stats.host_slots_used)
        text = "Slots copied to host memory."
        yield self._counter("checkpointed_slots", text, stats.slots_checkpointed)
        text = "Slots copied back."
        yield self._counter("restored_slots", text, stats.slots_restored)
        text = "Preempted requests that are recomputed because host memory had no room for them."
        yield self._counter("host_memory_full", text, stats.host_full)
        text = "Mean relative error of the predicted batch times lately."
        yield self._gauge("step_time_error", text, stats.step_time_error)
        text = "Requests that lost their blocks to others."
        yield self._counter("num_preemptions", text, stats.preemptions)
        text = "Prompt tokens of started requests that may find some of them computed."
        yield self._tiers("prefix_cache_queries", text, stats.prefix_cache_queries)
        text = "Those of them that were found."
        yield self._tiers("prefix_cache_hits", text, stats.prefix_cache_hits)
        text = "Those of these that were found in host memory, and copied back."
        yield self._tiers("prefix_cache_host_hits", text, stats.prefix_cache_host_hits)
        text = "Tokens in host memory that may be found there."
        yield self._gauge("prefix_cache_host_tokens", text, stats.prefix_cache_host_tokens)
        text = "Tokens that can no longer be found, as others needed their room."
        yield self._counter("prefix_cache_evicted_tokens", text, stats.prefix_cache_evicted)
        text = "Until the first token of a prompt that came now."
        waits = {(tier,): seconds for tier, seconds in stats.expected_wait.items()}
        yield self._family(GaugeMetricFamily, "expected_wait_seconds", text, waits, "tier")
        text = "Compilations after warm-up; each one stalled every request."
        yield self._counter("compiles_after_warmup", text, stats.compiles_after_warmup)
        text = "Sizes of batches not compiled yet, or that failed to: larger ones serve."
        yield self._gauge("sizes_to_compile", text, stats.sizes_to_compile)
        yield self._counter("engine_steps", "Batches executed.", stats.steps)
        yield from self._failures(stats)

    def _failures(self, stats: EngineStats) -> Iterator[Metric]:
        text = "Continuations that ended alone for a failure of their own."
        yield self._counter("request_failures", text, stats.request_failures)
        text = "Those of them for which the model computed NaN or infinite numbers."
        yield self._counter("corrupted_requests", text, stats.corrupted_requests)
        yield self._counter(
            "grammar_breaches", "Texts whose grammar took too long.", stats.grammar_breaches
        )
        text = "Plans and batches that failed, and whose requests ended with them."
        yield self._counter("engine_step_failures", text, stats.step_failures)
        text = "Calls of the engine's observers, metrics and recordings among them, that raised."
        yield self._counter("observer_failures", text, stats.observer_failures)

    def _cache_config(self) -> Metric:
        """As in the Gateway API Inference Extension's model-server protocol (BlockSize and
        NumGPUBlocks). A block there holds both K and V of its tokens, so it is two of our
        `num_blocks`."""
        name, text = "cache_config_info", "Tokens of a block; such blocks of K and V in the pool."
        size = self._info.block_size
        values = (str(size), str(self._info.pool_tokens // size), str(self._info.prefix_caching))
        labels = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
        return self._family(GaugeMetricFamily, name, text, {values: 1}, *labels)

    def _adapters(self) -> Metric:
        """As in that protocol and in vLLM. Of several samples, the one with the largest value is
        the newest. A scrape has one sample, with at most max_lora names in each label."""
        name, text = (
            "lora_requests_info",
            "Adapters of requests that run and wait; when, in seconds.",
        )
        load, reader = self._engine.adapter_load(), READER.get()
        may_see = (lambda _: True) if reader is None else reader.may_use
        running, waiting = (seen_adapters(names, may_see) for names in (load.running, load.waiting))
        values = (str(load.max_loras), running, waiting)
        labels = ("max_lora", *ADAPTER_LABELS)
        return self._family(GaugeMetricFamily, name, text, {values: time.time()}, *labels)

    def _live(self) -> Metric:
        """There is a sample for requests without a class for each tier, even if it is 0."""
        name, text = "num_requests", "Continuations in the engine, by whether they hold cache."
        counts = {(NO_CLASS, tier.name.lower(), held): 0 for tier in Tier for held in (True, False)}
        counts.update(self._engine.live_counts())
        named = {
            (slo_class, tier, "running" if held else "waiting"): count
            for (slo_class, tier, held), count in sorted(counts.items())
        }
        return self._family(GaugeMetricFamily, name, text, named, "slo_class", "tier", "state")

    def _counters(self) -> Iterator[Metric]:
        for name, text in _SUMS.items():
            yield self._counter(name, text, self._sums[name])
        tokens = {t: self._times["ttft", t].count() + self._times["tbt", t].count() for t in Tier}
        yield self._counter("generation_tokens", "Tokens generated.", sum(tokens.values()))
        text = "Tokens generated for best-effort requests."
        yield self._counter("best_effort_tokens", text, tokens[Tier.BEST_EFFORT])
        text = "Finished continuations, cancelled and failed ones too, by why they ended."
        ended = {(label,): self._finished.get(reason, 0) for reason, label in _REASONS.items()}
        yield self._family(CounterMetricFamily, "request_success", text, ended, "finished_reason")
        yield from self._slo()
        text = "Programs that have ended, by why, and what came of their deadline."
        programs = {(NO_CLASS, str(end), what): 0 for end in ProgramEnd for what in OUTCOMES}
        programs.update(self._programs)
        labels = ("slo_class", "ending", "outcome")
        yield self._family(CounterMetricFamily, "programs", text, programs, *labels)
        yield from self._drafts()
        text = "API calls that have ended, by method and how."
        calls = self._tracker.counts
        yield self._family(CounterMetricFamily, "calls", text, calls, "method", "ending")
        text = "Lines of batches that the engine has served, by how they ended."
        lines = {(ending,): count for ending, count in self._tracker.lines.items()}
        yield self._family(CounterMetricFamily, "batch_lines", text, lines, "ending")
        text = "Calls that went on here after another replica, by why they moved."
        moved = {(why,): count for why, count in self._tracker.moved.items()}
        yield self._family(CounterMetricFamily, "moved_calls", text, moved, "why")

    def _drafts(self) -> Iterator[Metric]:
        """Has vLLM's names. Each accepted token has saved its request a step."""
        accepted, rejected = dict(self._accepted), dict(self._rejected)
        drafted = {
            (drafter,): accepted[drafter] + rejected.get(drafter, 0) for drafter in sorted(accepted)
        }
        right = {(drafter,): accepted[drafter] for drafter in sorted(accepted)}
        for name, text, counts in (
            ("spec_decode_num_draft_tokens", "Drafted tokens computed, by who drafts.", drafted),
            ("spec_decode_num_accepted_tokens", "Those that were right: steps saved.", right),
        ):
            yield self._family(CounterMetricFamily, name, text, counts, "drafter")

    def _slo(self) -> Iterator[Metric]:
        """Continuations that had targets, however they ended. Met and missed are both counted, so
        that ratios can be computed. Also continuations whose targets were given up before their
        end."""
        name, text = "slo_given_up", "Continuations whose targets the policy gave up."
        given_up = dict(self._given_up)
        yield self._family(CounterMetricFamily, name, text, given_up, "slo_class", "tier")
        judged = dict(self._judged)
        for name, did, met in (("slo_attained", "met", True), ("slo_missed", "missed", False)):
            text = f"Continuations with that target that {did} it."
            counts = {
                (slo_class, tier.name.lower(), target): judged.get(
                    (slo_class, tier, target, met), 0
                )
                for slo_class, tier, target in sorted({key[:3] for key in judged})
            }
            labels = ("slo_class", "tier", "target")
            yield self._family(CounterMetricFamily, name, text, counts, *labels)

    def _histograms(self) -> Iterator[Metric]:
        for of, (name, text) in _LATENCIES.items():
            by_tier = {(tier.name.lower(),): self._times[of, tier].cumulative() for tier in Tier}
            yield self._family(HistogramMetricFamily, name, text, by_tier, "tier")
        for of, (name, text, _) in _SIZES.items():
            values = {(): self._sizes[of].cumulative()}
            yield self._family(HistogramMetricFamily, name, text, values)
        yield self._pauses_seen()

    def _pauses_seen(self) -> Metric:
        """Pauses by tool. A caller sees only the names of its own tools."""
        reader, parts = READER.get(), dict[tuple[str], list[Histogram]]()
        for (tenant, tool), histogram in list(self._pauses.items()):
            hidden = tenant and reader is not None and tenant != reader.name and not reader.is_admin
            parts.setdefault((OTHER if hidden else tool,), []).append(histogram)
        values = {tool: Histogram.merged(of).cumulative() for tool, of in parts.items()}
        return self._family(HistogramMetricFamily, *_PAUSES, values, "tool")

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, {(): value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, {(): value})

    def _tiers(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        """A counter with every tier; 0 if nothing was counted."""
        values = {(tier.name.lower(),): counts.get(tier.name.lower(), 0) for tier in Tier}
        return self._family(CounterMetricFamily, name, text, values, "tier")

    def _family(
        self, kind: Any, name: str, text: str, values: Mapping[Any, Any], *labels: str
    ) -> Metric:
        """values: by the values of the labels; for a histogram, its buckets and its sum."""
        family: Metric = kind(PREFIX + name, text, labels=("model_name", *labels))
        for named, value in values.items():
            arguments = value if kind is HistogramMetricFamily else (value,)
            family.add_metric((self._model, *named), *arguments)  # type: ignore[attr-defined]
        return family


class MetricsRegistry:
    """The metrics of one engine. Each has its own registry, so that several can live in one
    process."""

    def __init__(self, engine: EngineClient, tracker: CallTracker) -> None:
        metrics = EngineMetrics(engine, tracker)
        self.registry = CollectorRegistry()
        self.registry.register(metrics)
        engine.add_observer(metrics)

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
