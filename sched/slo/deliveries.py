"""Times between tokens if several come at once, like accepted drafts.

They come together because one step made them all. The time between deliveries is spread over the
tokens: n tokens at once, g seconds after the one before, count as n gaps of g / n each. A reader
who is shown them one by one at that pace never waits longer than for the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(gaps: Sequence[float]) -> list[float]:
    """The gaps between a request's tokens. gaps: seconds from each token to the next, 0 if they
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
    """`spread` for many requests.

    Args:
        gaps: float64 [n], seconds since the token before, of one request after the other.
        first: bool [n], which are requests' first tokens; results for these are meaningless.

    Returns:
        float64 [n].
    """
    begins = first | (gaps != 0)
    if begins.all():
        return gaps
    group = np.cumsum(begins) - 1
    shares = np.where(first, 0.0, gaps)[begins] / np.bincount(group)
    return np.asarray(shares[group])
