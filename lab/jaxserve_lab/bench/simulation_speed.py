"""How long simulations take: seconds of this thread's CPU time, compiled and in Python.

    jaxserve bench simulate
    jaxserve bench simulate --workload=AzureLLMInferenceTrace_conv.csv --policies=edf

The setting is that of the Azure hour on docs/infermax.md: Llama-3-70B on four A100s with 100,000
tokens of cache and batches of 16,384, and the rules `infermax_paper`; without a trace, as many
requests are drawn as that hour has, at its rate. Code is compiled by numba before, or read from
disk. Latencies are printed, too; both ways have the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from jaxserve.bench.command import BenchParser
from jaxserve.simulator.dispatch import COMPILING
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import SimulationError, simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.bench.policy_names import policy_names

SYSTEM, KV_TOKENS, MAX_BATCH_TOKENS = "llama-3-70b@4xa100", 100_000, 16_384
DRAWN = WorkloadSpec("sharegpt", num_requests=19_366, arrivals="poisson", rate=5.4)
WARM_UP = 8  # requests
WAYS = {"compiled": True, "python": False}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; argparse exits on errors."""
    parser = BenchParser("simulate", description=__doc__)
    add = parser.add_argument
    add("--policies", help="names, separated by commas (all of them)")
    add("--workload", help="a trace, or another workload of jaxserve.simulator.simulate")
    parser.number("num_requests", None, "requests, or the first ones of a trace")
    add("--ways", default=",".join(WAYS), help="compiled, python or both (%(default)s)")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        parser.check(args)
        args.policies = policy_names(args.policies)
        args.ways = args.ways.split(",")
        if unknown := sorted(set(args.ways) - set(WAYS)):
            raise ValueError(f"--ways are {', '.join(WAYS)}, got {unknown[0]!r}")
        spec = WorkloadSpec(args.workload) if args.workload else DRAWN
        count = args.num_requests or spec.num_requests
        args.spec = dataclasses.replace(spec, num_requests=count)
    except ValueError as error:
        parser.error(str(error))
    return args


def show(args: argparse.Namespace) -> int:
    """Measures and prints, policy by policy; returns the exit code. Raises WorkloadError for an
    unknown workload."""
    workload = args.spec.make_workload()
    out = sys.stderr if args.json else sys.stdout
    width = max(map(len, args.policies)) + 1
    head = "".join(f"{way:>10}" for way in args.ways)
    print(f"{'seconds':<{width}}{head}{'latency_s':>12}", file=out, flush=True)
    result = {}
    for name in args.policies:
        result[name] = seconds = measure(name, workload, args.ways)
        cells = [(seconds[way], 10) for way in args.ways] + [(seconds["latency_s"], 12)]
        row = "".join(f"{'-' if cell is None else f'{cell:.3f}':>{w}}" for cell, w in cells)
        print(f"{name:<{width}}{row}", file=out, flush=True)
    if args.json:
        sys.stderr.flush()
        content = {"command": "simulate", "simulate_s": result}
        print(json.dumps(content, allow_nan=False), flush=True)
    return 0


def measure(name: str, workload: Workload, ways: Sequence[str]) -> dict[str, float | None]:
    """Seconds by way, None for a policy that is not compiled, and the latency, None if it was not
    simulated."""
    seconds: dict[str, float | None] = {"latency_s": None}
    engine = EngineOptions(kv_tokens=KV_TOKENS, rules="infermax_paper")
    run = RunOptions(compiling=lambda: print(COMPILING, file=sys.stderr, flush=True))
    place = dataclasses.replace(system(SYSTEM), max_batch_tokens=MAX_BATCH_TOKENS)
    few = workload.first(min(WARM_UP, len(workload)))
    for way in ways:
        run = dataclasses.replace(run, compiled=WAYS[way])
        try:
            simulate(name, few, place, engine=engine, run=run)
        except SimulationError:
            if not WAYS[way]:
                raise
            seconds[way] = None
            continue
        begin = time.thread_time()
        result = simulate(name, workload, place, engine=engine, run=run)
        seconds[way] = round(time.thread_time() - begin, 3)
        seconds["latency_s"] = round(float(result.summary()["latency_s"]), 3)
    return seconds
