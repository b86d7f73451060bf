"""What is written of the runs: tables and figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxserve.sched.simulation.results import SimulationResult, write_table
from jaxserve.simulate.runs import Run


def keeps(args: argparse.Namespace) -> bool:
    """Whether anything needs more of a run than its summary."""
    return bool(args.plots or args.requests_table or args.batches_table)


def label(run: Run, runs: list[Run]) -> str:
    """What a run is called in figures: its policy, and its rate where there are several."""
    several = len({other.workload.rate for other in runs}) > 1
    return f"{run.policy} at {run.workload.rate:g}/s" if several else run.policy


def write(
    args: argparse.Namespace,
    summaries: list[dict[str, Any]],
    results: list[tuple[str, SimulationResult]],
) -> None:
    """The tables and figures asked for. Several runs' tables get numbers."""
    for path, table in (
        (args.requests_table, SimulationResult.request_table),
        (args.batches_table, SimulationResult.batch_table),
    ):
        if not path:
            continue
        for number, (_, result) in enumerate(results):
            name = Path(path)
            if len(results) > 1:
                name = name.with_stem(f"{name.stem}-{number}")
            write_table(table(result), name)
    if args.plots:
        from jaxserve.figures import plots  # matplotlib takes a second

        for figure in plots.draw_all(Path(args.plots), summaries, results, args.views):
            print(f"wrote {figure}", file=sys.stderr)
