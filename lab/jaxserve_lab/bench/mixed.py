"""Real-time requests with a best-effort batch, served under several policies, and simulated.

    jaxserve bench mixed
    jaxserve bench mixed --policies=bros,vllm --rate=20 --repeats=1 --json

Each policy has its own engine with the same small pool. A batch of best-effort requests is
submitted at the start, and real-time requests arrive at random times, until both are done; the
policies take turns, so that drift of the machine affects all of them. Everything is recorded, and
each recording is simulated with its policy, limits and pool, on a system fitted to the other turns'
steps (to its own, if there are none): the line below the served one. Numbers are medians over the
turns.

Lengths are those of the paper (BROS section 7.1: ShareGPT's for real-time requests, 512 to 1024 in
and 32 to 128 out for best-effort ones) divided by --scale. The targets, 400 and 200 ms in the
paper, are adapted to the model in the box on a CPU; a target for the time between tokens is for the
mean over a request. Flags of serve.py work too: --config=, --config.cache.num_blocks=, ...
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.command import on_machine, served_by
from jaxserve.bench.load_target import EngineTarget, serve_all
from jaxserve.config import Config
from jaxserve.engine.stats import StepRecorder, StepStats
from jaxserve.sched.request import Tier
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator import replay
from jaxserve.simulator.group_table import aligned
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.workloads.lengths import sampler
from jaxserve.simulator.workloads.workload import Lengths, Workload, poisson_arrivals
from jaxserve_lab.bench import interleaved

POLICIES = ("bros", "round_robin", "vllm", "priority")
BATCH_PROMPT, BATCH_OUTPUT = (512, 1024), (32, 128)  # tokens, before scaling
NUM_BLOCKS, LONGEST = 128, 384  # the pool's; tokens of a request
MEASURES = {
    "normalised_ms": ("ms per token", "{:.2f}"),
    "ttft_attained": ("of TTFT", "{:.1%}"),
    "tpot_attained": ("of TPOT", "{:.1%}"),
    "ttft_p99_ms": ("TTFT P99, ms", "{:.0f}"),
    "tbt_p99_ms": ("TBT P99, ms", "{:.1f}"),
    "batch_tokens_per_s": ("batch tokens/s", "{:.0f}"),
    "lengthened_steps": ("steps lengthened", "{:.0f}"),
    "lengthened_s": ("by s", "{:.2f}"),
    "preemptions": ("preemptions", "{:.0f}"),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with the configuration as `config`; argparse exits for
    --help. Raises UsageError or ConfigError."""
    parser = interleaved.TurnsParser("mixed", __doc__, POLICIES)
    parser.number("rate", 16.0, "real-time requests/s", least=None)
    parser.number("num_requests", 120, "real-time requests")
    parser.number("batch", 250, "best-effort requests")
    parser.number("scale", 4.0, "divisor of the paper's lengths", least=None)
    parser.number("ttft_ms", 100.0, "target of real-time requests for the first token", least=None)
    parser.number("tbt_ms", 25.0, "their target for the mean time between tokens", least=None)
    parser.number("repeats", 3, "turns; medians count")
    parser.number("seed", 0, "of lengths, arrivals and prompts", least=0)
    return parser.parse(argv)


def workload(args: argparse.Namespace, turn: int) -> Workload:
    """The workload of a turn, the same under every policy. No prompt takes more than two thirds of
    the longest request, and no output more than one third."""
    rng, longest = np.random.default_rng((args.seed, turn)), _longest(args.config)
    realtime = sampler("sharegpt")(args.num_requests, rng)
    asked = (
        (realtime.prompt_len, BATCH_PROMPT, 2 * longest // 3),
        (realtime.output_len, BATCH_OUTPUT, longest // 3),
    )
    prompt, output = (
        np.clip(
            np.concatenate([drawn, rng.integers(*bounds, args.batch, endpoint=True)]) / args.scale,
            2,
            most,
        ).astype(np.int64)
        for drawn, bounds, most in asked
    )
    arrival = poisson_arrivals(args.rate, args.num_requests, rng)
    return _in_order(prompt, output, np.append(arrival, np.zeros(args.batch)), args)


def _in_order(
    prompt: np.ndarray, output: np.ndarray, due: np.ndarray, args: argparse.Namespace
) -> Workload:
    """Real-time requests come first in the arrays."""
    count = args.num_requests + args.batch
    realtime = np.arange(count) < args.num_requests
    terms = dataclasses.replace(
        SloColumns.none(count),
        tier=np.where(realtime, Tier.REALTIME, Tier.BEST_EFFORT).astype(np.int8),
        ttft=np.where(realtime, args.ttft_ms / 1e3, np.inf),
        tbt=np.where(realtime, args.tbt_ms / 1e3, np.inf),
    )
    order = np.argsort(due, kind="stable")
    both = Lengths(prompt[order], output[order])
    return Workload.create(due[order], both, limit=both.output_len, terms=terms.select(order))


def show(args: argparse.Namespace) -> int:
    """Serves, simulates and prints; returns the exit code. Raises ConfigError, BenchError,
    WorkloadError and RecordingError."""
    return interleaved.show(args, _measure, text)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    loads = [workload(args, turn) for turn in range(args.repeats)]
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{i}.jsonl" for i, name in enumerate(args.policies)}
        steps, model = _serve(args, loads, paths)
        result = {
            name: _compare(replay.read(path), steps[name], args) for name, path in paths.items()
        }
    return {"policies": result, "model": model}


def _longest(config: Config) -> int:
    return int(config.engine.max_model_len or LONGEST)


def _serve(
    args: argparse.Namespace, loads: list[Workload], paths: Mapping[str, Path]
) -> tuple[dict[str, list[list[StepStats]]], dict[str, Any]]:
    """Records all turns of all policies. Returns the steps of each turn, by policy, and a
    description of the engines."""
    steps: dict[str, list[list[StepStats]]] = {name: [] for name in args.policies}
    size = {"requests": len(loads[0]), "longest": LONGEST, "num_blocks": NUM_BLOCKS}
    configs = {
        name: interleaved.configured(args.config, name, path, **size)
        for name, path in paths.items()
    }
    with interleaved.engines(configs, loads, args.seed) as serving:
        recorders = {name: StepRecorder() for name in serving}
        for name, engine in serving.items():
            engine.add_observer(recorders[name])
            info = EngineTarget(engine).info()
        for turn, name in interleaved.in_turns(args.policies, args.repeats):
            recorders[name].steps = []
            rng = np.random.default_rng(args.seed)
            serve_all(EngineTarget(serving[name]), loads[turn], rng)
            steps[name].append(recorders[name].steps)
    return steps, info


def _compare(
    recording: Recording, steps: list[list[StepStats]], args: argparse.Namespace
) -> dict[str, Any]:
    """One policy: medians of the served and predicted measures, and each turn's. steps: each
    turn's."""
    count = args.num_requests + args.batch
    turns: dict[str, list[dict[str, float]]] = {"served": [], "simulated": []}
    for turn, taken in enumerate(steps):
        first = interleaved.WARM_UP + turn * count
        part, predicted = interleaved.again(recording, first, count, own_steps=args.repeats == 1)
        assert predicted.lengthening is not None
        longer = np.array([measured.lengthening for measured in taken])
        turns["served"].append(_measures(replay.served(part), longer))
        turns["simulated"].append(_measures(predicted, predicted.lengthening))
    medians = {
        kind: {m: float(np.median([measured[m] for measured in results])) for m in MEASURES}
        for kind, results in turns.items()
    }
    return {**medians, "turns": turns}


def _measures(result: SimulationResult, lengthening: np.ndarray) -> dict[str, float]:
    """MEASURES of a turn: of the real-time requests, then of the batch: its tokens up to its last
    one, and its cost. lengthening: of each step, see `sched.tiers`."""
    terms = result.requests.workload.terms
    realtime = terms.tier == Tier.REALTIME
    mine, batch = result.requests.times.select(realtime), result.requests.times.select(~realtime)
    asked = terms.select(realtime)
    several = mine.tokens > 1
    tpot = (mine.e2e - mine.ttft)[several] / (mine.tokens[several] - 1)
    tbt, _ = mine.tbt
    until = float(batch.token_times.max() - batch.due.min())
    return {
        "normalised_ms": float(mine.normalised_latency.mean()) * 1e3,
        "ttft_attained": float((mine.ttft <= asked.ttft).mean()),
        "tpot_attained": float((tpot <= asked.tbt[several]).mean()) if several.any() else 1.0,
        "ttft_p99_ms": float(np.percentile(mine.ttft, 99)) * 1e3,
        "tbt_p99_ms": float(np.percentile(tbt, 99)) * 1e3 if len(tbt) else 0.0,
        "batch_tokens_per_s": len(batch.token_times) / until,
        "lengthened_steps": int(np.count_nonzero(lengthening)),
        "lengthened_s": float(lengthening.sum()),
        "preemptions": int(result.batches.preemptions.sum()),
    }


def text(result: dict[str, Any]) -> str:
    """A table with two lines for each policy."""
    asked = result["workload"]
    rows = [["", "", *(name for name, _ in MEASURES.values())]]
    for policy, kinds in result["policies"].items():
        for kind in ("served", "simulated"):
            cells = [form.format(kinds[kind][m]) for m, (_, form) in MEASURES.items()]
            rows.append([policy if kind == "served" else "", kind, *cells])
    head = [
        f"mixed: {served_by(result)}, {asked['num_requests']} real-time requests at "
        f"{asked['rate']:g}/s with targets of {asked['ttft_ms']:g} and {asked['tbt_ms']:g} ms, "
        f"over a batch of {asked['batch']}; medians of {asked['repeats']}",
        on_machine(result),
    ]
    return "\n".join([*head, aligned(rows)])
