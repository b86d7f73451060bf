"""What a policy remembers by row of the table."""

from __future__ import annotations

import numpy as np

NOBODY = -1  # no request has this place in the order of arrival


def follow(column: np.ndarray, rows: int, value: float) -> np.ndarray:
    """The column, as long as the table is; new rows have the value."""
    more = rows - len(column)
    return np.append(column, np.full(more, value, column.dtype)) if more > 0 else column
