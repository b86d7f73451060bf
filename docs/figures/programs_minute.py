"""Draws an overloaded minute of agents under `sarathi` and `goodput`, as simulated, for
docs/programs.md.

    python docs/figures/programs_minute.py [FILE]

The agents of `jaxserve bench program-league` above saturation, without host memory. Writes
programs-minute.svg beside this file unless another is named. Needs matplotlib and the lab.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxserve_lab.experiments.programs.runs import ProgramCase, simulated
from jaxserve_lab.experiments.programs.timeline import Doing, spans

BEGIN, SECONDS = 235.0, 60.0
COLOURS = {  # later ones are drawn over earlier ones
    Doing.KEPT: "#b7d7a8",
    Doing.GIVEN_AWAY: "#f4cccc",
    Doing.PAUSED: "#e8a33d",
    Doing.WRITING: "#8fb8de",
    Doing.READING: "#1f4e79",
}
LATE = "#cc0000"


def draw(axes: Axes, policy: str) -> None:
    """A row a program that is in progress in that minute."""
    case = ProgramCase("agents", "above", host=False, policy=policy, retention="lru")
    result = simulated(case, record_rows=True)
    programs, end = result.programs, BEGIN + SECONDS
    assert programs is not None
    there = np.flatnonzero((programs.start < end) & (programs.end > BEGIN))
    place = {int(programs.number[one]): row for row, one in enumerate(there)}
    found = [one for one in spans(result) if one.program in place]
    for doing, colour in COLOURS.items():
        for program, _, since, until in (one for one in found if one.doing is doing):
            left, right = max(since, BEGIN) - BEGIN, min(until, end) - BEGIN
            if right > left:
                axes.barh(place[program], right - left, 0.8, left, color=colour, lw=0)
    for row, one in enumerate(there):
        late = max(programs.start[one] + programs.deadline[one], BEGIN) - BEGIN
        until = min(programs.end[one], end) - BEGIN
        if until > late:
            axes.barh(row + 0.44, until - late, 0.12, late, color=LATE, lw=0)
    axes.set(xlim=(0, SECONDS), ylim=(len(there) - 0.4, -0.6), yticks=range(len(there)))
    names = [
        f"{programs.number[one]}: {'in time' if programs.in_time[one] else 'missed'}"
        for one in there
    ]
    axes.set_yticklabels(names, fontsize=7)
    title = f"{policy}: {programs.in_time.mean():.0%} of all {len(programs)} programs in time"
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("seconds", fontsize=8)


def main(argv: Sequence[str]) -> None:
    """Writes the picture."""
    path = Path(argv[0]) if argv else Path(__file__).with_name("programs-minute.svg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxserve"
    figure = Figure(figsize=(10, 5), layout="constrained")
    for axes, policy in zip(figure.subplots(1, 2), ("sarathi", "goodput"), strict=True):
        draw(axes, policy)
    handles = [Patch(color=colour, label=str(doing)) for doing, colour in COLOURS.items()]
    handles.append(Patch(color=LATE, label="after the program's deadline"))
    figure.legend(handles=handles, ncols=3, loc="outside lower center", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
