"""Arrays with one entry per row of the request table, or of anything else that grows."""

from __future__ import annotations

from typing import Any

import numpy as np


def grow_columns(owner: Any, rows: int, **columns: Any) -> None:
    """Makes the owner's attributes of these names at least `rows` long.

    Args:
        owner: The object with the arrays.
        rows: Number of entries that each needs.
        columns: The name of each array, and the value of its new entries.
    """
    for name, value in columns.items():
        column = getattr(owner, name)
        if (more := rows - len(column)) > 0:
            new = np.full((more, *column.shape[1:]), value, column.dtype)
            setattr(owner, name, np.concatenate([column, new]))
