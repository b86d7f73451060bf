"""Line charts of the experiments, all in one style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "vllm": "#1f77b4",
    "sarathi": "#ff7f0e",
    "sarathi_pc": "#2ca02c",
    "sarathi_nohy": "#9467bd",
    "rank_org": "#7f7f7f",
    "rank_i": "#d62728",
    "rank_o": "#17becf",
    "fastgen": "#2ca02c",
    "aptserve": "#d62728",
    "aptserve, absorbed": "#9467bd",
    "aptserve_kv": "#17becf",
    "aptserve_fcfs": "#7f7f7f",
    "aptserve_s": "#8c564b",
    "aptserve, decay 0.4": "#e377c2",
    "bros": "#d62728",
    "round_robin": "#7f7f7f",
    "priority": "#2ca02c",
    "edf": "#9467bd",
    "accelgen": "#d62728",
    "accelgen, as printed": "#e377c2",
    "orca": "#8c564b",
    "fastserve": "#7f7f7f",
    "infermax": "#17becf",
    "least_loaded": "#1f77b4",
    "two_choices": "#2ca02c",
    "slo": "#d62728",
}
DASHED = "+ef"
DPI = 110


@dataclass(frozen=True)
class Panel:
    """One chart, with a line for each policy.

    Attributes:
        title: Of the chart.
        y_label: What y is.
        lines: (x, y) by policy; a nan in y leaves a gap.
        log_y: Whether y is logarithmic.
        markers: Whether every point has a marker.
    """

    title: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_y: bool = False
    markers: bool = True


def panel(
    title: str,
    y_label: str,
    names: Iterable[str] | Mapping[str, str],
    x: Sequence[float],
    value: Callable[..., float],
    factor: float = 1.0,
    **how: Any,
) -> Panel:
    """A panel with a line for each name: value(name, x) over x.

    Args:
        title, y_label: As `Panel` has them.
        names: Names, or what to call each one's line, by name.
        x: Where to evaluate.
        value: Gives y from a name and an x.
        factor: Times x, as it is shown.
        **how: Other fields of `Panel`.
    """
    labels = names if isinstance(names, Mapping) else {name: name for name in names}
    shown = [factor * one for one in x]
    lines = {label: (shown, [value(name, one) for one in x]) for name, label in labels.items()}
    return Panel(title, y_label, lines, **how)


def chart(
    path: Path,
    panels: Sequence[Sequence[Panel | None]],
    x_label: str,
    dpi: int = DPI,
    *,
    log_x: bool = True,
) -> None:
    """Draws a grid of charts with one legend.

    Eviction-free variants are dashed. Lines that coincide stay visible: later ones are thinner.

    Args:
        path: The file to write.
        panels: Row by row; None leaves a place empty.
        x_label: What x is.
        dpi: Pixels an inch.
        log_x: Whether x is logarithmic.
    """
    from matplotlib.figure import Figure

    rows, columns = len(panels), max(map(len, panels))
    figure = Figure(figsize=(max(3.0 * columns, 5.0), 2.2 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    known: dict[str, Any] = {}
    for i, line in enumerate(panels):
        for place, panel in zip(grid[i], line, strict=True):
            if panel is None:
                place.set_axis_off()
                continue
            known |= _draw(place, panel, log_x)
            if i == rows - 1:
                place.set_xlabel(x_label, fontsize=8)
    figure.legend(known.values(), known.keys(), ncols=6, loc="outside lower center", fontsize=8)
    save(figure, path, dpi)


def _draw(axes: Axes, panel: Panel, log_x: bool) -> dict[str, Any]:
    """Draws one panel; returns its lines by name."""
    from matplotlib.ticker import FuncFormatter

    drawn = {}
    for number, (name, (x, y)) in enumerate(panel.lines.items()):
        drawn[name] = axes.plot(
            x,
            y,
            color=COLOURS[name.removesuffix(DASHED)],
            marker="." if panel.markers else None,
            markersize=max(3.0, 8.0 - 1.2 * number),
            linewidth=max(0.9, 2.4 - 0.35 * number),
            linestyle="--" if name.endswith(DASHED) else "-",
        )[0]
    if log_x:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.set_ylabel(panel.y_label, fontsize=8)
    axes.tick_params(which="both", labelsize=7)
    axes.grid(alpha=0.25)
    return drawn


def bars(path: Path, named: Mapping[str, float], y_label: str, form: str = "{:,.0f}") -> None:
    """Draws a bar chart.

    Args:
        path: The file to write.
        named: The bars' values, by name.
        y_label: What they are.
        form: Format of the values above the bars.
    """
    from matplotlib.figure import Figure

    names, values = list(named), list(named.values())
    figure = Figure(figsize=(1.0 + 0.95 * len(names), 3.0), layout="constrained")
    axes = figure.subplots()
    drawn = axes.bar(range(len(names)), values, color="#4c72b0")
    axes.bar_label(drawn, fmt=form, fontsize=8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.set_ylim(0, 1.1 * max(*values, 1e-9))
    axes.tick_params(axis="y", labelsize=7)
    save(figure, path)


def save(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Writes the figure in the format of the path's suffix, PNG or SVG. Makes the folder if
    missing. dpi: pixels an inch."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # Without version, date and drawn names in it, the same numbers give the same file.
    unsaid = ("Creator", "Date") if path.suffix == ".svg" else ("Software",)
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=dpi, metadata=dict.fromkeys(unsaid))
