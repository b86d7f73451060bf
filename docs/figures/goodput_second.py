"""Draws an overloaded second under `sarathi` and `goodput`, as simulated, for docs/goodput.md.

    python docs/figures/goodput_second.py [FILE]

Chats with ShareGPT's lengths on OPT-13B whose pool has room for some fifteen of them, at twice the
rate that it can serve. Writes goodput-second.svg beside this file unless another is named. Needs
matplotlib.
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

from jaxserve.sched.request import NO_CLASS
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import EngineOptions, RunOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.lengths import sampler
from jaxserve.simulator.workloads.workload import Workload, gamma_arrivals

BEGIN, SECONDS, RATE, COUNT, TOKENS = 12.0, 1.0, 5.0, 120, 4096
TTFT, TBT = 1.0, 0.2
COLOURS = {
    "prompt": "#1f4e79",
    "decode": "#8fb8de",
    "holds its cache, no token in this step": "#dfe6ec",
    "paused": "#e8a33d",
    "waits, the first token can be in time": "#d9ead3",
    "waits, too late": "#f4cccc",
}


def served(policy: str) -> SimulationResult:
    """The simulation of one policy."""
    rng = np.random.default_rng(3)
    lengths, one = sampler("sharegpt")(COUNT, rng), np.ones(COUNT)
    terms = SloColumns(
        np.zeros(COUNT, np.int8),
        *(TTFT * one, TBT * one, np.inf * one, np.inf * one),
        np.zeros(COUNT, np.int64),
        np.ones(COUNT, bool),
        (NO_CLASS,),
    )
    arrival = gamma_arrivals(RATE, 1.0, COUNT, rng)
    work = Workload.create(arrival, lengths, terms=terms)
    place = system("opt-13b@a100-40g")
    return simulate(
        policy,
        work,
        place,
        engine=EngineOptions(kv_tokens=TOKENS, host_tokens=TOKENS),
        run=RunOptions(record_rows=True, checked=False),
    )


def draw(axes: Axes, policy: str) -> None:
    """A row a request that is there in that second, a column a step."""
    result = served(policy)
    times, batches = result.requests.times, result.batches
    assert result.rows is not None
    arrival, left = result.requests.arrival, result.requests.left
    there = np.flatnonzero((arrival < BEGIN + SECONDS) & (left > BEGIN))
    place = {int(request): row for row, request in enumerate(there)}
    steps = zip(batches.start, batches.duration, result.rows[0], strict=True)
    wrote, holds = dict.fromkeys(place, False), dict.fromkeys(place, False)
    boxes: dict[int, list[tuple[str, float, float]]] = {row: [] for row in place.values()}
    for start, duration, rows in steps:
        for request in rows.preempted.tolist():
            holds[request] = False
        kinds = dict(zip(rows.requests.tolist(), rows.decoding.tolist(), strict=True))
        for request, row in place.items():
            if arrival[request] > start or left[request] <= start:
                continue
            if request in kinds:
                what, holds[request] = ("decode" if kinds[request] else "prompt"), True
                wrote[request] = True
            elif holds[request]:
                what = "holds its cache, no token in this step"
            elif wrote[request]:
                what = "paused"
            else:
                late = start > arrival[request] + TTFT
                what = "waits, too late" if late else "waits, the first token can be in time"
            if start + duration > BEGIN and start < BEGIN + SECONDS:
                begin = start - BEGIN
                if boxes[row] and boxes[row][-1][0] == what:  # one box of what goes on
                    begin = boxes[row].pop()[1]
                boxes[row].append((what, begin, start + duration - BEGIN))
    for row, parts in boxes.items():
        for what, begin, end in parts:
            axes.barh(row, end - begin, 0.84, begin, color=COLOURS[what], lw=0)
    met = result.attained[there]
    axes.set(xlim=(0, SECONDS), ylim=(len(there) - 0.4, -0.6), yticks=range(len(there)))
    axes.set_yticklabels(["in time" if one else "missed" for one in met], fontsize=6)
    axes.set_title(
        f"{policy}: {result.attained.mean():.0%} of all {len(times)} requests in time",
        loc="left",
        fontsize=9,
    )
    axes.set_xlabel("seconds", fontsize=8)


def main(argv: Sequence[str]) -> None:
    """Writes the picture."""
    path = Path(argv[0]) if argv else Path(__file__).with_name("goodput-second.svg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxserve"
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    for axes, policy in zip(figure.subplots(1, 2), ("sarathi", "goodput"), strict=True):
        draw(axes, policy)
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, ncols=3, loc="outside lower center", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
