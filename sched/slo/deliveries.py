"""What the time between tokens means where several come at once, as drafts that were right do.

They came together because one step made them all. The time between deliveries is spread over what
came: n tokens at once, g seconds after the one before, are n times between tokens of g / n each. A
reader who shows them one by one at that pace never waits longer than he would have for the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(gaps: Sequence[float]) -> list[float]:
    """A request's times between tokens. gaps: seconds from each token to the next, 0 where they
    came at once."""
    if 0.0 not in gaps:
        return list(gaps)
    found: list[float] = []
    begin = 0
    for end in (*(i for i, gap in enumerate(gaps) if gap and i), len(gaps)):
        found += [gaps[begin] / (end - begin)] * (end - begin)
        begin = end
    return found


def spread_all(gaps: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The same of many requests.

    Args:
        gaps: float64 [n], seconds since the token before, of one request after the other.
        first: bool [n], which are requests' first tokens; what is returned for these means nothing.

    Returns:
        float64 [n].
    """
    begins = first | (gaps != 0)
    if begins.all():
        return gaps
    group = np.cumsum(begins) - 1
    shares = np.where(first, 0.0, gaps)[begins] / np.bincount(group)
    return np.asarray(shares[group])
