"""How many tokens a batch may have: the pivot forward size, and Eq. 6 (AccelGen section 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.saturation import flat_from
from jaxserve.sched.policy import View

SIZES = 256  # sizes that are tried
EVERY = 256  # plans between updates, since a learning model changes slowly


@dataclass(frozen=True)
class Pivot:
    """The batch size from which throughput hardly grows.

    Attributes:
        size: S_pf, tokens.
        seconds: T_pf, the time of a batch of that size.
        most: Most tokens of any batch.
    """

    size: int
    seconds: float
    most: int

    @classmethod
    def find(cls, view: View, size: int | None = None) -> Pivot:
        """Finds the fewest tokens of one prompt with nearly the best throughput up to
        max_batch_tokens (`saturation.flat_from`). size: used instead, if given."""
        most = view.limits.max_batch_tokens
        if size is not None:
            sizes = np.array([min(size, most)])
        else:
            sizes = np.geomspace(1, most, SIZES).round().astype(np.int64)
            if view.padding is not None:  # throughput has its peaks at full buckets
                sizes = np.append(sizes, np.minimum(view.padding.tokens, most))
            sizes = np.unique(sizes)
        prompt = BatchFeatures(sizes, sizes, 0, 0, sizes**2, 1, 0)
        seconds = np.broadcast_to(view.step_time(prompt), sizes.shape)
        first = flat_from(sizes, seconds)
        return cls(int(sizes[first]), float(seconds[first]), most)

    def budget(self, slo: Any) -> Any:
        """S_b, the tokens of a batch whose strictest iteration may take `slo` seconds (Eq. 6): from
        1 to `most`. A number or an array."""
        share = np.divide(slo, self.seconds) if self.seconds else np.full_like(slo, np.inf)
        tokens = np.minimum(self.size * share, self.most)
        return np.maximum(tokens, 1.0).astype(np.int64)


class Gauge:
    """Updates the pivot every EVERY plans. size: the policy's own; None to find it."""

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._plans = 0
        self._pivot: Pivot | None = None

    def read(self, view: View) -> Pivot:
        """The pivot; called once a plan."""
        if self._pivot is None or self._plans % EVERY == 0:
            self._pivot = Pivot.find(view, self._size)
        self._plans += 1
        return self._pivot
