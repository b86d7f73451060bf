"""Writes the outputs of runs, after checking before the runs that they can be written."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxserve.sched.recording import older
from jaxserve.simulator.results import SimulationResult, write_table
from jaxserve.simulator.simulate.spread import flat
from jaxserve.simulator.simulate.sweep import Point
from jaxserve.writable import check_file, check_folder

FILES = ("requests_table", "batches_table", "programs_table", "chrome_trace", "summary")
INPUTS = ("workload", "replay", "system")
OF_RESULTS = (
    "requests_table",
    "batches_table",
    "programs_table",
    "chrome_trace",
    "plots",
)  # of the first seed


def keeps(args: argparse.Namespace) -> bool:
    """Whether any output needs more of a run than its numbers."""
    return any(getattr(args, name) for name in OF_RESULTS)


def records_rows(args: argparse.Namespace) -> bool:
    """Whether an output needs the requests of each batch."""
    return bool(args.chrome_trace) or "schedule" in (args.views or ())


def check(args: argparse.Namespace, points: int) -> None:
    """ValueError names the flag of the first output that cannot be written, or whose file is also
    read. points: policies times rates."""
    read = {Path(path).resolve(): name for name, path in _inputs(args)}
    taken: dict[Path, str] = {}
    for name in FILES:
        given = getattr(args, name)
        if given is None:
            continue
        for path in [Path(given)] if name == "summary" else _numbered(given, points):
            check_file(name, path)
            if path.resolve() in read:
                raise ValueError(f"--{name}: {path} is what --{read[path.resolve()]} reads")
            other = taken.setdefault(path.resolve(), name)
            if other != name:
                raise ValueError(f"--{name}: {path} is what --{other} writes")
    if args.plots is not None:
        check_folder("plots", Path(args.plots))
        from jaxserve.simulator.figures import plots  # matplotlib takes a second

        plots.check_views(args.views)


def _inputs(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Flags that may name a file to read, with their values."""
    for name in INPUTS:
        if getattr(args, name):
            yield name, getattr(args, name)
    if args.replay:
        yield "replay", str(older(Path(args.replay)))


def write(args: argparse.Namespace, points: Sequence[Point], served: Point | None = None) -> None:
    """Writes all outputs that the flags request. served: the recorded run, which is only in the
    summary."""
    if args.summary:
        write_summary(points if served is None else [served, *points], Path(args.summary))
    if not keeps(args):
        return
    results = [_result(point) for point in points]
    for given, table in (
        (args.requests_table, SimulationResult.request_table),
        (args.batches_table, SimulationResult.batch_table),
        (args.programs_table, SimulationResult.program_table),
    ):
        if given:
            for path, result in zip(_numbered(given, len(points)), results, strict=True):
                write_table(table(result), path)
    if args.chrome_trace:
        _write_traces(points, results, _numbered(args.chrome_trace, len(points)))
    if args.plots:
        from jaxserve.simulator.figures import plots

        labels = [_label(point, points) for point in points]
        means = [{**point.named, **point.mean} for point in points]
        spread = [point.half_width["slo_attainment"] for point in points]
        named = list(zip(labels, results, strict=True))
        for figure in plots.draw_all(Path(args.plots), means, named, args.views, spread):
            print(f"wrote {figure}", file=sys.stderr)


def write_summary(points: Sequence[Point], path: Path) -> None:
    """Writes a CSV file with a row for each run, and for each point a row with the means and one
    with half the width of their confidence intervals.

    `statistic` says which of these a row is; `seed` is set for runs. Columns of numbers are named
    like in `pandas.json_normalize`. Missing values are empty cells.
    """
    rows = [row for point in points for row in _summary_rows(point)]
    columns = dict.fromkeys(name for row in rows for name in row)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _summary_rows(point: Point) -> Iterator[dict[str, Any]]:
    mean = point.mean
    alone = {name for name in ("tiers", "classes") if len(mean[name]) < 2}  # same as all

    def row(statistic: str, seed: int | None, numbers: dict[str, Any]) -> dict[str, Any]:
        columns = {name: value for name, value in numbers.items() if name not in alone}
        return {**point.named, "statistic": statistic, "seed": seed, **flat(columns)}

    for seed, numbers in zip(point.seeds, point.numbers, strict=True):
        yield row("run", seed, numbers)
    yield row("mean", None, mean)
    yield row("half_width", None, point.half_width)


def _write_traces(
    points: Sequence[Point], results: Sequence[SimulationResult], paths: Sequence[Path]
) -> None:
    from jaxserve.simulator.figures.chrome_trace import write_trace

    for point, result, path in zip(points, results, paths, strict=True):
        write_trace(result, path, {**point.named, "seed": point.run.seed})


def _result(point: Point) -> SimulationResult:
    result = point.outcomes[0].result
    assert result is not None  # `keeps` was checked before the runs
    return result


def _label(point: Point, points: Sequence[Point]) -> str:
    """The point's name in figures: its policy, and its rate if there are several."""
    several = len({other.run.rate for other in points}) > 1
    return f"{point.run.policy} at {point.run.rate:g}/s" if several else point.run.policy


def _numbered(given: str, count: int) -> list[Path]:
    """A path per point, numbered if there are several."""
    path = Path(given)
    if count == 1:
        return [path]
    return [path.with_stem(f"{path.stem}-{number}") for number in range(count)]
