"""Pictures of simulations: SLO attainment against rate, distributions, KV use, and who ran when.

Needs matplotlib (`pip install matplotlib`). Every function draws one figure and returns it; nothing
is shown, and no global state of pyplot is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.engine.pool_view import HIDDEN, PoolView, V
from jaxserve.sched.cache.cache_kinds import NOBODY
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import BatchRows

try:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ImportError as error:
    raise ValueError("figures need matplotlib: pip install matplotlib") from error

VIEWS = ("attainment", "cdf", "kv", "schedule")
PREFILL, DECODE, PREEMPT, MEMORY = "#1a1a1a", "#b8b8b8", "#d62728", "#1f77b4"
MAX_CELLS = 200_000
MAX_POINTS = 2000
Results = Sequence[tuple[str, SimulationResult]]


def draw_all(
    folder: Path,
    summaries: Sequence[dict[str, Any]],
    results: Results,
    views: Sequence[str] | None = None,
    spread: Sequence[float | None] | None = None,
) -> list[Path]:
    """Writes figures as PNG, and returns their paths.

    Args:
        folder: Where they go; made if missing.
        summaries: One per run: `policy`, `rate` and the values of `SimulationResult.summary`.
        results: (name, result) of the same runs. A name is "policy" or "policy at rate".
        views: Names of VIEWS; None for all but the schedules. Attainment is drawn only over several
        rates.
        spread: Spread of the attainment, see `attainment`.

    Raises:
        ValueError: A view is unknown, or a schedule too large to be drawn.
    """
    check_views(views)
    wanted = list(views or ("attainment", "cdf", "kv"))
    figures: dict[str, Figure] = {}
    if "attainment" in wanted and len({s["rate"] for s in summaries}) > 1:
        figures["attainment"] = attainment(summaries, spread)
    if "cdf" in wanted:
        figures["cdf"] = cdfs(results)
    if "kv" in wanted:
        figures["kv"] = kv_over_time(results)
    if "schedule" in wanted:
        for number, (name, result) in enumerate(results):
            suffix = f"-{number}" if len(results) > 1 else ""
            figures[f"schedule{suffix}"] = schedule(result, title=name)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
        paths.append(path)
    return paths


def check_views(views: Sequence[str] | None) -> None:
    """ValueError for an unknown view; None stands for the default ones."""
    unknown = [view for view in views or () if view not in VIEWS]
    if unknown:
        raise ValueError(f"there is no view {unknown[0]!r}; known: {', '.join(VIEWS)}")


def attainment(
    summaries: Sequence[dict[str, Any]], spread: Sequence[float | None] | None = None
) -> Figure:
    """Share of requests within their SLO, in percent, against the request rate per second; a line
    per policy. summaries: see `draw_all`. spread: half the width of each point's interval, drawn as
    a bar; None for none."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    bars = [None] * len(summaries) if spread is None else spread
    for i, policy in enumerate(dict.fromkeys(s["policy"] for s in summaries)):
        points = sorted(
            (s["rate"], 100 * s["slo_attainment"], 100 * (bar or 0.0))
            for s, bar in zip(summaries, bars, strict=True)
            if s["policy"] == policy and s["slo_attainment"] is not None
        )
        if not points:
            continue
        rates, percent, around = zip(*points, strict=True)
        # Coinciding lines stay visible, since later ones are thinner.
        width, size = max(0.9, 3.4 - 0.8 * i), max(3.0, 10.0 - 2.0 * i)
        look: dict[str, Any] = {"marker": _MARKERS[i % len(_MARKERS)], "lw": width, "ms": size}
        ends = around if any(around) else None
        axes.errorbar(rates, percent, ends, label=policy, elinewidth=0.9, capsize=3, **look)
    axes.set(xlabel="requests per second", ylabel="requests within their SLO, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    return figure


def attainment_by_replicas(
    lines: Mapping[str, Sequence[tuple[int, float]]], share: float
) -> Figure:
    """Share of requests within their targets against the number of replicas.

    Args:
        lines: Replicas and shares, by name.
        share: What is enough, drawn as a line.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for i, (name, points) in enumerate(lines.items()):
        counts, shares = [n for n, _ in points], [100 * share for _, share in points]
        axes.plot(counts, shares, label=name, marker=_MARKERS[i % len(_MARKERS)])
    axes.axhline(100 * share, color="#888888", lw=0.9, ls="--")
    axes.set(xlabel="replicas", ylabel="requests within their targets, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure


def cdfs(results: Results) -> Figure:
    """Distributions of TTFT and of all times between tokens, in seconds on log axes: a colour per
    policy, a dash style per rate."""
    figure = Figure(figsize=(10.8, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, result in results:
        color, dash = _style(name, results)
        ttft = result.requests.ttft
        _cdf(left, ttft[np.isfinite(ttft)], name, color, dash)
        _cdf(right, result.requests.tbt[0], name, color, dash)
    left.set(xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1.01))
    right.set(xlabel="time between tokens, s", ylabel="share of tokens")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


def kv_over_time(results: Results) -> Figure:
    """Share of the KV cache in use, in percent, over seconds: axes per policy, a line per rate and
    replica."""
    policies = list(dict.fromkeys(_policy(name) for name, _ in results))
    figure = Figure(figsize=(8.4, 0.7 + 1.8 * len(policies)), layout="constrained")
    grid = figure.subplots(len(policies), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, policy in zip(grid, policies, strict=True):
        mine = [(name, result) for name, result in results if _policy(name) == policy]
        for name, result in mine:
            batches = result.batches
            for replica in range(int(batches.replica.max(initial=0)) + 1):
                rows = np.flatnonzero(batches.replica == replica)
                rows = rows[:: max(1, len(rows) // MAX_POINTS)]
                share = 100 * batches.kv_used[rows] / result.kv_tokens
                label = name if replica == 0 else None
                axes.plot(batches.start[rows], share, lw=0.9, label=label)
        axes.set(ylim=(0, None), ylabel="KV in use, %")
        axes.grid(alpha=0.3)
        if len(mine) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
        else:
            axes.set_title(mine[0][0], loc="left", fontsize=9)
    grid[-1].set_xlabel("seconds")
    return figure


def schedule(result: SimulationResult, title: str = "", replica: int = 0) -> Figure:
    """Requests x batches as in InferMax Figure 15: dark where a request prefills (or is refilled),
    grey where it decodes, red where it loses its cache, with the tokens of a prefill as text if
    there is room; below, the KV cache in use. For results with `record_rows`.

    ValueError if rows were not recorded, or there are too many to be drawn.
    """
    if result.rows is None:
        raise ValueError("the schedule view needs a simulation with record_rows")
    batches = result.rows[replica]
    count, width = len(result.requests), len(batches)
    if count * width > MAX_CELLS:
        raise ValueError(
            f"{count} requests x {width} batches are too many to be seen; at most {MAX_CELLS} "
            "cells are drawn"
        )
    cell = min(0.32, 12.0 / max(width, 1))
    height = min(0.32, 6.0 / max(count, 1))
    size = (max(5.0, 1.3 + cell * width), 2.6 + height * count)
    figure = Figure(figsize=size, layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(0.6, height * count), 1.1])
    _boxes(top, batches, lines=0.4 if cell > 0.1 else 0.0)
    if cell > 0.25:
        _write_prefills(top, batches)
    top.set(ylim=(count - 0.4, -0.6), ylabel="request", xlim=(-0.6, width - 0.4))
    step = max(1, count // 20)
    top.set_yticks(range(0, count, step))
    top.set_title(title, loc="left", fontsize=10)
    mine = result.batches.replica == replica
    below.step(np.arange(width), result.batches.kv_used[mine], where="mid", color=MEMORY)
    below.axhline(result.kv_tokens, color=MEMORY, ls="--", lw=0.8)
    below.text(
        width - 0.5, result.kv_tokens, "M", color=MEMORY, fontsize=8, ha="right", va="bottom"
    )
    below.set(ylim=(0, 1.3 * result.kv_tokens), xlabel="batch", ylabel="KV tokens")
    if width <= 40:
        below.set_xticks(range(0, width, 1 if width <= 20 else 5))
    figure.legend(
        handles=[
            Patch(color=PREFILL, label="prefill or refill"),
            Patch(color=DECODE, label="decode"),
            Patch(color=PREEMPT, label="preempted"),
            Line2D([], [], color=MEMORY, label="memory"),
        ],
        loc="outside upper right",
        ncols=4,
        fontsize=8,
        frameon=False,
        handlelength=1.2,
    )
    return figure


def block_pool(
    views: Sequence[tuple[str, PoolView]],
    colours: Mapping[str, Any] | None = None,
    columns: int = 64,
) -> Figure:
    """The block pool at some moments, a box per block: filled from the left or the right end as far
    as its slots are in use, in a paler tint where they are not, grey if it is free. V is darker
    than K; hidden vectors have a dark bar at their top.

    Args:
        views: (title, state of the pool), drawn below each other.
        colours: By request; None for a few colours in turn.
        columns: Blocks side by side.
    """
    rows = [-(-len(view.plane) // columns) for _, view in views]
    size = (0.16 * columns, sum(0.13 * count + 0.45 for count in rows))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(views), squeeze=False, height_ratios=rows)[:, 0]
    for axes, (title, view) in zip(grid, views, strict=True):
        axes.imshow(_pool_picture(view, colours, columns), interpolation="nearest", aspect="auto")
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_axis_off()
    return figure


def _pool_picture(view: PoolView, colours: Mapping[str, Any] | None, columns: int) -> np.ndarray:
    """Red, green and blue, [rows x height, columns x width, 3]."""
    width, height = 16, 12  # of a block, in pixels, including a white line
    count = len(view.plane)
    boxes = np.ones((-(-count // columns) * columns, height, width, 3))
    boxes[:count, 1:, 1:] = 0.92
    turn = [f"C{i}" for i in range(10)]
    for block in np.flatnonzero(view.used).tolist():
        for end, owner in enumerate(view.owner[:, block].tolist()):
            if owner == NOBODY:
                continue
            named = turn[owner % 10] if colours is None else colours[view.requests[owner]]
            colour = np.array(to_rgb(named))
            if view.plane[block] == V:
                colour = 0.72 * colour
            inside = boxes[block, 1:, 1:]
            alone = view.owner[1 - end, block] == NOBODY
            if alone:
                inside[:] = 0.3 * colour + 0.7
            used = round(view.fill[end, block] * (width - 1))
            inside[:, width - 1 - used if end else 0 : None if end else used] = colour
        if view.plane[block] == HIDDEN:
            boxes[block, 1:4, 1:] *= 0.35
    grid = boxes.reshape(-1, columns, height, width, 3).swapaxes(1, 2)
    return np.asarray(grid.reshape(-1, columns * width, 3))


def _boxes(axes: Axes, batches: Sequence[BatchRows], lines: float) -> None:
    corners: dict[str, list[tuple[float, float]]] = {PREFILL: [], DECODE: [], PREEMPT: []}
    for x, batch in enumerate(batches):
        for color, who in (
            (PREFILL, batch.requests[~batch.decoding]),
            (DECODE, batch.requests[batch.decoding]),
            (PREEMPT, batch.preempted),
        ):
            corners[color] += [(x, y) for y in who.tolist()]
    for color, at in corners.items():
        if at:
            xy = np.array(at, float)[:, None, :]
            box = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
            axes.add_collection(
                PolyCollection(xy + box, facecolors=color, edgecolors="white", linewidths=lines)
            )


def _write_prefills(axes: Axes, batches: Sequence[BatchRows]) -> None:
    for x, batch in enumerate(batches):
        chunks = ~batch.decoding
        pairs = zip(batch.requests[chunks].tolist(), batch.tokens[chunks].tolist(), strict=True)
        for y, tokens in pairs:
            axes.text(x, y, str(tokens), color="white", fontsize=6, ha="center", va="center")


def _policy(name: str) -> str:
    return name.partition(" at ")[0]


def _style(name: str, results: Results) -> tuple[str, Any]:
    """Colour and dashes of a result."""
    policies, rates = ([other.partition(" at ")[part] for other, _ in results] for part in (0, 2))
    policy, _, rate = name.partition(" at ")
    color = f"C{list(dict.fromkeys(policies)).index(policy) % 10}"
    return color, _LINES[list(dict.fromkeys(rates)).index(rate) % len(_LINES)]


def _cdf(axes: Axes, values: np.ndarray, name: str, color: str, dash: Any) -> None:
    if not len(values):
        return
    values = np.sort(values)
    share = np.arange(1, len(values) + 1) / len(values)
    few = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS).astype(int))
    axes.plot(np.maximum(values[few], 1e-6), share[few], color=color, ls=dash, lw=1.2, label=name)


_MARKERS = "osD^v<>P*X"
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))
