"""How well a twin predicts a server at rates at which it has not been seen.

    jaxserve bench twin --url=http://localhost:8000 --fit=1,3 --predict=0.5,2,4

Observes the server at the rates of --fit together, and at each of --predict by itself, with new
requests. Each of these is simulated on the twin made of the first ones, and compared with what was
seen. It works for any server with OpenAI's API; see `jaxserve observe`.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.command import BenchParser
from jaxserve.bench.load_target import BenchError
from jaxserve.command_line import print_result
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator import replay
from jaxserve.simulator.group_table import aligned
from jaxserve.simulator.results import RequestRecords
from jaxserve.simulator.simulate.flags import rates
from jaxserve.twin import cli

MEASURES = ("TTFT", "TBT", "total")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; argparse exits for --help. UsageError otherwise."""
    parser = BenchParser("twin", description=__doc__)
    add = parser.add_argument
    add("--url", required=True, help="the server")
    add("--fit", type=rates, required=True, help="requests/s that the twin is made of, with commas")
    add("--predict", type=rates, required=True, help="requests/s that it predicts")
    add("--workload", default="sharegpt", help="see jaxserve observe (sharegpt)")
    parser.number("num_requests", 100, "requests at each rate")
    add("--more", default="", help="further flags of jaxserve observe, separated by spaces")
    args: argparse.Namespace = parser.parse_args(argv)
    parser.check(args)
    if not set(args.fit).isdisjoint(args.predict):
        raise UsageError("--predict has rates of --fit")
    return args


def show(args: argparse.Namespace) -> int:
    """Observes, simulates and prints; returns the exit code. BenchError if the server does not
    serve, RecordingError if too little was seen."""
    with tempfile.TemporaryDirectory() as folder:
        fitted = _observed(args, Path(folder), args.fit, seed=1)
        system = replay.system_of(fitted)
        points = []
        for seed, rate in enumerate(args.predict, 2):
            seen = _observed(args, Path(folder), [rate], seed)
            twin = dataclasses.replace(seen, header=fitted.header)
            made = replay.again(twin, system).requests
            points.append({"rate": rate, **_compared(replay.served(seen).requests, made)})
    header = fitted.header
    result = {
        "model": header.model,
        "fitted": args.fit,
        "max_batch_tokens": header.max_batch_tokens,
        "max_rows": header.max_rows,
        "overlap": header.overlap,
        "mean_step_error": system.about["mean_error"],
        "points": points,
    }
    print_result(args, _text(result), result)
    return 0


def _observed(
    args: argparse.Namespace, folder: Path, at: Sequence[float], seed: int
) -> replay.Recording:
    out = folder / f"{seed}.jsonl"
    argv = [
        f"--url={args.url}",
        f"--workload={args.workload}",
        f"--num_requests={args.num_requests}",
        f"--rate={','.join(map(str, at))}",
        f"--seed={seed}",
        f"--out={out}",
        *args.more.split(),
    ]
    if cli.main(argv):
        raise BenchError(f"{args.url} could not be observed at {at} requests/s")
    return replay.read(out)


def _compared(seen: RequestRecords, made: RequestRecords) -> dict[str, Any]:
    """Mean and 99th percentile of each measure: what was seen, what was simulated, seconds."""
    pairs = ((seen.ttft, made.ttft), (seen.tbt[0], made.tbt[0]), (seen.latency, made.latency))
    return {
        name: {
            "mean": [float(np.nanmean(one)) for one in pair],
            "p99": [float(np.nanquantile(one, 0.99)) for one in pair],
        }
        for name, pair in zip(MEASURES, pairs, strict=True)
    }


def _text(result: dict[str, Any]) -> str:
    rows = [
        ("requests/s", *(f"{name} {what}, ms" for name in MEASURES for what in ("mean", "P99")))
    ]
    for point in result["points"]:
        cells = [f"{point['rate']:g}"]
        for name in MEASURES:
            for what in ("mean", "p99"):
                seen, made = point[name][what]
                off = f"{made / seen - 1:+.0%}" if seen else "-"
                cells.append(f"{1e3 * seen:.0f} {1e3 * made:.0f} {off}")
        rows.append(tuple(cells))
    about = f"{result['model']}, seen at {result['fitted']} requests/s: seen, simulated, error"
    return "\n".join([about, aligned(rows)])
