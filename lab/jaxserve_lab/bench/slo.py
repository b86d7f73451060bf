"""Requests of three SLO classes, served under several policies.

    jaxserve bench slo
    jaxserve bench slo --policies=accelgen:long=160,vllm --load=1.2 --repeats=1 --json

Each policy has its own engine with the same small pool, and they take turns, so that drift of the
machine affects all of them; each turn has new requests, the same for every policy. Everything is
recorded, and each turn is simulated with its policy, limits and pool, on a system fitted to
everything else that this engine served. Numbers are means over the turns with 95% confidence
intervals (Student's t).

The requests are AccelGen's mix (section 3.1: Alpaca, ShareGPT, and 35% from BookCorpus), with
lengths divided by --scale, and prompts from BookCorpus scaled so that the longest fits. Targets are
multiples of times on this machine, measured first with the fastest policy: of the request's own
prompt alone for its first token, of a decode step alone for the time between tokens, of both for
the whole. Classes are drawn independently of lengths. Requests arrive at --load times the highest
rate at which any of the policies serves the first turn's requests submitted at once.

Flags of serve.py work too: --config=, --config.cache.num_blocks=, ...
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench import runs
from jaxserve.bench.command import on_machine, served_by
from jaxserve.bench.load_target import EngineTarget, Target
from jaxserve.sched.slo.metrics import load_metrics
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator import replay
from jaxserve.simulator.group_table import group_lines
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.simulate import spread
from jaxserve.simulator.workloads.lengths import DATA_SETS, sampler
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, poisson_arrivals
from jaxserve_lab.bench import interleaved

POLICIES = ("goodput", "accelgen:long=160", "sarathi", "vllm", "edf")
MIX = {"alpaca": 0.325, "sharegpt": 0.325, "bookcorpus": 0.35}  # shares of the requests
DOCUMENTS = "bookcorpus"
NUM_BLOCKS, LONGEST = 256, 512  # blocks, for four of the longest requests; tokens of a request
SHORT, ALONE, OUTPUT = 16, 5, 32  # measured alone: a short prompt, repeats, output tokens


@dataclass(frozen=True)
class Multiples:
    """An SLO class of the workload.

    Attributes:
        share: Share of the requests.
        ttft, tbt, jct: Targets, as multiples of the request's times alone; None for no target.
    """

    share: float
    ttft: float | None = None
    tbt: float | None = None
    jct: float | None = None


CLASSES = {
    "interactive": Multiples(0.4, ttft=6.0, tbt=8.0),
    "standard": Multiples(0.3, ttft=15.0, tbt=20.0),
    "offline": Multiples(0.3, jct=8.0),
}


@dataclass(frozen=True)
class Alone:
    """Times of requests on an idle engine.

    Attributes:
        lengths: [2], prompt tokens of a short request and of the longest.
        ttft: [2], seconds to the first token of these prompts.
        tpot: Seconds of each token after the first.
    """

    lengths: tuple[int, int]
    ttft: tuple[float, float]
    tpot: float

    @classmethod
    def measured(cls, targets: Sequence[Target], longest: int, seed: int) -> Alone:
        """Measures medians of a few requests on each target, and takes the fastest target's.
        longest: tokens of the longest request."""
        lengths = (SHORT, longest - OUTPUT)
        results = [
            [runs.latency(target, ALONE, length, OUTPUT, seed) for target in targets]
            for length in lengths
        ]
        ttft, tpot = (
            [min(result[name]["median"] for result in same) / 1e3 for same in results]
            for name in ("ttft_ms", "tpot_ms")
        )
        return cls(lengths, (ttft[0], max(ttft)), statistics.mean(tpot))

    def prompts(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds to the first token of prompts of these lengths, interpolated linearly between the
        measured ones."""
        return np.interp(lengths, self.lengths, self.ttft)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with the configuration as `config`; argparse exits for
    --help. Raises UsageError or ConfigError."""
    parser = interleaved.TurnsParser("slo", __doc__, POLICIES)
    parser.number("load", 0.7, "requests/s, as a multiple of the measured capacity", least=None)
    parser.number("num_requests", 150, "requests of a turn", least=len(CLASSES))
    parser.number("scale", 4.0, "divisor of the lengths", least=None)
    parser.number("slo_scale", 1.0, "factor on the targets", least=None)
    parser.number("repeats", 3, "turns of each policy")
    parser.number("seed", 0, "of lengths, classes, arrivals and prompts", least=0)
    args = parser.parse(argv)
    args.longest = args.config.engine.max_model_len or LONGEST
    if args.longest < 2 * OUTPUT:
        limits = f"must be at least {2 * OUTPUT}, got {args.longest}"
        raise UsageError(f"--config.engine.max_model_len {limits}")
    return args


def lengths(args: argparse.Namespace, rng: np.random.Generator) -> Lengths:
    """Lengths of a turn's requests. Outputs take at most a third of the longest request, and
    prompts the rest."""
    names = list(MIX)
    choice = rng.choice(len(names), args.num_requests, p=list(MIX.values()))
    prompt, output = np.empty((2, args.num_requests))
    most_output = args.longest // 3
    for index, name in enumerate(names):
        drawn, mine = sampler(name)(args.num_requests, rng), choice == index
        scale = args.scale
        if name == DOCUMENTS:
            longest = args.longest - DATA_SETS[name].output.high / args.scale
            scale = max(scale, DATA_SETS[name].prompt.high / longest)
        prompt[mine] = (drawn.prompt_len / scale)[mine]
        output[mine] = (drawn.output_len / args.scale)[mine]
    out = np.clip(np.rint(output), 2, most_output).astype(np.int64)
    return Lengths(np.clip(np.rint(prompt), 2, args.longest - out).astype(np.int64), out)


def workload(args: argparse.Namespace, turn: int, alone: Alone, rate: float) -> Workload:
    """The workload of a turn, the same under every policy.

    Args:
        args: The command line's.
        turn: The turn's number; the seed depends on it.
        alone: The times of which targets are multiples.
        rate: Requests/s.
    """
    rng = np.random.default_rng((args.seed, turn))
    drawn = lengths(args, rng)
    arrival = poisson_arrivals(rate, args.num_requests, rng)
    shares = [class_.share for class_ in CLASSES.values()]
    slo_class = rng.choice(len(CLASSES), args.num_requests, p=shares)
    first = alone.prompts(drawn.prompt_len)
    units = {
        "ttft": first,
        "tbt": np.full(len(first), alone.tpot),
        "jct": first + (drawn.output_len - 1) * alone.tpot,
    }
    targets = {}
    for name, unit in units.items():
        multiples = np.array([getattr(class_, name) or np.inf for class_ in CLASSES.values()])
        targets[name] = args.slo_scale * multiples[slo_class] * unit
    plain = SloColumns.none(args.num_requests)
    terms = SloColumns(
        plain.tier,
        **targets,
        max_tbt=plain.max_tbt,
        slo_class=slo_class,
        greedy=plain.greedy,
        classes=(*CLASSES,),
    )
    return Workload.create(arrival, drawn, limit=drawn.output_len, terms=terms)


def show(args: argparse.Namespace) -> int:
    """Serves, simulates and prints; returns the exit code. Raises ConfigError, BenchError,
    WorkloadError and RecordingError."""
    return interleaved.show(args, _measure, text)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{i}.jsonl" for i, name in enumerate(args.policies)}
        measured = _serve(args, paths)
        served = measured.pop("served")
        policies = {
            name: {
                "served": _over_turns(turns),
                "simulated": _over_turns(_simulated(replay.read(paths[name]), args)),
            }
            for name, turns in served.items()
        }
    return {**measured, "policies": policies}


def _serve(args: argparse.Namespace, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Records all turns of all policies. `served` has the results, by policy."""
    size = {"requests": args.num_requests, "longest": LONGEST, "num_blocks": NUM_BLOCKS}
    configs = {
        name: interleaved.configured(args.config, name, path, **size)
        for name, path in paths.items()
    }
    waiting = lengths(args, np.random.default_rng((args.seed, 0)))
    at_once = Workload.create(all_at_once(len(waiting)), waiting, limit=waiting.output_len)
    served: dict[str, list[dict[str, Any]]] = {name: [] for name in args.policies}
    with interleaved.engines(configs, [at_once], args.seed) as serving:
        targets = {name: EngineTarget(engine) for name, engine in serving.items()}
        alone = Alone.measured(list(targets.values()), args.longest, args.seed)
        capacity = {
            name: runs.load(target, at_once, args.seed)["finished_per_s"]
            for name, target in targets.items()
        }
        rate = args.load * max(capacity.values())
        for turn, name in interleaved.in_turns(args.policies, args.repeats):
            load = workload(args, turn, alone, rate)
            served[name].append(runs.load(targets[name], load, args.seed + turn))
        info = targets[args.policies[0]].info()
    return {
        "alone_ms": {
            "ttft": {n: 1e3 * t for n, t in zip(alone.lengths, alone.ttft, strict=True)},
            "tpot": 1e3 * alone.tpot,
        },
        "requests_per_s": {"at_once": capacity, "offered": rate},
        "model": info,
        "served": served,
    }


def _simulated(recording: Recording, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulates each turn of one policy; results are like those of `runs.load`."""
    results = []
    before = interleaved.WARM_UP + 2 * ALONE + args.num_requests  # served before the first turn
    for turn in range(args.repeats):
        first = before + turn * args.num_requests
        _, result = interleaved.again(recording, first, args.num_requests, own_steps=False)
        requests = result.requests
        numbers = load_metrics(requests.times, requests.workload.terms)
        results.append({**numbers, "preemptions": int(requests.preemptions.sum())})
    return results


def _over_turns(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For one policy, the mean of each number, and half the width of its interval, None for one
    turn."""
    kept = [{k: v for k, v in turn.items() if k != "first_error"} for turn in turns]
    return {"mean": spread.mean(kept), "half_width": spread.half_width(kept), "turns": list(turns)}


def text(result: dict[str, Any]) -> str:
    """A table for each policy."""
    asked, alone = result["workload"], result["alone_ms"]
    prompts = ", ".join(f"{t:.1f} ms for {n} tokens" for n, t in alone["ttft"].items())
    lines = [
        f"slo: {served_by(result)}, {asked['num_requests']} requests per turn at "
        f"{result['requests_per_s']['offered']:.1f}/s, {asked['load']:g} of the capacity; means "
        f"of {asked['repeats']} turns ± half of their 95% intervals",
        on_machine(result),
        f"alone: first token {prompts}; then {alone['tpot']:.2f} ms per token",
    ]
    for policy, rows in result["policies"].items():
        at_once = result["requests_per_s"]["at_once"][policy]
        lines.append(f"{policy}: {at_once:.1f} requests/s all at once")
        for kind, numbers in rows.items():
            mean, width = numbers["mean"], numbers["half_width"]
            around = f" ±{width['output_tokens_per_s']:.0f}" if asked["repeats"] > 1 else ""
            lines.append(
                f"{kind}: {mean['output_tokens_per_s']:.0f}{around} tokens/s, "
                f"{mean['preemptions']:.0f} preemptions"
            )
            groups = (_with_all(mean, asked["num_requests"]), _with_all(width, None))
            lines += [f"  {line}" for line in group_lines(*groups)]
    return "\n".join(lines)


def _with_all(numbers: Mapping[str, Any], count: int | None) -> dict[str, Any]:
    """The classes, and all `count` requests as another class."""
    every = {**numbers, "requests": count}
    return {"tiers": {}, "classes": {**numbers["classes"], "all": every}}
