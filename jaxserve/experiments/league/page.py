"""The page of a league: its words are a template beside this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxserve.experiments.common.page import render
from jaxserve.experiments.league import tables
from jaxserve.experiments.league.collect import LOADS, Scale
from jaxserve.experiments.league.heat import heat_map
from jaxserve.experiments.league.reading import advice, reading
from jaxserve.experiments.league.runs import LEVEL, REFERENCES, ROWS
from jaxserve.experiments.league.standings import Standings
from jaxserve.experiments.league.workloads import LONGEST, SLACK, SYSTEMS, WORKLOADS


def write_page(
    standings: Standings, scale: Scale, traces: Sequence[str], out: Path, *, whole: bool
) -> Path:
    """Writes league.md and its figures into the folder; its path. traces: workloads that are an
    hour's own requests. whole: every policy and workload is in it, and none of one's own, so that
    what the page says of all of them is said; ValueError where the numbers do not carry it."""
    figures = {}
    for system in dict.fromkeys(point.system for point in standings.points):
        figures[system] = f"league-{'opt' if system.startswith('opt') else 'llama'}.png"
        heat_map(out / "figures" / figures[system], standings, system)
    workloads = [name for name in scale.workloads if standings.where(workload=name)]
    hours = [name for name in workloads if WORKLOADS[name].trace]
    text = render(
        __file__,
        {
            "standings": standings,
            "scale": scale,
            "traces": traces,
            "whole": whole,
            "tables": tables,
            "advice": advice,
            "reading": reading,
            "figures": figures,
            "machine": standings.found.machine,
            "workloads": workloads,
            "hours": hours,
            "drawn": [name for name in hours if name not in traces],
            "systems": SYSTEMS,
            "loads": LOADS,
            "others": [times for times in LOADS.values() if times != 1],
            "references": REFERENCES,
            "level": LEVEL,
            "longest": [LONGEST[system] for system in scale.systems],
            "rows": ROWS,
            "slack": SLACK,
        },
    )
    path = out / "league.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
