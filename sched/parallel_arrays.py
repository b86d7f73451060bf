"""Records of parallel arrays: what several properties of the same n things are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np


class ParallelArrays:
    """A dataclass of parallel arrays [n]. All fields but the first may be None."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, part: slice | np.ndarray) -> Self:
        """A slice of them, or those that a mask or indices choose."""
        return type(self)(*[None if a is None else a[part] for a in vars(self).values()])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenates several, at least one; an array must be in all of them."""
        if len(parts) == 1:
            return parts[0]
        return cls(*map(np.concatenate, zip(*(vars(p).values() for p in parts), strict=True)))
