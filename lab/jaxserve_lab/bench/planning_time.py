"""How long policies take to plan a step. The device waits for a plan that takes longer than the
previous step.

    jaxserve bench plan
    jaxserve bench plan --policies=sarathi,edf --candidates=1600 --json

There are two situations for each number of candidates, half of them best-effort: all decode, or
half of them decode while the others wait and memory suffices for some. For policies that plan
hidden caches, every second running request has one, and there are two more situations: all but an
eighth wait ("prefill"), and all decode, but the pool lacks half of the blocks that they need next
("scarce"). For policies that move caches there is one in which the best-effort half runs and holds
all memory, while the real-time half, partly running, partly waiting, needs it ("full"). Times are
this thread's CPU time, so a busy machine hardly disturbs them.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.bench.command import BenchParser
from jaxserve.command_line import print_result
from jaxserve.sched.cache.block_sizes import blocks_for, tokens_in
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import State
from jaxserve.simulator.group_table import aligned
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.bench.policy_names import policy_names

CANDIDATES = (50, 100, 200, 400, 800, 1600)
REPEATS = 50
BLOCK_SIZE, PROMPT, OUTPUT = 16, 24, 40
RHO = 1e-6  # seconds per hidden token


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; argparse exits on errors."""
    parser = BenchParser("plan", description=__doc__)
    parser.add_argument("--policies", help="names, separated by commas (all of them)")
    parser.add_argument(
        "--candidates",
        default=",".join(map(str, CANDIDATES)),
        help="numbers of requests, each at least 4 (%(default)s)",
    )
    parser.number("repeats", REPEATS, "plans a median")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        parser.check(args)
        args.candidates = [int(number) for number in args.candidates.split(",")]
        args.policies = policy_names(args.policies)
        if min(args.candidates) < 4:
            raise ValueError(f"--candidates must be at least 4, got {min(args.candidates)}")
    except ValueError as error:
        parser.error(str(error))
    return args


def show(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    result = {name: measure(name, args.candidates, args.repeats) for name in args.policies}
    print_result(args, text(result, args.candidates), {"command": "plan", "plan_ms": result})
    return 0


def measure(name: str, counts: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of a plan by situation and number of candidates."""
    hidden, moves = make_policy(name).hybrid_cache, make_policy(name).moves_cache
    times: dict[str, dict[str, float]] = {}
    for count in counts:
        made = {
            "decode": situation(count, 0, hidden=hidden),
            "mixed": situation(count, count // 2, hidden=hidden),
        }
        if hidden:
            made["prefill"] = situation(count, count - count // 8, hidden=True)
            made["scarce"] = scarce(count)
        if moves:
            made["full"] = full(name, count)
        for kind, scheduler in made.items():
            times.setdefault(kind, {})[str(count)] = _median(name, scheduler, repeats)
    return times


class _EverySecondHidden(Policy):
    """Starts the requests that Sarathi starts, every second one with a hidden cache."""

    def __init__(self) -> None:
        self._policy = make_policy("sarathi_pc", watermark=0.0)

    def plan(self, view: View, now: float) -> BatchPlan:
        plan = self._policy.plan(view, now)
        kinds = np.where(
            view.table.state[plan.rows] == State.WAITING,
            plan.rows % 2,
            view.pool.kind[plan.rows],
        )
        return dataclasses.replace(plan, kinds=kinds.astype(np.int64))


def scarce(count: int) -> Scheduler:
    """A scheduler with `count` decoding requests, and half of the blocks that they need in the next
    step."""
    scheduler = situation(count, 0, hidden=True, capacity=3 * count)
    table, pool = scheduler.table, scheduler.pool
    rows = table.in_state(State.RUNNING)
    need = pool.needed(rows, table.computed[rows] + 1, pool.kind[rows])
    for row in range(count, 3 * count):  # rows without requests take the rest
        excess = pool.num_free - int(need.sum()) // 2
        pool.open_cache(row, CacheKind.HIDDEN)
        pool.grow(row, tokens_in(min(excess, pool.width), BLOCK_SIZE, CacheKind.HIDDEN))
    return scheduler


def _scheduler(policy: Policy, count: int, num_blocks: int, **options: Any) -> Scheduler:
    """A view for that many requests, whose prompts all fit a batch."""
    return Scheduler(
        policy,
        Limits(2 * count * PROMPT, 2 * count * PROMPT, count),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=PROMPT + OUTPUT,
        cost_model=system("opt-13b@a100-40g").cost_model,
        **options,
    )


def situation(count: int, waiting: int, *, hidden: bool = False, capacity: int = 0) -> Scheduler:
    """A scheduler in mid-flight.

    Args:
        count: Number of requests.
        waiting: Number of waiting requests; the pool has room for an eighth of them.
        hidden: Whether every second running request has a hidden cache.
        capacity: Rows of the table, if more than requests.
    """
    running = count - waiting
    blocks = int(blocks_for(PROMPT + OUTPUT, BLOCK_SIZE)) * running
    scheduler = _scheduler(
        _EverySecondHidden() if hidden else make_policy("sarathi_pc", watermark=0.0),
        count,
        blocks + waiting // 8 * int(blocks_for(PROMPT, BLOCK_SIZE)),
        capacity=capacity or count,
        rho=RHO if hidden else None,
    )
    for number in range(count):
        if number == running:  # earlier requests start, and write a few tokens
            for _ in range(4):
                step = scheduler.schedule(0.0)
                scheduler.release_finished(step)
                scheduler.receive(step.emitting, 0.0)
        scheduler.add(_request(number))
    if not waiting:
        for _ in range(4):
            scheduler.receive(scheduler.schedule(0.0).emitting, 0.0)
    for _ in range(64):  # for policies that learn lengths
        scheduler.table.output_lengths.add(OUTPUT)
    return scheduler


def full(name: str, count: int) -> Scheduler:
    """A scheduler under the named policy, nearly out of memory. Half of its requests are
    best-effort, run and hold nearly all blocks. Half of the real-time requests run, half wait."""
    best, blocks = count // 2, int(blocks_for(PROMPT, BLOCK_SIZE))
    num_blocks = blocks * (best + 1 + best // 50)  # watermarks included
    more = {"capacity": count, "host_slots": 2 * count * PROMPT}
    scheduler = _scheduler(make_policy(name), count, num_blocks, **more)
    for number in range(count):
        if number in (best, best + best // 2):
            _until_all_run(scheduler)
        tier = Tier.BEST_EFFORT if number < best else Tier.REALTIME
        scheduler.add(dataclasses.replace(_request(number), tier=tier, prompt=(1,) * PROMPT))
    return scheduler


def _until_all_run(scheduler: Scheduler) -> None:
    """Takes a few steps at most: some policies have smaller batches, or run no request that cannot
    grow."""
    for _ in range(16):
        scheduler.receive(scheduler.schedule(0.0).emitting, 0.0)
        if not len(scheduler.table.in_state(State.WAITING)):
            return


def _request(number: int) -> Request:
    return Request(
        str(number),
        (1,) * (PROMPT - number % 16),
        SamplingParams(max_tokens=OUTPUT - number % 8),
        SLO(ttft=0.5 + number % 3, tbt=0.1),
        Tier(number % 2),
        arrival=0.001 * number,
    )


def _median(name: str, scheduler: Scheduler, repeats: int) -> float:
    policy, view = make_policy(name), scheduler.view
    times = []
    for _ in range(repeats):
        begin = time.thread_time()
        policy.plan(view, 1.0)
        times.append(time.thread_time() - begin)
    return round(statistics.median(times) * 1e3, 4)


def text(result: dict[str, dict[str, dict[str, float]]], counts: Sequence[int]) -> str:
    """A table of median milliseconds."""
    lines = [["ms a plan, candidates", *map(str, counts)]]
    for name, situations in result.items():
        for situation, times in situations.items():
            lines.append([f"{name} {situation}", *(f"{times[str(n)]:.3f}" for n in counts)])
    return aligned(lines)
