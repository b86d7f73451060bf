"""The league as a map: policies by workloads, goodput relative to the best policy's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxserve_lab.experiments.common.figures import save
from jaxserve_lab.experiments.league.collect import LOADS
from jaxserve_lab.experiments.league.standings import Point, Standings, label
from jaxserve_lab.experiments.league.workloads import SYSTEMS

COLOURS = "RdYlGn"
DPI = 80  # of a picture that is wide
PALE = (0.25, 0.85)  # shares between which a cell is pale, and its number black


def heat_map(path: Path, standings: Standings, system: str) -> None:
    """Draws goodput in percent of the best policy's, with a panel for each steady load."""
    from matplotlib.figure import Figure

    policies = standings.policies
    workloads = list(dict.fromkeys(point.workload for point in standings.where(system=system)))
    width = 3.0 + 0.33 * len(workloads) * len(LOADS)
    figure = Figure(figsize=(width, 1.6 + 0.2 * len(policies)), layout="constrained")
    panels = figure.subplots(1, len(LOADS), sharey=True, squeeze=False)[0]
    for axes, (load, times) in zip(panels, LOADS.items(), strict=True):
        shares = np.array(
            [
                [
                    standings.relative(Point(system, workload, load), policy)
                    for workload in workloads
                ]
                for policy in policies
            ]
        )
        axes.imshow(shares, cmap=COLOURS, vmin=0, vmax=1, aspect="auto")
        for row, column in np.ndindex(*shares.shape):
            share = float(shares[row, column])
            colour = "black" if PALE[0] <= share <= PALE[1] else "white"
            text = f"{100 * share:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
        axes.set_xticks(range(len(workloads)), workloads, fontsize=7, rotation=90)
        axes.set_title(f"{load}: {times:g} x", fontsize=8, loc="left")
    panels[0].set_yticks(range(len(policies)), [label(name) for name in policies], fontsize=7)
    figure.suptitle(
        f"{SYSTEMS[system]}: % of the best policy's goodput", fontsize=9, x=0.01, ha="left"
    )
    save(figure, path, DPI)
