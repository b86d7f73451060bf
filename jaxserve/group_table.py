"""Numbers by tier and by class as lines of text, the same of a simulation and of a load test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADER = ("requests", "TTFT p50, p99, ms", "TBT p50, p99, ms", "e2e p50, p99, ms")
SLO_HEADER = ("SLO", "of TTFT", "of TBT", "of JCT", "goodput/s")


def group_lines(found: Mapping[str, Any]) -> list[str]:
    """A line a tier and a class, under a header; none where there is only one of either.

    found: with `tiers` and `classes` as `metrics.split_metrics` has them. Attainment is a share of
    the group's requests, goodput what attains its SLO a second.
    """
    rows = []
    for kind, groups in (("tier", found["tiers"]), ("class", found["classes"])):
        if len(groups) > 1:
            rows += [[f"{kind} {name}", *_cells(group)] for name, group in groups.items()]
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


def _cells(group: Mapping[str, Any]) -> list[str]:
    cells = [str(group["requests"])]
    for name in ("ttft_ms", "tbt_ms", "e2e_ms"):
        times = group[name]
        cells.append("-" if times is None else f"{times['p50']:.1f}, {times['p99']:.1f}")
    slo = group["slo"]
    if slo is None:
        return cells + ["-"] * len(SLO_HEADER)
    names = ("attainment", "ttft_attainment", "tbt_attainment", "jct_attainment")
    cells += [f"{slo[name]:.1%}" for name in names]
    goodput = slo["goodput_per_s"]
    return [*cells, "-" if goodput is None else f"{goodput:.2f}"]
