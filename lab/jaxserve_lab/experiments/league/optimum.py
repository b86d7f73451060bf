"""How far policies are from the best schedule there is, of a few requests of a workload.

A whole workload is far too large for `jaxserve/simulator/optimal`: this is its first REQUESTS
prompts, with outputs cut down, all there at the start, in so little memory that half of them fit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.registry import make_policy
from jaxserve.simulator.optimal.replay import Replay, ReplayError
from jaxserve.simulator.optimal.replay import run as replay_of
from jaxserve.simulator.optimal.solve import Problem, solve
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once
from jaxserve_lab.experiments.common.runs import digits
from jaxserve_lab.experiments.league.workloads import LONGEST, OPT, make_workload

REQUESTS, OUTPUT = 6, 6  # requests; tokens of the longest output
PLACE = OPT
START = ("vllm", "sarathi")  # whose better schedule the search begins with


@dataclass(frozen=True)
class CutCase:
    """A workload, cut down. time_limit: seconds of the search for its optimum."""

    workload: str
    time_limit: float

    def named(self) -> dict[str, Any]:
        """Its fields, and how it is cut."""
        return {**asdict(self), "requests": REQUESTS, "output": OUTPUT}


@dataclass(frozen=True)
class Optimum:
    """The best schedule found.

    Attributes:
        latency: Sum of its batch times, seconds.
        bound: No schedule takes less, seconds.
        proven: Whether it is the optimum.
    """

    latency: float
    bound: float
    proven: bool


def cut_down(workload: str) -> Problem:
    """The workload as a problem small enough to solve.

    Prompts stay as they are; outputs are scaled so that the longest has OUTPUT tokens. M is half of
    the tokens of all requests, but enough for the largest.
    """
    lengths = make_workload(workload, PLACE, 1.0, 100, 0).lengths.first(REQUESTS)
    output = np.maximum(1, np.rint(lengths.output_len * OUTPUT / lengths.output_len.max()))
    cut = Lengths(lengths.prompt_len, output.astype(np.int64))
    place = system(PLACE)
    kv_tokens = int(max(cut.total.sum() // 2, cut.total.max()))
    return Problem(
        Workload.create(all_at_once(REQUESTS), cut, limit=cut.output_len),
        place.cost_model,
        kv_tokens=kv_tokens,
        max_batch_tokens=max(LONGEST[PLACE], kv_tokens),
        chunked=False,
    )


def optimum(case: CutCase) -> Optimum:
    """The best schedule without chunked prefill, or the best one found in time."""
    problem = cut_down(case.workload)
    start = min((_played(problem, name) for name in START), key=lambda played: played.latency)
    found = solve(problem, warm_start=start.schedule, time_limit=case.time_limit, workers=1)
    assert found.objective is not None and found.bound is not None
    return Optimum(digits(found.objective, 6), digits(found.bound, 6), found.status == "optimal")


def latency(workload: str, policy: str) -> float | None:
    """Seconds that the policy takes for the cut-down workload, with K and V only and no host
    memory; None if it cannot serve it so. Policies may chunk prompts."""
    try:
        return digits(_played(cut_down(workload), policy).latency, 6)
    except (InvalidPlan, ReplayError):
        return None


def _played(problem: Problem, policy: str) -> Replay:
    """The policy's schedule of the problem."""
    return replay_of(
        make_policy(policy),
        problem.workload,
        problem.cost_model,
        limits=problem.limits,
        kv_tokens=problem.kv_tokens,
        block_size=problem.block_size,
    )
