"""Numbers by tier and by class as lines of text, for simulations and load tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.sched.slo.slo_columns import ALL_TARGETS

HEADER = ("requests", "ended/s", "TTFT p50, p99, ms", "TBT p50, p99, ms", "e2e p50, p99, ms")
SLO_HEADER = ("SLO", "of TTFT", "of TBT", "of JCT", "of gap", "goodput/s")


def group_lines(found: Mapping[str, Any], spread: Mapping[str, Any] | None = None) -> list[str]:
    """A line per tier and per class, under a header; none if there is only one of either.

    found: has `tiers` and `classes`, see `metrics.split_metrics`. Attainment is a share of the
        group's requests, goodput the requests per second that attain their SLO by a server's
        verdict. The gap is the longest time between two tokens. spread: half the width of each
        number's interval, nested like found, None for a number without.
    """
    rows = []
    for kind, key in (("tier", "tiers"), ("class", "classes")):
        if len(found[key]) > 1:
            for name, group in found[key].items():
                widths = None if spread is None else spread[key][name]
                rows.append([f"{kind} {name}", *_cells(group, widths)])
    if not rows:
        return []
    return aligned([["", *HEADER, *SLO_HEADER], *rows]).split("\n")


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table of cells as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of a page."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cells(group: Mapping[str, Any], spread: Mapping[str, Any] | None) -> list[str]:
    widths = spread or {}
    cells = [_cell("{:.0f}", group, widths, "requests")]
    cells.append(_cell("{:.2f}", group, widths, "finished_per_s"))
    for name in ("ttft_ms", "tbt_ms", "e2e_ms"):
        times, around = group[name], widths.get(name)
        both = (_cell("{:.1f}", times, around, quantile) for quantile in ("p50", "p99"))
        cells.append("-" if times is None else ", ".join(both))
    slo, around = group["slo"], widths.get("slo")
    if slo is None:
        return cells + ["-"] * len(SLO_HEADER)
    single = (f"{name}_attainment" for name in ALL_TARGETS)
    names = ("attainment", *single)
    cells += [_cell("{:.1%}", slo, around, name) for name in names]
    return [*cells, _cell("{:.2f}", slo, around, "goodput_per_s")]


def _cell(form: str, values: Mapping[str, Any], widths: Mapping[str, Any] | None, name: str) -> str:
    value, width = values[name], (widths or {}).get(name)
    if value is None:
        return "-"
    return form.format(value) + ("" if width is None else f" ±{form.format(width)}")
