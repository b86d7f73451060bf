"""The page of a league, and its figures; page.md.j2 has its words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxserve_lab.experiments.common.page import rendered
from jaxserve_lab.experiments.league.collect import LOADS, Scale
from jaxserve_lab.experiments.league.heat import heat_map
from jaxserve_lab.experiments.league.reading import advice, reading
from jaxserve_lab.experiments.league.runs import FURTHER, LEVEL, ROWS, STEADY
from jaxserve_lab.experiments.league.standings import Standings
from jaxserve_lab.experiments.league.tables import (
    against_others,
    overall,
    settings,
    winners,
)
from jaxserve_lab.experiments.league.workloads import LASTING, LONGEST, SLACK, SYSTEMS, WORKLOADS

COMMAND = "jaxserve bench league"


def write_page(
    standings: Standings, scale: Scale, traces: Sequence[str], out: Path, *, whole: bool
) -> Path:
    """Writes league.md and its figures, and returns the page's path.

    Args:
        standings: The numbers.
        scale: How much was run.
        traces: Workloads that come from a trace, not drawn.
        out: The folder to write to.
        whole: Whether every policy and workload is in it, and none of the user's own. Only then
            does the page draw conclusions.

    Raises:
        ValueError: The numbers do not support a conclusion of the page.
    """
    workloads = [name for name in scale.workloads if standings.where(workload=name)]
    hours = [name for name in workloads if WORKLOADS[name].trace]
    pictures = {
        system: f"league-{'opt' if system.startswith('opt') else 'llama'}.png"
        for system in dict.fromkeys(point.system for point in standings.points)
    }
    text = rendered(
        Path(__file__).parent,
        command=COMMAND,
        standings=standings,
        whole=whole,
        advice=advice(standings) if whole else "",
        claims=list(reading(standings)) if whole else [],
        where=standings.found.machine,
        scale=scale,
        pictures=pictures,
        systems=SYSTEMS,
        best=standings.ranked(standings.points)[0],
        lasting=[
            f"{name} on {SYSTEMS[system].partition(' on ')[0]}"
            for system, name in scale.places()
            if system in WORKLOADS[name].lasting
        ],
        overload=", then ".join(
            f"{scale.lasting * seconds:g} s at {times:g} times the rate"
            for seconds, times in LASTING
        ),
        others=[f"{times:g}" for times in LOADS.values() if times != 1],
        longest_trace=max(scale.seconds * WORKLOADS[name].longer for name in scale.workloads),
        further=[*STEADY, *FURTHER],
        level=LEVEL,
        longest=[LONGEST[system] for system in scale.systems],
        rows=ROWS,
        slack=SLACK,
        workloads=workloads,
        traces=traces,
        hours=hours,
        drawn=[name for name in hours if name not in traces],
        winners=winners,
        overall=overall,
        against_others=against_others,
        settings=settings,
    )
    for system, name in pictures.items():
        heat_map(out / "figures" / name, standings, system)
    path = out / "league.md"
    path.write_text(text, encoding="utf-8")
    return path
