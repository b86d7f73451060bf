"""The rows of a table in one state, in an order that is maintained instead of sorted anew."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Keys = Callable[[np.ndarray], np.ndarray]


class OrderedRows:
    """Rows in `state`, by keys that no two of them share and that stay as they are while the row is
    in that state. stale: whether any has come or gone since it was asked.

    Nothing is noted before it is asked for the first time, or where nobody asks for long."""

    def __init__(self, state: int) -> None:
        self.state, self.stale = state, True
        self._rows: np.ndarray | None = None
        self._joined: list[np.ndarray] = []

    def join(self, rows: np.ndarray) -> None:
        """They are in the state from now on."""
        self.stale = True
        if self._rows is not None:
            self._joined.append(rows)
            if len(self._joined) > len(self._rows) + 1000:
                self._rows, self._joined = None, []

    def rows(self, column: np.ndarray, keys: Keys) -> np.ndarray:
        """The rows, int64 [n], smallest key first; the same array as long as they are the same.
        column [rows of the table]: the state of each. keys: rows to numbers [n]."""
        if self.stale or self._rows is None:
            self._rows = self._after(column, keys)
            self._joined, self.stale = [], False
        return self._rows

    def _after(self, column: np.ndarray, keys: Keys) -> np.ndarray:
        """From those of before, who were in order, and those who have joined."""
        if self._rows is None:
            every = np.flatnonzero(column == self.state)
            return every[np.argsort(keys(every))]
        rows = self._rows
        if not self._joined:
            return rows[column[rows] == self.state]
        new = self._joined[0] if len(self._joined) == 1 else np.concatenate(self._joined)
        new = new[column[new] == self.state]
        # A row may have left and come back meanwhile, as itself or as another request.
        column[new] = -1
        rows = rows[column[rows] == self.state]
        column[new] = self.state
        key = keys(new)
        if len(new) > 1:
            order = np.argsort(key, kind="stable")
            new, key = new[order], key[order]
            if len(self._joined) > 1:
                once = np.append(True, key[1:] != key[:-1])
                new, key = new[once], key[once]
        if not len(rows) or not len(new):
            return rows if len(rows) else new
        ends = rows[:: len(rows) - 1] if len(rows) > 1 else rows.repeat(2)
        first, last = key.searchsorted(keys(ends)).tolist()
        if first == last:
            return np.concatenate([new[:first], rows, new[first:]])
        rows = np.concatenate([rows, new])
        return rows[np.argsort(keys(rows), kind="stable")]  # quick, of two that are in order
