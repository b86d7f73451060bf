"""The picture of InferMax's Figure 15: requests by batches, and the cache beneath."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.simulator.optimal.replay import Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFILL, DECODE, PREEMPT = "#303030", "#b8b8b8", "#d62728"
HOLDS, MEMORY = "#eeeeee", "#1f77b4"
MAX_NUMBERED = 60  # most batches whose numbers are legible


def draw(axes: Axes, played: Replay, kv_tokens: int) -> None:
    """One box per request and batch: black for a (p)refill, grey for a decode, red for a
    preemption, pale while it only holds its cache; prefills are labelled with their tokens. Blue:
    tokens of cache in use, against kv_tokens, on the right axis."""
    batches, requests = played.kv.shape
    numbered = batches <= MAX_NUMBERED
    for j in range(batches):
        for i in range(requests):
            count = int(played.schedule.tokens[j, i])
            colour = _colour(played, j, i)
            if colour is None:
                continue
            axes.bar(j + 1, 0.8, 0.86, i + 0.6, color=colour, align="center")
            if numbered and count and not played.decoding[j, i]:
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
                axes.text(j + 1, i + 1, str(count), color="white", **style)
    axes.set_ylim(requests + 0.6, 0.4)
    axes.set_xlim(0.4, batches + 0.6)
    axes.set_yticks(np.arange(requests) + 1 if requests <= 20 else [1, requests])
    axes.set_ylabel("request")
    axes.set_xlabel("batch")
    memory = axes.twinx()
    edges = np.arange(batches + 1) + 0.5
    memory.stairs(played.kv_used, edges, color=MEMORY, linewidth=1.5)
    memory.axhline(kv_tokens, color=MEMORY, linewidth=0.8, linestyle=":")
    memory.set_ylim(0, 1.05 * kv_tokens)
    memory.set_ylabel("cached tokens", color=MEMORY)
    memory.tick_params(axis="y", colors=MEMORY)


def _colour(played: Replay, batch: int, request: int) -> str | None:
    if played.schedule.tokens[batch, request]:
        return DECODE if played.decoding[batch, request] else PREFILL
    if played.schedule.preempt[batch, request]:
        return PREEMPT
    return HOLDS if played.kv[batch, request] else None


def legend() -> list[Any]:
    """Matplotlib handles for the legend of `draw`."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=PREFILL, label="(p)refill, tokens"),
        Patch(color=DECODE, label="decode"),
        Patch(color=PREEMPT, label="preempted"),
        Patch(color=HOLDS, label="holds its cache"),
        Line2D([], [], color=MEMORY, label="cache in use; dotted: M"),
    ]


def save(path: str | Path, schedules: list[tuple[str, Replay]], kv_tokens: int) -> None:
    """Writes a picture with one panel per schedule, below each other, in the format of the path's
    suffix.

    schedules: (title, replay). kv_tokens: M, tokens of cache.
    """
    from matplotlib.figure import Figure

    batches = max(len(played.schedule) for _, played in schedules)
    width = min(max(0.3 * batches, 6.0), 14.0)
    height = sum(min(max(0.3 * len(p.workload), 1.2), 6.0) + 0.9 for _, p in schedules) + 0.6
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(schedules), squeeze=False)
    for axes, (title, played) in zip(panels[:, 0], schedules, strict=True):
        draw(axes, played, kv_tokens)
        axes.set_title(title, loc="left", fontsize=10)
    figure.legend(handles=legend(), ncols=3, loc="outside lower center", fontsize=8)
    figure.savefig(path, dpi=120)
