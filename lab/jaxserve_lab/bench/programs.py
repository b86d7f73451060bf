"""Programs, whose calls wait for each other, served under several policies.

    jaxserve bench programs
    jaxserve bench programs --policies=goodput,sarathi --lengths=closed-research --programs=8 --json

Each policy has its own engine with the same small pool, and they take turns, so that drift of the
machine affects all of them; each turn has new programs, the same for every policy, with --programs
in progress at a time. A call is sent when those that it waits for have ended, with the answers that
they were given. Everything is recorded, and each turn is simulated with its policy, limits and
pool, on a system fitted to everything else that this engine served: its programs begin when they
did, and its calls wait as they did. Numbers are means over the turns with 95% confidence intervals
(Student's t).

Lengths are divided by --scale, and the times of tools and people by --wait_scale. A program's
deadline is --deadline times what it takes on an idle engine: each call is priced by times measured
first, with the fastest policy, of prompts without what earlier calls of the program have cached,
and of a decode step.

Flags of serve.py work too: --config=, --config.cache.num_blocks=, ...
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench import runs
from jaxserve.bench.command import on_machine, served_by
from jaxserve.bench.load_target import EngineTarget
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator import replay
from jaxserve.simulator.group_table import aligned
from jaxserve.simulator.program_records import makespans_alone
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.simulate import spread
from jaxserve.simulator.workloads.closed_sessions import CLOSED_SESSIONS
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.bench import interleaved
from jaxserve_lab.bench.slo import ALONE, OUTPUT, Alone

POLICIES = ("goodput", "sarathi", "vllm", "edf")
NUM_BLOCKS, LONGEST = 512, 512  # blocks of the pool; tokens of a request
COLUMNS = {
    "in_time_per_s": ("in time/s", "{:.3f}"),
    "attainment": ("in time", "{:.1%}"),
    "makespan_s.mean": ("makespan, s", "{:.2f}"),
    "makespan_s.p95": ("P95, s", "{:.2f}"),
    "slowdown.mean": ("slowdown", "{:.2f}"),
    "slowdown.p95": ("P95", "{:.2f}"),
    "given_up": ("given up", "{:.0f}"),
    "calls": ("calls", "{:.0f}"),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with the configuration as `config`; argparse exits for
    --help. Raises UsageError or ConfigError."""
    parser = interleaved.TurnsParser("programs", __doc__, POLICIES)
    add = parser.add_argument
    add("--lengths", choices=tuple(CLOSED_SESSIONS), default="closed-agent", help="(%(default)s)")
    parser.number("programs", 24, "programs in progress at a time")
    parser.number("num_requests", 600, "calls of a turn, or a few more")
    parser.number("scale", 64.0, "divisor of the lengths", least=None)
    parser.number("wait_scale", 10.0, "divisor of the times of tools and people", least=None)
    parser.number("deadline", 2.0, "of a program, as a multiple of its time alone", least=None)
    parser.number("repeats", 3, "turns of each policy")
    parser.number("seed", 0, "of programs and prompts", least=0)
    args = parser.parse(argv)
    args.longest = args.config.engine.max_model_len or LONGEST
    if args.longest < 2 * OUTPUT:
        limits = f"must be at least {2 * OUTPUT}, got {args.longest}"
        raise UsageError(f"--config.engine.max_model_len {limits}")
    return args


def workload(args: argparse.Namespace, turn: int) -> Workload:
    """The programs of a turn, the same under every policy, without deadlines."""
    spec = WorkloadSpec(
        args.lengths, args.num_requests, programs=args.programs, max_tokens="length"
    )
    made = spec.make_workload(args.seed + turn).scaled(args.scale)
    wait = made.programs.wait / args.wait_scale
    return dataclasses.replace(made, programs=dataclasses.replace(made.programs, wait=wait))


def served_alone(made: Workload, alone: Alone) -> np.ndarray:
    """Seconds of each call on an idle engine that has cached its program's earlier calls."""
    source, program = made.prefix_of, made.programs.program
    own = (source >= 0) & (program[source] == program)
    new = made.prompt_len - np.where(own, made.prefix_len, 0)
    return alone.prompts(new) + (made.output_len - 1) * alone.tpot


def with_deadlines(made: Workload, served: np.ndarray, multiple: float) -> Workload:
    """The programs with deadlines.

    Args:
        made: The programs.
        served: float64 [n], seconds of each call on an idle engine.
        multiple: Of each program's time on an idle engine.
    """
    deadline = multiple * makespans_alone(made, served)[made.programs.program]
    return dataclasses.replace(made, programs=dataclasses.replace(made.programs, deadline=deadline))


def show(args: argparse.Namespace) -> int:
    """Serves, simulates and prints; returns the exit code. Raises ConfigError, BenchError,
    WorkloadError and RecordingError."""
    return interleaved.show(args, _measure, text)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    loads = [workload(args, turn) for turn in range(args.repeats)]
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{i}.jsonl" for i, name in enumerate(args.policies)}
        measured = _serve(args, loads, paths)
        served = measured.pop("served")
        policies = {
            name: {
                "served": _over_turns(turns),
                "simulated": _over_turns(_simulated(replay.read(paths[name]), loads)),
            }
            for name, turns in served.items()
        }
    return {**measured, "policies": policies}


def _serve(
    args: argparse.Namespace, loads: Sequence[Workload], paths: Mapping[str, Path]
) -> dict[str, Any]:
    """Records all turns of all policies. `served` has the results, by policy."""
    size = {"requests": args.programs, "longest": LONGEST, "num_blocks": NUM_BLOCKS}
    configs = {
        name: interleaved.configured(args.config, name, path, **size)
        for name, path in paths.items()
    }
    served: dict[str, list[dict[str, Any]]] = {name: [] for name in args.policies}
    with interleaved.engines(configs, loads, args.seed) as serving:
        targets = {name: EngineTarget(engine) for name, engine in serving.items()}
        alone = Alone.measured(list(targets.values()), args.longest, args.seed)
        for turn, name in interleaved.in_turns(args.policies, args.repeats):
            takes = served_alone(loads[turn], alone)
            load = with_deadlines(loads[turn], takes, args.deadline)
            found = runs.load(targets[name], load, args.seed + turn, served=takes)
            served[name].append(_numbers(found["programs"], found["duration_s"]))
        info = targets[args.policies[0]].info()
    return {
        "alone_ms": {
            "ttft": {n: 1e3 * t for n, t in zip(alone.lengths, alone.ttft, strict=True)},
            "tpot": 1e3 * alone.tpot,
        },
        "model": info,
        "served": served,
    }


def _simulated(recording: Recording, loads: Sequence[Workload]) -> list[dict[str, Any]]:
    """Simulates each turn of one policy. Raises RecordingError if its calls are not those of the
    turns."""
    results, first = [], interleaved.WARM_UP + 2 * ALONE  # served before the first turn
    for load in loads:
        _, result = interleaved.again(recording, first, len(load), own_steps=False)
        assert result.programs is not None
        results.append(_numbers(result.programs.summary(), result.summary()["makespan_s"]))
        first += len(load)
    return results


def _numbers(programs: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """A turn's numbers, with the programs in time per second."""
    in_time = (programs["attainment"] or 0.0) * programs["begun"]
    return {**programs, "in_time_per_s": in_time / seconds}


def _over_turns(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For one policy, the mean of each number, and half the width of its interval, None for one
    turn."""
    return {
        "mean": spread.mean(turns),
        "half_width": spread.half_width(turns),
        "turns": list(turns),
    }


def text(result: dict[str, Any]) -> str:
    """A table with two lines for each policy."""
    asked, alone = result["workload"], result["alone_ms"]
    prompts = ", ".join(f"{t:.1f} ms for {n} tokens" for n, t in alone["ttft"].items())
    rows = [["", "", *(title for title, _ in COLUMNS.values())]]
    for policy, kinds in result["policies"].items():
        for kind, numbers in kinds.items():
            mean, width = spread.flat(numbers["mean"]), spread.flat(numbers["half_width"])
            cells = [_cell(form, mean.get(n), width.get(n)) for n, (_, form) in COLUMNS.items()]
            rows.append([policy if kind == "served" else "", kind, *cells])
    head = [
        f"programs: {served_by(result)}, {asked['lengths']}, {asked['programs']} in progress, "
        f"deadlines of {asked['deadline']:g} times their time alone; means of {asked['repeats']} "
        "turns ± half of their 95% intervals",
        on_machine(result),
        f"alone: first token {prompts}; then {alone['tpot']:.2f} ms per token",
    ]
    return "\n".join([*head, aligned(rows)])


def _cell(form: str, value: float | None, width: float | None) -> str:
    if value is None:
        return "-"
    return form.format(value) + ("" if width is None else f" ±{form.format(width)}")
