"""The rate up to which a system attains its SLO: found on a grid of rates that grows and gets finer
where the attainment falls through the levels asked for, and read off between two neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

STEPS = 3  # of the grid to a doubling of the rate
STRIDE = 2  # steps by which the range grows
REACH = 7 * STEPS  # how far from the first guess it may grow, either way


def rate_at(index: int) -> float:
    """The grid: 2^(index / STEPS) requests/s, three digits."""
    return float(f"{2 ** (index / STEPS):.3g}")


@dataclass(frozen=True)
class Crossing:
    """The rate where attainment falls below a level, requests/s. bound: "" if it was found between
    two rates, "<" if the lowest rate tried already misses the level, ">" if the highest attains
    it. "?": a ratio of two bounds that say nothing."""

    rate: float
    bound: str = ""

    def __str__(self) -> str:
        return f"{self.bound}{self.rate:.3g}"

    def times(self) -> str:
        """As a factor."""
        return "unknown" if self.bound == "?" else f"{self}x"


def crossing(points: Mapping[float, float], level: float) -> Crossing:
    """From attainments by rate: the first fall below the level, linear between its neighbours."""
    rates = sorted(points)
    below = next((i for i, rate in enumerate(rates) if points[rate] < level), None)
    if below is None:
        return Crossing(rates[-1], ">")
    if below == 0:
        return Crossing(rates[0], "<")
    low, high = rates[below - 1], rates[below]
    share = (points[low] - level) / (points[low] - points[high])
    return Crossing(low + share * (high - low))


def wanted(found: Mapping[int, float], start: int, levels: Sequence[float]) -> list[int]:
    """Indices of the grid to try next, given attainments by index; none if every level's fall lies
    between two neighbours, or beyond reach. start: the first guess."""
    if not found:
        return [start]
    return sorted({index for level in levels for index in _next(found, start, level)})


def _next(found: Mapping[int, float], start: int, level: float) -> Iterator[int]:
    known = sorted(found)
    below = next((i for i in known if found[i] < level), None)
    if below is None:
        if known[-1] < start + REACH:
            yield known[-1] + STRIDE
        return
    above = [i for i in known if i < below]
    if not above:
        if below > start - REACH:
            yield below - STRIDE
    elif below - above[-1] > 1:
        yield (below + above[-1]) // 2


def ratio(above: Crossing, below: Crossing) -> Crossing:
    """How many times the one rate is of the other; a bound where one of them is one."""
    flipped = {"": "", "<": ">", ">": "<"}[below.bound]
    return Crossing(above.rate / below.rate, _joint((above.bound, flipped)))


def mean(found: Sequence[Crossing]) -> Crossing:
    """Their mean; a bound where one of them is one."""
    rate = sum(one.rate for one in found) / len(found)
    return Crossing(rate, _joint([one.bound for one in found]))


def _joint(bounds: Sequence[str]) -> str:
    different = set(bounds) - {""}
    return "" if not different else different.pop() if len(different) == 1 else "?"


Attain = Callable[[int], float | None]


def tried(
    attain: Attain, start: int, levels: Sequence[float]
) -> tuple[dict[int, float], list[int]]:
    """Replays the search on what is known: attainments by index, and the indices that are missing.
    attain: None where there is no number yet."""
    found: dict[int, float] = {}
    while True:
        ahead = wanted(found, start, levels)
        new = {index: attain(index) for index in ahead}
        missing = [index for index, value in new.items() if value is None]
        if missing or not ahead:
            return found, missing
        found |= {index: value for index, value in new.items() if value is not None}
