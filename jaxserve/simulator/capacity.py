"""The rate up to which a system attains its SLO, found on a grid of rates that grows and gets finer
where the attainment falls through the given levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Attain = Callable[[int], float | None]


@dataclass(frozen=True)
class Grid:
    """A geometric grid of request rates, and the search on it: point i is 2^(i / steps) requests/s,
    rounded to three digits.

    Attributes:
        steps: Points for each doubling of the rate.
        stride: Points by which the range tried grows at a time.
        reach: Most points by which the range may grow from the first guess, in each direction.
    """

    steps: int
    stride: int
    reach: int

    def rate(self, index: int) -> float:
        """Requests/s."""
        return float(f"{2 ** (index / self.steps):.3g}")

    def nearest(self, rate: float) -> int:
        """The index of the point nearest to `rate` (requests/s, positive), by ratio."""
        return round(self.steps * math.log2(rate))

    def wanted(self, found: Mapping[int, float], start: int, levels: Sequence[float]) -> list[int]:
        """The points to try next.

        Args:
            found: Attainment by index, so far.
            start: Index of the first guess.
            levels: Attainments whose crossings are searched for.

        Returns:
            Ascending indices; empty once each level's crossing lies between two neighbours or out
            of reach.
        """
        if not found:
            return [start]
        return sorted({index for level in levels for index in self._next(found, start, level)})

    def tried(
        self, attain: Attain, start: int, levels: Sequence[float]
    ) -> tuple[dict[int, float], list[int]]:
        """Replays the search on the known points.

        Args:
            attain: Attainment by index, None if unknown.
            start: Index of the first guess.
            levels: Attainments whose crossings are searched for.

        Returns:
            The known attainments by index, and the indices that the search needs next.
        """
        found: dict[int, float] = {}
        while True:
            ahead = self.wanted(found, start, levels)
            new = {index: attain(index) for index in ahead}
            missing = [index for index, value in new.items() if value is None]
            if missing or not ahead:
                return found, missing
            found |= {index: value for index, value in new.items() if value is not None}

    def _next(self, found: Mapping[int, float], start: int, level: float) -> Iterator[int]:
        known = sorted(found)
        below = next((i for i in known if found[i] < level), None)
        if below is None:
            if known[-1] < start + self.reach:
                yield known[-1] + self.stride
            return
        above = [i for i in known if i < below]
        if not above:
            if below > start - self.reach:
                yield below - self.stride
        elif below - above[-1] > 1:
            yield (below + above[-1]) // 2


COARSE = Grid(steps=3, stride=2, reach=21)  # for lines to draw and to read between
FINE = Grid(steps=32, stride=32, reach=320)  # neighbours are 2.2% apart


@dataclass(frozen=True)
class Crossing:
    """The rate at which attainment falls below a level.

    Attributes:
        rate: Requests/s.
        bound: "" if the crossing was found between two rates, "<" if the lowest rate tried already
            misses the level, ">" if the highest attains it, "?" for a ratio or mean whose bounds
            contradict each other.
    """

    rate: float
    bound: str = ""

    def __str__(self) -> str:
        return f"{self.bound}{self.rate:.3g}"

    def times(self) -> str:
        """The crossing as a factor."""
        return "unknown" if self.bound == "?" else f"{self}x"


def sustained(points: Mapping[float, float], level: float) -> Crossing:
    """From attainments by rate: the highest rate before the first fall below the level."""
    rates = sorted(points)
    below = next((i for i, rate in enumerate(rates) if points[rate] < level), None)
    if below is None:
        return Crossing(rates[-1], ">")
    return Crossing(rates[below - 1]) if below else Crossing(rates[0], "<")


def crossing(points: Mapping[float, float], level: float) -> Crossing:
    """From attainments by rate: the first fall below the level, linear between its neighbours."""
    last = sustained(points, level)
    if last.bound:
        return last
    low, high = last.rate, min(rate for rate in points if rate > last.rate)
    share = (points[low] - level) / (points[low] - points[high])
    return Crossing(low + share * (high - low))


def ratio(above: Crossing, below: Crossing) -> Crossing:
    """above / below; a bound if either is a bound."""
    flipped = {"": "", "<": ">", ">": "<"}[below.bound]
    return Crossing(above.rate / below.rate, _joint((above.bound, flipped)))


def mean(found: Sequence[Crossing]) -> Crossing:
    """The mean rate; a bound if any rate is a bound."""
    rate = sum(one.rate for one in found) / len(found)
    return Crossing(rate, _joint([one.bound for one in found]))


def _joint(bounds: Sequence[str]) -> str:
    different = set(bounds) - {""}
    return "" if not different else different.pop() if len(different) == 1 else "?"
