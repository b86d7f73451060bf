"""The results of the runs as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.sched.request import Rule
from jaxserve.simulator.capacity import Crossing
from jaxserve.simulator.group_table import aligned, group_lines
from jaxserve.simulator.simulate.spread import LEVEL, half_width, mean
from jaxserve.simulator.simulate.sweep import Point, Ratios

_COLUMNS = {  # title, format, and explanation
    "latency_s": (
        "batches, s",
        "{:.3f}",
        "what all batches of the busiest replica took, idle time left out (InferMax's latency)",
    ),
    "makespan_s": ("makespan, s", "{:.3f}", "from the first arrival to the last token"),
    "tps": ("tokens/s", "{:.1f}", "output tokens over batches, s"),
    "mean_ttft_s": ("TTFT, s", "{:.4f}", "mean time from arrival to the first token"),
    "mean_tpot_s": ("TPOT, s", "{:.5f}", "mean time of a token after the first"),
    "num_batches": ("batches", "{:.0f}", "how many steps there were"),
    "num_preemptions": ("preemptions", "{:.0f}", "requests that lost their cache to others"),
    "num_moves": ("moves", "{:.0f}", "of requests to other replicas, while their own were well"),
    "num_refused": ("refused", "{:.0f}", "requests that were not taken"),
    "num_failed": ("failed", "{:.0f}", "requests that ended with their replica"),
    "num_dropped": ("dropped", "{:.0f}", "requests that were left out, as too long"),
    "saved_slots": ("slots saved", "{:.0f}", "of caches, to host memory"),
    "loaded_slots": ("slots loaded", "{:.0f}", "and back"),
    "mean_shared_blocks": ("shared blocks", "{:.1f}", "mean of those that several requests hold"),
    "slo_attainment": (
        "SLO",
        "{:.1%}",
        "share of those with targets within all of them, by a server's verdict",
    ),
    "goodput_per_s": ("goodput/s", "{:.2f}", "requests within all of their targets, a second"),
    "goodput_bound_per_s": ("at most", "{:.2f}", "goodput that no schedule exceeds, of oracle"),
    "search_runs": ("tried", "{:.0f}", "schedules, of oracle"),
}
PROGRAM_COLUMNS = (  # title, format, and where in the summary
    ("begun", "{:.0f}", "begun"),
    ("finished", "{:.0f}", "finished"),
    ("given up", "{:.0f}", "given_up"),
    ("in time", "{:.1%}", "attainment"),
    ("makespan mean, s", "{:.2f}", "makespan_s", "mean"),
    ("P95, s", "{:.2f}", "makespan_s", "p95"),
    ("slowdown mean", "{:.3f}", "slowdown", "mean"),
    ("P95", "{:.3f}", "slowdown", "p95"),
    ("in progress", "{:.1f}", "in_progress"),
)
_IF_ANY = (
    *("num_moves", "num_refused", "num_failed", "num_dropped", "saved_slots", "loaded_slots"),
    "mean_shared_blocks",
)
_RATIO = "{:.3f}"


def columns() -> str:
    """An explanation of the columns, one line each."""
    width = max(len(title) for title, _, _ in _COLUMNS.values())
    return "\n".join(
        ["columns of the table:"]
        + [f"  {title:<{width}}  {what}" for title, _, what in _COLUMNS.values()]
    )


def report(points: Sequence[Point], compared: Sequence[Ratios], seeds: range) -> str:
    """A table with a line per point, one with a line per compared pair, and one with a line per
    tier or class if there are several. seeds: the requested seeds."""
    lines = [
        [*_name(point.run.policy, point.run.rate), *_cells(point.mean, point.half_width)]
        for point in points
    ]
    tables = [_table(lines), *_notes(points, seeds)]
    if compared:
        ratios = []
        for one in compared:
            spread = mean(one.values), half_width(one.values)
            cells = [_cell(_RATIO, name, *spread) for name in _COLUMNS]
            ratios.append(_name(one.policy, one.rate) + cells)
        how = ", seed by seed" if any(len(one.values) > 1 for one in compared) else ""
        tables += ["", f"over {compared[0].to}{how}", _table(ratios)]
    for point in points:
        groups = group_lines(point.mean, point.half_width)
        if groups:
            tables += ["", _title(point), *groups]
    return "\n".join([*tables, *_programs(points)])


def capacity_report(found: Sequence[tuple[Point, Crossing]], level: float) -> str:
    """A table with a line per policy. found: the highest rate at which its attainment is at least
    the level, or where the search ended, with the numbers there."""
    lines = [["policy", "capacity, requests/s", "SLO"]]
    for point, capacity in found:
        attainment = _cell("{:.1%}", "slo_attainment", point.mean, point.half_width)
        lines.append([point.run.policy, f"{capacity.bound}{capacity.rate:g}", attainment])
    tables = [
        f"the highest rate at which {100 * level:.4g}% of the requests with targets attain their "
        f"SLO, {Rule.SERVER.value}",
        aligned(lines),
    ]
    for point, _ in found:
        groups = group_lines(point.mean, point.half_width)
        if groups:
            tables += ["", _title(point), *groups]
    return "\n".join(tables)


def _programs(points: Sequence[Point]) -> list[str]:
    """A table of the programs with a line per point; nothing if there are none."""
    lines = []
    for point in points:
        if (found := point.mean.get("programs")) is not None:
            spread = point.half_width.get("programs") or {}
            cells = [_nested(form, names, found, spread) for _, form, *names in PROGRAM_COLUMNS]
            lines.append(_name(point.run.policy, point.run.rate) + cells)
    if not lines:
        return []
    header = ["programs of", "rate", *(title for title, *_ in PROGRAM_COLUMNS)]
    return ["", aligned([header, *lines])]


def _nested(form: str, names: Sequence[str], found: Any, spread: Any) -> str:
    for name in names[:-1]:
        found, spread = found.get(name) or {}, spread.get(name) or {}
    return _cell(form, names[-1], found, spread)


def _name(policy: str, rate: float | None) -> list[str]:
    return [policy, "-" if rate is None else f"{rate:g}"]


def _title(point: Point) -> str:
    rate = "" if point.run.rate is None else f" at {point.run.rate:g}/s"
    return f"{point.run.policy}{rate}"


def _table(lines: list[list[str]]) -> str:
    """A table with a header. Columns with only `-` are left out."""
    header = ["policy", "rate", *(title for title, _, _ in _COLUMNS.values())]
    used = [i for i, column in enumerate(zip(*lines, strict=True)) if set(column) != {"-"}]
    return aligned([[line[i] for i in used] for line in [header, *lines]])


def _cells(means: dict[str, Any], widths: dict[str, Any]) -> list[str]:
    shown = {**means, **{name: means.get(name) or None for name in _IF_ANY}}
    return [_cell(form, name, shown, widths) for name, (_, form, _) in _COLUMNS.items()]


def _cell(form: str, name: str, means: dict[str, Any], widths: dict[str, Any]) -> str:
    value, width = means.get(name), widths.get(name)
    if value is None:
        return "-"
    return form.format(value) + ("" if width is None else f" ±{form.format(width)}")


def _notes(points: Sequence[Point], seeds: range) -> list[str]:
    """What the intervals are, which points have none, and which are too short."""
    several = [point for point in points if len(point.outcomes) > 1]
    fixed = [point.run.policy for point in points if not point.seed_matters]
    notes = []
    if several:
        notes.append(
            f"±: half of the {LEVEL:.0%} confidence interval of the mean over {len(seeds)} seeds, "
            f"{seeds[0]} to {seeds[-1]} (Student's t)"
        )
    if fixed and len(seeds) > 1:
        whom = "" if not several else f" of {', '.join(dict.fromkeys(fixed))}"
        each = " each" if len(points) > 1 else ""
        notes.append(f"one run{each}{whom}: nothing is drawn, so that a seed changes nothing")
    for rate, short in dict.fromkeys((p.run.rate, p.short) for p in points if p.short):
        notes.append(f"{'' if rate is None else f'at {rate:g}/s '}{short}")
    return notes
