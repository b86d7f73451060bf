"""Draw the loss curve of a training log."""

from __future__ import annotations

import json
from pathlib import Path


def draw(log: Path, png: Path) -> None:
    """Draw the losses of `log` (a JSON object a line: step, loss) as the picture `png`."""
    import matplotlib  # only needed here, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    losses = {line["step"]: line["loss"] for line in lines}  # a resumed run may repeat steps
    plot, axes = pyplot.subplots(figsize=(6, 3.2), dpi=90, layout="constrained")
    axes.plot(list(losses), list(losses.values()))
    axes.set(xlabel="step", ylabel="loss (nats a token)", yscale="log")
    axes.grid(True, which="both", alpha=0.3)
    plot.savefig(png)
    pyplot.close(plot)
