"""How well the simulator predicts the engine: `jaxserve bench fidelity`.

Serves some loads and records them (`--config.engine.record`), each several times, in turns, so that
drift of the machine affects all of them. Then each recorded load is simulated with the same policy,
limits, block pool and arrivals, on a system fitted to the steps of all the *other* loads: no load
is predicted from its own times, just as for a policy that has not served yet. Medians are compared
(InferMax section 4.7), with the machine's own scatter, which no prediction can beat. --config may
name several files, separated by commas.

The last load is of conversations. With cache.prefix_caching each turn finds the previous one,
served and simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.bench import load_target
from jaxserve.bench.command import BenchParser, on_machine, served_by
from jaxserve.command_line import print_result
from jaxserve.commands.profile import build, host_ms
from jaxserve.config import Config
from jaxserve.machine import machine, versions
from jaxserve.simulator import replay
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.workloads.prefixes import NO_PREFIX, Prefixes
from jaxserve.simulator.workloads.workload import (
    Lengths,
    Workload,
    all_at_once,
    fixed_lengths,
    poisson_arrivals,
)
from jaxserve_lab.bench.interleaved import RECORD_MIB, check_unrecorded

MEASURES = {
    "total_s": "total, s",
    "ttft_mean_s": "TTFT, mean, s",
    "ttft_p50_s": "TTFT, P50, s",
    "ttft_p90_s": "TTFT, P90, s",
    "ttft_p99_s": "TTFT, P99, s",
    "tbt_mean_s": "TBT, mean, s",
    "tbt_p50_s": "TBT, P50, s",
    "tbt_p90_s": "TBT, P90, s",
    "tbt_p99_s": "TBT, P99, s",
}
MEAN_TARGETS = {name: 0.03 if name == "total_s" else 0.08 for name in MEASURES}
WORST_TARGETS = {"total_s": 0.08}
MET, WITHIN, MISSED = "met", "within the scatter", "missed"
LEVELS = (50, 90, 99)  # percentiles
SHARE = 0.7  # of the engine's capacity, requests/s
TURNS, FASTER = 4, 4.0  # turns; factor on the online rate, since answers are shorter


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with each file's configuration in `configs`; argparse
    exits for --help. Raises UsageError or ConfigError."""
    parser = BenchParser("fidelity", description=__doc__)
    parser.number("num_requests", 32, "requests of each load")
    parser.number("rate", None, "requests/s of the online load (70%% of the capacity)", least=None)
    parser.number("repeats", 3, "times that each load is served; the median counts")
    parser.number("seed", 0, "of prompts, lengths and arrivals", least=0)
    args, rest = parser.parse_known_args(argv)
    parser.check(args)
    configs = [flag for flag in rest if flag.startswith("--config=")]
    others = [flag for flag in rest if flag not in configs]
    files = configs[-1].removeprefix("--config=").split(",") if configs else []
    models = [[f"--config={file}", *others] for file in files] or [others]
    args.configs = [parser.read_config(flags) for flags in models]
    for config in args.configs:
        check_unrecorded(config, "fidelity")
    return args


def show(args: argparse.Namespace) -> int:
    """Measures all models and prints; returns the exit code. Raises like `run`."""
    asked = {name: getattr(args, name) for name in ("num_requests", "rate", "seed", "repeats")}
    results = [run(config, **asked) for config in args.configs]
    shown = "\n\n".join(text(result) for result in results)
    print_result(args, shown, {"command": "fidelity", "models": results})
    return 0


@dataclass(frozen=True)
class Load:
    """A workload with a name."""

    name: str
    workload: Workload


def offline(num_requests: int, max_len: int, seed: int) -> list[Load]:
    """Five loads of different lengths, as shares of max_len, the longest request. All
    requests arrive at once. The last load has mixed lengths."""

    def of(arrival: np.ndarray, lengths: Lengths) -> Workload:
        # In a server a request writes max_tokens.
        return Workload.create(arrival, lengths, limit=lengths.output_len)

    shapes = {
        "short in, short out": (0.05, 0.10),
        "short in, long out": (0.05, 0.40),
        "long in, short out": (0.40, 0.10),
        "long in, long out": (0.40, 0.40),
    }
    found = [
        Load(
            name,
            of(
                all_at_once(num_requests),
                fixed_lengths(max(1, int(i * max_len)), max(2, int(o * max_len)), num_requests),
            ),
        )
        for name, (i, o) in shapes.items()
    ]
    rng = np.random.default_rng((seed, 3))
    top = max(3, int(0.45 * max_len))
    mixed = Lengths(rng.integers(1, top, num_requests), rng.integers(2, top, num_requests))
    return [*found, Load("mixed lengths", of(all_at_once(num_requests), mixed))]


def online(mixed: Workload, rate: float, seed: int) -> Load:
    """The same requests, with Poisson arrivals at `rate` requests/s."""
    arrival = poisson_arrivals(rate, len(mixed), np.random.default_rng((seed, 4)))
    workload = dataclasses.replace(mixed, arrival=arrival)
    return Load(f"mixed, {rate:g} requests/s", workload)


def conversations(num_requests: int, max_len: int, rate: float, seed: int) -> Load:
    """Conversations of TURNS with one system prompt. Each turn's prompt is the previous prompt, its
    answer, and a new message; answers are as long as messages.

    Args:
        num_requests: Number of requests.
        max_len: Tokens of the longest request; lengths are shares of it.
        rate: Requests/s.
        seed: Seed of the arrivals.
    """
    number, sessions = np.arange(num_requests), -(-num_requests // TURNS)
    system, new = max(1, max_len // 10), max(2, max_len // 20)
    turn = number // sessions
    before = system + turn * 2 * new  # each answer is as long as its question
    lengths = Lengths(before + new, np.full(num_requests, new))
    first = np.where(number > 0, 0, NO_PREFIX)
    prefixes = Prefixes(np.where(turn > 0, number - sessions, first), before * (number > 0))
    arrival = poisson_arrivals(rate, num_requests, np.random.default_rng((seed, 5)))
    workload = Workload.create(arrival, lengths, limit=lengths.output_len, prefixes=prefixes)
    return Load(f"chats, {rate:g} requests/s", workload)


def run(
    config: Config, *, num_requests: int, rate: float | None, seed: int, repeats: int
) -> dict[str, Any]:
    """Serves a model's loads, simulates each from the recording, and compares.

    Args:
        config: The engine's configuration.
        num_requests: Requests of each load.
        rate: Requests/s of the online load; None for SHARE of the engine's capacity.
        seed: Seed of prompts, lengths and arrivals.
        repeats: How often each load is served.

    Returns:
        The JSON object of the model.

    Raises:
        ConfigError, WorkloadError, BenchError, RecordingError: The model cannot be measured.
    """
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "served.jsonl"
        names, info = _serve(config, path, num_requests, rate, seed, repeats)
        recording = replay.read(path)
    if recording.notes:
        raise load_target.BenchError(f"the recording is not complete: {recording.notes[0]}")
    parts = [
        [(1 + r * len(names) + i) * num_requests for r in range(repeats)]  # after the warm-up
        for i in range(len(names))
    ]
    rows = [
        _compare(name, recording, [(first, first + num_requests) for first in firsts])
        for name, firsts in zip(names, parts, strict=True)
    ]
    return {
        "command": "fidelity",
        "loads": rows,
        "summary": _summary(rows),
        "steps": len(recording.steps),
        "model": info,
        "config": config.as_dict(),
        "machine": where,
        "versions": versions(),
    }


def _serve(
    config: Config, path: Path, num_requests: int, rate: float | None, seed: int, repeats: int
) -> tuple[list[str], dict[str, Any]]:
    """Serves the mixed load once, to warm up, then records all loads, `repeats` times. Returns
    their names, and a description of the engine."""
    show = sys.stderr.isatty()
    config = config.with_fields(
        scheduler__max_queue=max(config.scheduler.max_queue, num_requests),
        engine__record=str(path),
        engine__record_mib=RECORD_MIB,
    )
    engine = build(config, progress=show)
    try:
        engine.start()
        target = load_target.EngineTarget(engine)
        info = target.info()
        longest = min(info["max_model_len"], info["pool_tokens"])
        every = offline(num_requests, longest, seed)
        for load in every:
            load_target.check_fits(load.workload, info)
        start, records = load_target.serve_all(
            target, every[-1].workload, np.random.default_rng(seed)
        )
        took = load_target.last_token(records) - start
        rate = rate or float(f"{SHARE * num_requests / took:.2g}")
        every.append(online(every[-1].workload, rate, seed))
        every.append(conversations(num_requests, longest, FASTER * rate, seed))
        turns = [load for _ in range(repeats) for load in every]
        for turn, load in enumerate(tqdm(turns, desc="serving", unit="load", disable=not show)):
            # New tokens each time, so that no earlier prefix is found.
            load_target.serve_all(target, load.workload, np.random.default_rng((seed, turn)))
    finally:
        engine.stop()
    return [load.name for load in every], info


def _compare(name: str, recording: Recording, parts: list[tuple[int, int]]) -> dict[str, Any]:
    """Compares one load. parts: the range of requests of each time that it was served."""
    own = np.any([recording.within(*part) for part in parts], axis=0)
    others = dataclasses.replace(recording, steps=recording.steps.select(~own))
    system = replay.system_of(others)
    served = [recording.part(*part) for part in parts]
    found = [_measures(replay.served(part)) for part in served]
    # Step times are drawn again each time.
    again = [replay.again(part, system, seed=seed) for seed, part in enumerate(served)]
    predicted = _medians([_measures(run) for run in again])
    measured = _medians(found)
    spread = {m: float(np.ptp([run[m] for run in found])) for m in MEASURES}
    error = {m: abs(predicted[m] - measured[m]) / measured[m] for m in MEASURES}
    scatter = {m: spread[m] / 2 / measured[m] for m in MEASURES}
    return {
        "load": name,
        "predicted": predicted,
        "measured": measured,
        "repeats": found,
        "error": error,
        "scatter": scatter,
        "verdict": {m: _verdict(error[m], _of_one(m), scatter[m]) for m in MEASURES},
        "steps": int(np.count_nonzero(own)),
        "system": system.about | {"host_ms": host_ms(system.host)},
    }


def _measures(result: SimulationResult) -> dict[str, float]:
    """MEASURES of a run."""
    requests = result.requests
    ttft, (tbt, _) = requests.ttft, requests.tbt
    measures = {"total_s": float(requests.finish.max() - requests.arrival[0])}
    for name, values in (("ttft", ttft), ("tbt", tbt)):
        measures[f"{name}_mean_s"] = float(values.mean())
        for level in LEVELS:
            measures[f"{name}_p{level}_s"] = float(np.percentile(values, level))
    return measures


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {m: float(np.median([run[m] for run in runs])) for m in MEASURES}


def _of_one(measure: str) -> float:
    """The target of a single load."""
    return WORST_TARGETS.get(measure, MEAN_TARGETS[measure])


def _verdict(error: float, target: float, scatter: float) -> str:
    """MET, WITHIN or MISSED: no prediction can be better than the machine's scatter."""
    if error <= target:
        return MET
    return WITHIN if error <= scatter else MISSED


def _summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By measure: its error and its scatter over the loads, and whether the targets are met. If the
    scatter is larger than a target, the error has to be within the scatter."""
    summary = {}
    for name, target in MEAN_TARGETS.items():
        errors, scatter = (
            np.array([row[what][name] for row in rows]) for what in ("error", "scatter")
        )
        verdicts = [_verdict(errors.mean(), target, scatter.mean())]
        worst = WORST_TARGETS.get(name)
        if worst is not None:
            verdicts += [
                _verdict(*triple)
                for triple in zip(errors, [worst] * len(errors), scatter, strict=True)
            ]
        summary[name] = {
            "mean_error": float(errors.mean()),
            "worst_error": float(errors.max()),
            "mean_scatter": float(scatter.mean()),
            "mean_target": target,
            "worst_target": worst,
            "verdict": next(v for v in (MISSED, WITHIN, MET) if v in verdicts),
        }
    return summary


def text(result: dict[str, Any]) -> str:
    """The comparison as text."""
    lines = [
        f"fidelity: {served_by(result)}, policy {result['model']['policy']}; "
        f"{result['steps']} steps",
        on_machine(result),
        f"  {'load':<22} {'':<14} {'predicted':>10} {'measured':>10} {'error':>7} {'scatter':>8}",
    ]
    for row in result["loads"]:
        for number, (m, shown) in enumerate(MEASURES.items()):
            values = f"{row['predicted'][m]:>10.4f} {row['measured'][m]:>10.4f}"
            errors = f"{row['error'][m]:>7.1%} {row['scatter'][m]:>8.1%}"
            name = "" if number else row["load"]
            lines.append(f"  {name:<22} {shown:<14} {values} {errors}{_told(row['verdict'][m])}")
    lines.append(
        f"  {'all loads':<22} {'':<14} {'mean error':>10} {'target':>10} {'worst':>7} "
        f"{'target':>8} {'scatter':>8}"
    )
    for m, shown in MEASURES.items():
        total = result["summary"][m]
        worst = "-" if total["worst_target"] is None else f"{total['worst_target']:.0%}"
        lines.append(
            f"  {'':<22} {shown:<14} {total['mean_error']:>10.1%} {total['mean_target']:>10.0%} "
            f"{total['worst_error']:>7.1%} {worst:>8} {total['mean_scatter']:>8.1%}"
            f"{_told(total['verdict'])}"
        )
    return "\n".join(lines)


def _told(verdict: str) -> str:
    return "" if verdict == MET else f"  {verdict}"
