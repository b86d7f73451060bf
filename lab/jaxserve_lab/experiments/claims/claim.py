"""A claim: what a paper says of one policy against others, and the runs that say it here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from statistics import fmean
from typing import Any

Point = dict[str, Any]  # what a page makes cases of, beside the policy
Places = dict[str, Point]  # by what they are called
Axis = Iterable[Any] | Callable[[Point], Iterable[Any]]


def places(label: str, called: Mapping[Any, str] | None = None, /, **axes: Axis) -> Places:
    """All combinations of the axes' values, the last one fastest.

    Args:
        label: A format of what each is called.
        called: What values are called in it.
        **axes: Values by name; or what gives those of an axis from the point so far.
    """
    points: list[Point] = [{}]
    for name, axis in axes.items():
        points = [
            {**at, name: value} for at in points for value in (axis(at) if callable(axis) else axis)
        ]
    return {titled(label, at, called or {}): at for at in points}


def titled(label: str, at: Point, called: Mapping[Any, str]) -> str:
    """What a point is called."""
    return label.format(**{name: called.get(value, value) for name, value in at.items()})


@dataclass(frozen=True)
class Form:
    """How two numbers are compared, and how that is written.

    Attributes:
        how: Compares two.
        text: Of what comes of it.
        mean: Of several such.
        size: Orders them.
    """

    how: Callable[[Any, Any], Any]
    text: Callable[[Any], str]
    mean: Callable[[Sequence[Any]], Any] = fmean
    size: Callable[[Any], float] = float


TIMES = Form(truediv, lambda value: f"{value:.3g}x" if value < 1000 else f"{value:,.0f}x")
FACTOR = Form(truediv, "{:.2f}x".format)
LESS = Form(lambda ours, theirs: theirs / ours, "{:.2f}x".format)
PERCENT = Form(truediv, lambda value: f"{value - 1:+.1%}")
CHANGE = Form(lambda ours, theirs: ours / theirs - 1, "{:+.0%}".format)
POINTS = Form(lambda ours, theirs: 100 * (ours - theirs), "{:+.1f}".format)


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what is compared to see whether it is so.

    Attributes:
        name: What the page's template calls it.
        paper: What the paper says.
        number: Of a run.
        ours, theirs: The policies compared; of several the one with most. A point may say `theirs`
            itself.
        where: Names the page's places.
        form: How they are compared.
    """

    name: str
    paper: Any
    number: str
    ours: str
    theirs: str | tuple[str, ...]
    where: str
    form: Form = TIMES
