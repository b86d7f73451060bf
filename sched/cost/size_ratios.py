"""How exactly steps of each compiled size are predicted."""

from __future__ import annotations

import math
from collections import deque

from jaxserve.sched.cost.cost_model import BatchFeatures

LAST = 7  # last steps of a size that count


class SizeRatios:
    """Measured over predicted time of steps by their compiled size: the median of the last ones.

    A linear model of all steps is slightly wrong at each size. Where two sizes are compared, as for
    drafts, the error may exceed the gain.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[bool, int], deque[float]] = {}

    def note(self, features: BatchFeatures, ratio: float) -> None:
        """Notes the ratio of a step.

        Args:
            features: Padded features of the step.
            ratio: Measured over predicted time.
        """
        singles = features.num_tokens == features.num_decodes + features.num_prefills
        size = bool(singles), int(features.padded_tokens)
        self._last.setdefault(size, deque(maxlen=LAST)).append(ratio)

    def of(self, size: int, *, singles: bool) -> float:
        """The ratio for this size, or for the nearest known one; 1 if none is known.

        Args:
            size: Padded tokens.
            singles: Whether each row has one token, which runs other programs.
        """
        found = self._last.get((singles, size))
        if found is None and self._last:
            found = min(
                self._last.items(),
                key=lambda one: (one[0][0] != singles, abs(math.log2(one[0][1] / size))),
            )[1]
        return 1.0 if found is None else sorted(found)[len(found) // 2]
