"""The rows of a table in one state, in an order that is maintained instead of sorted again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Keys = Callable[[np.ndarray], np.ndarray]


class OrderedRows:
    """Rows in `state`, ordered by distinct keys that do not change while the row is in that state.
    stale: whether any has come or gone since the last query.

    Changes are tracked only from the first query on, and not if the last query was long ago."""

    def __init__(self, state: int) -> None:
        self.state, self.stale = state, True
        self._rows: np.ndarray | None = None
        self._joined: list[np.ndarray] = []

    def join(self, rows: np.ndarray) -> None:
        """Notes that these rows have entered the state."""
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
        """Merges the previous rows, which were in order, and those that have joined."""
        if self._rows is None:
            every = np.flatnonzero(column == self.state)
            return every[np.argsort(keys(every))]
        rows = self._rows
        if not self._joined:
            return rows[column[rows] == self.state]
        new = self._joined[0] if len(self._joined) == 1 else np.concatenate(self._joined)
        new = new[column[new] == self.state]
        # A row may have left and come back, with the same request or another one.
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
        return rows[np.argsort(keys(rows), kind="stable")]  # fast for two ordered parts
