"""Records of parallel arrays: several properties of the same n things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np


class ParallelArrays:
    """A dataclass of parallel arrays [n]. All fields but the first may be None."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, part: slice | np.ndarray) -> Self:
        """The selected part: a slice, a mask or indices."""
        return type(self)(*[None if a is None else a[part] for a in vars(self).values()])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenates at least one record; optional arrays must be in all of them or in none."""
        if len(parts) == 1:
            return parts[0]
        return cls(*map(np.concatenate, zip(*(vars(p).values() for p in parts), strict=True)))
