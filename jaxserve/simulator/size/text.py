"""The answer as text, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.simulator.group_table import aligned
from jaxserve.simulator.simulate.sweep import Point
from jaxserve.simulator.size.sizing import Goal, Size, within


@dataclass(frozen=True)
class Answer:
    """How many replicas are needed.

    Attributes:
        rate: Requests/s of all of them.
        goal: What is enough.
        sizes: By how much longer steps take, 1 among them.
        error: How far steps may be off, as a share.
        most: Most replicas that were tried.
    """

    rate: float
    goal: Goal
    sizes: Mapping[float, Size]
    error: float
    most: int

    @property
    def size(self) -> Size:
        """With steps as they are predicted."""
        return self.sizes[1.0]

    @property
    def between(self) -> tuple[int | None, int | None]:
        """The least and the most replicas needed if steps are off; None for more than `most`."""
        return within(list(self.sizes.values()))


def report(answer: Answer) -> str:
    """For people."""
    size, run = answer.size, answer.size.tried[0].run
    lines = [
        f"{run.system_name}, {run.policy}, {answer.rate:g} requests/s of "
        f"{run.workload.lengths}, {run.routing.name} routing",
        "",
        _table(size),
        "",
    ]
    if size.replicas is None:
        lines.append(f"{answer.most} replicas are not enough: {_worst(answer)}")
    else:
        least, most = answer.between
        if answer.error:
            many = f"more than {answer.most}" if most is None else str(most)
            lines.append(
                f"{size.replicas} replicas, or {least} to {many} if steps take "
                f"{answer.error:.0%} less or more time than predicted"
            )
        else:
            lines.append(f"{size.replicas} replicas")
        fewer = size.points.get(size.replicas - 1)
        if fewer is not None:
            lines.append(f"with {fewer.run.replicas}: {answer.goal.problem(fewer)}")
    short = size.tried[-1].short
    return "\n".join([*lines, *([f"doubtful: {short}"] if short else [])])


def _worst(answer: Answer) -> str:
    return answer.goal.problem(answer.size.tried[-1])


def _table(size: Size) -> str:
    rows = [("replicas", "within targets", "P99 TTFT, ms", "P99 TBT, ms", "of the cache")]
    for point in size.tried:
        mean, half = point.mean, point.half_width
        share = mean["slo_attainment"]
        around = half["slo_attainment"]
        rows.append(
            (
                str(point.run.replicas),
                "-"
                if share is None
                else f"{share:.1%}" + ("" if around is None else f" ±{around:.1%}"),
                _ms(point, "ttft_ms"),
                _ms(point, "tbt_ms"),
                f"{mean['mean_kv_used'] or 0:.0%}",
            )
        )
    return aligned(rows)


def _ms(point: Point, name: str) -> str:
    found = (point.mean[name] or {}).get("p99")
    return "-" if found is None else f"{found:.0f}"


def as_json(answer: Answer) -> dict[str, Any]:
    """Ready for JSON."""
    least, most = answer.between
    return {
        "replicas": answer.size.replicas,
        "least": least,
        "most": most,
        "error": answer.error,
        "rate": answer.rate,
        "goal": {
            "share": answer.goal.share,
            "ttft_p99_s": answer.goal.ttft_p99,
            "tbt_p99_s": answer.goal.tbt_p99,
        },
        "points": [point.as_json() for point in answer.size.tried],
        "by_steps": {f"{factor:g}": one.replicas for factor, one in answer.sizes.items()},
    }


def draw(answer: Answer, path: Path) -> None:
    """Attainment by replicas, a line for each length of steps. ValueError without matplotlib."""
    from jaxserve.simulator.figures.plots import attainment_by_replicas

    lines = {
        _named(factor): [
            (point.run.replicas, point.mean["slo_attainment"])
            for point in one.tried
            if point.mean["slo_attainment"] is not None
        ]
        for factor, one in sorted(answer.sizes.items())
    }
    attainment_by_replicas(lines, answer.goal.share).savefig(path, dpi=150)


def _named(factor: float) -> str:
    return "as predicted" if factor == 1.0 else f"steps x {factor:.2f}"
