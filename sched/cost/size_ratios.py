"""How exactly steps of each compiled size are predicted."""

from __future__ import annotations

import math
from collections import deque

from jaxserve.sched.cost.cost_model import BatchFeatures

LAST = 7  # steps of a size that count


class SizeRatios:
    """How many times its prediction a step took, by its compiled size: the median of the last ones.

    A linear model of all steps is a little wrong at each size. Where two sizes are compared, as for
    drafts, that may be more than what is won.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[bool, int], deque[float]] = {}

    def note(self, features: BatchFeatures, ratio: float) -> None:
        """A step took so many times its prediction.

        Args:
            features: Of the step, padded.
            ratio: Of the two times.
        """
        singles = features.num_tokens == features.num_decodes + features.num_prefills
        size = bool(singles), int(features.padded_tokens)
        self._last.setdefault(size, deque(maxlen=LAST)).append(ratio)

    def of(self, size: int, *, singles: bool) -> float:
        """Of steps of this size, or of the nearest known one; 1 where none is known.

        Args:
            size: Tokens, padded.
            singles: Whether each row has one token: other programs run then.
        """
        found = self._last.get((singles, size))
        if found is None and self._last:
            found = min(
                self._last.items(),
                key=lambda one: (one[0][0] != singles, abs(math.log2(one[0][1] / size))),
            )[1]
        return 1.0 if found is None else sorted(found)[len(found) // 2]
