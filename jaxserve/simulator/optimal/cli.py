"""The best schedule of a small workload, or whether one better than x exists (InferMax section 5).

    jaxserve optimal --workload=fixed:4x3x3 --kv_tokens=10 --picture=best.png
    jaxserve optimal --workload=requests.csv --kv_tokens=40 --objective=mean_ttft --json
    jaxserve optimal --workload=fixed:4x3x3 --kv_tokens=10 --better_than=0.022

--workload: fixed:IxOxB, a file of prompt_tokens,output_tokens, or a trace with arrivals, of which
--num_requests takes the first. Needs OR-Tools, the extra `optimal`. The search starts from
a policy's schedule (--warm_start) and stops at --time_limit with the best found and a bound:
the answer is `optimal` only where that is proven, which takes seconds for three requests, and may
take hours for eight.

Exit codes: 0 with an answer, 1 without one (unknown), 2 for a command line that poses no problem.
`infeasible` is an answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.command_line import Parser, print_result, run_reporting
from jaxserve.sched.plan import InvalidPlan
from jaxserve.simulator.optimal.replay import Replay, ReplayError, Schedule
from jaxserve.simulator.optimal.solve import OBJECTIVES, OptimalError, Problem, Solution, solve
from jaxserve.simulator.simulator import RULES, policy_under
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workload_flags import positive_int, seconds
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.writable import check_file

_SAME = ("max_batches", "all_batches", "rounding", "wall_s", "note")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code, see the module's docstring, or 130 for ^C."""
    args = _parser().parse_args(argv)
    return run_reporting("jaxserve optimal", lambda: _solve(args), ValueError, OSError)


def _solve(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("ortools") is None:
        raise OptimalError("this needs OR-Tools: install jaxserve-llm with its extra optimal")
    if args.picture:
        if importlib.util.find_spec("matplotlib") is None:
            raise OptimalError("--picture needs matplotlib: pip install matplotlib")
        check_file("picture", Path(args.picture))
    problem = _problem(args)
    start, left_out = _warm_start(args, problem)
    found = solve(
        problem,
        better_than=args.better_than,
        warm_start=start,
        max_batches=args.max_batches,
        time_limit=args.time_limit,
        workers=args.workers,
        seed=args.seed,
        on_improved=_improved if sys.stderr.isatty() else None,
    )
    found = dataclasses.replace(found, note="; ".join(filter(None, (left_out, found.note))))
    if args.picture and found.replay is not None:
        _picture(args, problem, found, start)
    print_result(args, _text(problem, found), _json(problem, found))
    return 1 if found.status == "unknown" else 0


def _problem(args: argparse.Namespace) -> Problem:
    place = system(args.system)
    workload = WorkloadSpec(args.workload, num_requests=args.num_requests).make_workload(args.seed)
    cost: Any = place.cost_under(args.rules)
    return Problem(
        workload,
        cost,
        args.kv_tokens,
        args.max_batch_tokens or place.max_batch_tokens,
        args.max_prefill_tokens or 0,
        args.block_size,
        not args.whole_prompts,
        args.objective,
    )


def _warm_start(args: argparse.Namespace, problem: Problem) -> tuple[Schedule | None, str]:
    if args.warm_start == "none":
        return None, ""
    policy = policy_under(args.warm_start, RULES[args.rules])
    try:
        return problem.record(policy), ""
    except (InvalidPlan, ReplayError) as error:
        return None, f"{args.warm_start} breaks a limit ({error}) and was left out"


def _improved(objective: float, bound: float) -> None:
    line = f"found {objective * 1e3:.3f} ms, none is below {bound * 1e3:.3f} ms"
    print(f"\r{line:<70}", end="", file=sys.stderr, flush=True)


def _picture(
    args: argparse.Namespace, problem: Problem, found: Solution, start: Schedule | None
) -> None:
    from jaxserve.simulator.optimal import schedule_view

    assert found.replay is not None and found.objective is not None
    panels = [(f"{found.status}: {problem.objective} {found.objective * 1e3:.2f} ms", found.replay)]
    if start is not None:
        played = problem.play(start)
        value = f"{args.warm_start}: {problem.objective} {problem.value(played) * 1e3:.2f} ms"
        panels.append((value, played))
    schedule_view.save(args.picture, panels, problem.kv_tokens)
    print(f"wrote {args.picture}", file=sys.stderr)


def _text(problem: Problem, found: Solution) -> str:
    lines = [f"{found.status}"]
    if found.objective is not None and (played := found.replay) is not None:
        lines[0] += f": {problem.objective} {found.objective * 1e3:.4f} ms"
        lines += [
            f"  {len(played.schedule)} batches, {played.schedule.preemptions} preemptions, latency "
            f"{played.latency * 1e3:.4f} ms, mean TTFT {played.mean_ttft * 1e3:.4f} ms"
        ]
    if found.bound is not None:
        least = f"no schedule is below {found.bound * 1e3:.4f} ms (gap {found.gap:.2%})"
        if found.status == "feasible":
            least = f"not proven to be the best, time ran out: {least}; --time_limit gives it more"
        lines += [f"  {least}"]
    lines += [
        f"  {found.wall_s:.1f} s, {found.literals} variables, at most {found.max_batches} batches; "
        f"time in units of {found.unit:g} s, relative error at most {found.rounding:.1e}"
    ]
    if found.note:
        lines += [f"  note: {found.note}"]
    return "\n".join(lines)


def _json(problem: Problem, found: Solution) -> dict[str, Any]:
    """batches: per batch its start and duration, the tokens that each request computes, by the
    request's number, and the preempted requests."""
    played = found.replay
    batches = [] if played is None else [_batch(played, j) for j in range(len(played.schedule))]
    return {
        "status": found.status,
        "objective": problem.objective,
        "objective_s": found.objective,
        "bound_s": found.bound,
        "gap": found.gap,
        **{f"{name}_s": getattr(played, name, None) for name in OBJECTIVES},
        "num_batches": len(batches),
        "num_preemptions": None if played is None else played.schedule.preemptions,
        "unit_s": found.unit,
        **{name: getattr(found, name) for name in _SAME},
        "batches": batches,
    }


def _batch(played: Replay, number: int) -> dict[str, Any]:
    tokens = played.schedule.tokens[number]
    return {
        "start_s": float(played.start[number]),
        "duration_s": float(played.duration[number]),
        "kv_used": int(played.kv_used[number]),
        "tokens": {str(i): int(tokens[i]) for i in tokens.nonzero()[0].tolist()},
        "preempted": played.schedule.preempt[number].nonzero()[0].tolist(),
    }


def _parser() -> Parser:
    parser = Parser(prog="jaxserve optimal", description=__doc__)
    add = parser.add_argument
    add("--workload", required=True, help="see above")
    add("--num_requests", type=positive_int, help="number of first requests of a file")
    add("--system", default="llama-2-7b@a100", help="preset, MODEL@DEVICE or profile.json")
    add("--rules", choices=tuple(RULES), default="infermax_paper", help="whose batch times")
    add("--kv_tokens", type=positive_int, required=True, help="M, tokens of KV cache")
    add("--max_batch_tokens", type=positive_int, help="C (the system's)")
    add("--max_prefill_tokens", type=positive_int, help="P (C)")
    add("--block_size", type=positive_int, default=1, help="tokens per block (1)")
    add("--whole_prompts", action="store_true", help="prompts are not cut; much faster to solve")
    add("--objective", choices=OBJECTIVES, default="latency", help="what to minimise (latency)")
    add(
        "--better_than",
        type=seconds,
        help="only ask whether a schedule below this many seconds exists",
    )
    add("--warm_start", default="vllm", help="a policy to start from, or none (vllm)")
    add(
        "--max_batches",
        type=positive_int,
        default=0,
        help="most batches of a schedule (as many as can be needed)",
    )
    add("--time_limit", type=seconds, default=60.0, help="seconds (60)")
    add("--workers", type=positive_int, default=2, help="threads of the solver (2)")
    add("--seed", type=int, default=0, help="seed of the solver (0)")
    add("--json", action="store_true", help="one JSON object as the last line")
    add("--picture", metavar="PATH", help="requests by batches, as in the paper's Figure 15")
    return parser
