"""What the runs came to, as tables for people."""

from __future__ import annotations

from typing import Any

from jaxserve.group_table import aligned, group_lines

_COLUMNS = {
    "policy": ("policy", "{}"),
    "rate": ("rate", "{:g}"),
    "latency_s": ("latency, s", "{:.3f}"),
    "makespan_s": ("makespan, s", "{:.3f}"),
    "tps": ("tokens/s", "{:.1f}"),
    "mean_ttft_s": ("TTFT, s", "{:.4f}"),
    "mean_tpot_s": ("TPOT, s", "{:.5f}"),
    "num_batches": ("batches", "{}"),
    "num_preemptions": ("preemptions", "{}"),
    "num_refused": ("refused", "{}"),
    "slo_attainment": ("SLO", "{:.1%}"),
}


def report(summaries: list[dict[str, Any]]) -> str:
    """A table with a line a run, and one with a line a tier or class where there is more than
    one."""
    names = [n for n in _COLUMNS if any(s[n] is not None for s in summaries)]
    lines = [[_COLUMNS[name][0] for name in names]]
    for summary in summaries:
        lines.append(
            ["-" if summary[n] is None else _COLUMNS[n][1].format(summary[n]) for n in names]
        )
    tables = [aligned(lines)]
    for summary in summaries:
        groups = group_lines(summary)
        if groups:
            rate = "" if summary["rate"] is None else f" at {summary['rate']:g}/s"
            tables += ["", f"{summary['policy']}{rate}", *groups]
    return "\n".join(tables)
