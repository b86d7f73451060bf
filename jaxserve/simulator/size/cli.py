r"""Says how many replicas a rate and its targets need, by simulating them.

    jaxserve size --replay=seen.jsonl --rate=20 --slo_ttft_ms=1000 --slo_tbt_ms=100
    jaxserve size --system=llama-3-8b@h100 --workload=sharegpt --rate=100 --slo_ttft_ms=1000 \
        --slo_tbt_ms=50 --share=0.99 --plot=size.png
    jaxserve size --system=llama-3-8b@l4 --workload=sharegpt --rate=20 --ttft_p99_ms=2000

--replay=FILE is a recording, of a server of ours or of one that `jaxserve observe` has seen: its
traffic, repeated and stretched to the rate, on replicas of its system. Otherwise --workload gives
the traffic and --system the system, as in `jaxserve simulate`, whose help explains the flags.

The replicas stand behind our router (--routing). Enough is a number with which, on average over
--seeds runs, a share --share of the requests with targets attain all of theirs, and with which the
99th percentiles are no longer than --ttft_p99_ms and --tbt_p99_ms. The search is repeated with
steps that take longer, and less long, by --error: by default as much as the simulation of a
recording differs from it, or 10%. The answer has all three.

Exit codes: 0, 1 if not even --most replicas are enough, 2 if nothing can be simulated with the
command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxserve.command_line import Parser, print_result, run_reporting
from jaxserve.sched.registry import make_policy
from jaxserve.simulator import replay as recordings
from jaxserve.simulator.simulate import flags, output, replay
from jaxserve.simulator.simulate.runs import REFUSED, Recorded, Run
from jaxserve.simulator.simulate.sweep import OUTLAST
from jaxserve.simulator.simulate.workers import Workers
from jaxserve.simulator.size import text
from jaxserve.simulator.size.sizing import Goal, size, slower
from jaxserve.simulator.workload_flags import number, positive, positive_int
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload

SHARE = 0.95
MOST = 64
ERROR, LEAST_ERROR = 0.1, 0.02
REQUESTS, MOST_REQUESTS = 1000, 50_000  # of a run, unless --num_requests says how many
_NOT_ASKED = ("find", "attainment", "views", "plots", *output.FILES)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code, see the module's docstring, or 130 for ^C."""
    parser = flag_parser()
    args = parser.parse_args(argv)
    problem = check(args)
    if problem:
        parser.error(problem)
    return run_reporting("jaxserve size", lambda: _size(args), *REFUSED)


def flag_parser() -> Parser:
    """The parser; pass its result to `check`."""
    parser = Parser(prog="jaxserve size", description=__doc__)
    flags.add_policy(parser, None, "goodput, or what the recording was served with")
    flags.add_what_is_simulated(parser, system="needed without --replay")
    flags.add_how_often(parser)
    add = parser.add_argument
    part = number("above 0 and at most 1", lambda value: 0 < value <= 1)
    add("--share", type=part, default=SHARE, help=f"that must attain its targets ({SHARE:g})")
    add("--ttft_p99_ms", type=positive, help="most that the P99 over all requests may be")
    add("--tbt_p99_ms", type=positive, help="likewise, of all times between tokens")
    add("--most", type=positive_int, default=MOST, help=f"replicas to try ({MOST})")
    off = number("at least 0 and below 1", lambda value: 0 <= value < 1)
    add("--error", type=off, help="of the simulated steps, see above")
    add("--plot", type=flags.path, metavar="PATH", help="attainment by replicas, .png or .svg")
    parser.set_defaults(**dict.fromkeys(_NOT_ASKED), seeds=3, routing="slo")
    return parser


def check(args: argparse.Namespace) -> str:
    """A line about flags that contradict each other, or are missing; "" if there are none."""
    if args.rate is None or len(args.rate) != 1:
        return "--rate is needed, one: the requests a second of all replicas"
    if args.replicas != 1:
        return "--replicas is the answer; --most says how many to try"
    if args.replay is None and args.system is None:
        return "--replay or --system is needed"
    if args.policy is not None and len(args.policy) > 1:
        return "--policy: one at a time"
    if args.best_effort is not None or args.programs is not None:
        return "--best_effort and --programs have no rate that more replicas could serve"
    with_replicas = argparse.Namespace(**{**vars(args), "replicas": max(args.most, 2)})
    if args.replay is not None:  # which is stretched to the rate, and repeated
        with_replicas.rate = with_replicas.num_requests = None
    return flags.check(with_replicas)


def _size(args: argparse.Namespace) -> int:
    (rate,), goal = args.rate, _goal(args)
    run, error, notes = _replayed(args, rate) if args.replay else _drawn(args, rate)
    error = error if args.error is None else args.error
    if not (run.workload.make_workload(run.seed).terms.asked.any() or goal.asks_p99):
        raise ValueError("targets are needed: --slo_ttft_ms and others, or --ttft_p99_ms")
    with Workers(args.jobs) as workers:
        found = {
            factor: size(_with_steps(run, factor), goal, args.most, args.seeds, workers)
            for factor in (1.0, *((1 / (1 + error), 1 + error) if error else ()))
        }
    answer = text.Answer(rate, goal, found, error, args.most)
    if args.plot:
        text.draw(answer, Path(args.plot))
    print_result(args, "\n".join([text.report(answer), *notes]), text.as_json(answer))
    return 0 if found[1.0].replicas else 1


def _goal(args: argparse.Namespace) -> Goal:
    most = (args.ttft_p99_ms, args.tbt_p99_ms)
    ttft, tbt = (None if one is None else one / 1e3 for one in most)
    return Goal(args.share, ttft, tbt)


def _with_steps(run: Run, factor: float) -> Run:
    return run if factor == 1.0 else dataclasses.replace(run, system=slower(run.place(), factor))


def _drawn(args: argparse.Namespace, rate: float) -> tuple[Run, float, tuple[str, ...]]:
    """The run of a drawn workload, the error of its steps, and notes."""
    args.policy = args.policy or ["goodput"]
    run = flags.runs(args)[0]
    source = run.workload
    lengths = args.workload
    if args.num_requests is None and not (lengths.startswith("fixed:") or Path(lengths).exists()):
        assert isinstance(source, WorkloadSpec)
        count = _enough(source.make_workload(run.seed), rate)
        run = dataclasses.replace(run, workload=dataclasses.replace(source, num_requests=count))
    return run, ERROR, ()


def _replayed(args: argparse.Namespace, rate: float) -> tuple[Run, float, tuple[str, ...]]:
    """The same of a recording."""
    count, args.rate, args.num_requests = args.num_requests, None, None
    recorded = replay.read(args)
    args.policy = args.policy or [recorded.recording.header.policy]
    if make_policy(args.policy[0]).hypothetical:
        raise ValueError(f"--policy: {args.policy[0]} is for simulations only")
    run = recorded.runs(args)[0]
    workload = recorded.workload.workload
    count = count or _enough(workload, rate)
    repeated = Recorded(recorded.workload.lengths, _repeated(workload, count))
    return dataclasses.replace(run, workload=repeated.at_rate(rate)), _off(recorded), recorded.notes


def _off(recorded: replay.Replay) -> float:
    """How far a simulation of the recording is off in the means of the time between tokens and of
    the total time, as a share."""
    seen = recordings.served(recorded.recording).requests
    made = recordings.again(recorded.recording, recorded.system).requests
    pairs = ((seen.tbt[0], made.tbt[0]), (seen.latency, made.latency))
    off = [abs(float(np.nanmean(b) / np.nanmean(a)) - 1) for a, b in pairs if len(a) and len(b)]
    return max(LEAST_ERROR, *off)


def _enough(workload: Workload, rate: float) -> int:
    """Requests that come for OUTLAST times the longest target."""
    targets = np.concatenate([workload.ttft, workload.jct])
    longest = float(targets[targets < np.inf].max(initial=0.0))
    return min(max(REQUESTS, math.ceil(OUTLAST * longest * rate)), MOST_REQUESTS)


def _repeated(workload: Workload, count: int) -> Workload:
    """So many requests: the same ones again and again."""
    span = float(workload.arrival[-1])
    gap = span / max(len(workload) - 1, 1)
    times = -(-count // len(workload))
    parts = [
        dataclasses.replace(workload, arrival=workload.arrival + i * (span + gap))
        for i in range(times)
    ]
    return Workload.merged(parts)[0].first(count) if times > 1 else workload.first(count)
