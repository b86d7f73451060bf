"""A request table as large as the live requests need."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cost.reachability import NOTHING, Alone
from jaxserve.sched.request import Request
from jaxserve.sched.row_columns import grow_columns
from jaxserve.sched.state.request_table import RequestTable

FIRST_ROWS = 64


def _columns() -> frozenset[str]:
    """The attributes of a table that have one entry per row."""
    small, large = vars(RequestTable(3)), vars(RequestTable(5))
    return frozenset(
        name
        for name, value in small.items()
        if isinstance(value, np.ndarray) and value.shape[:1] != large[name].shape[:1]
    )


class GrowingTable(RequestTable):
    """A request table that doubles when it is full, so that its size follows the live requests. It
    assigns rows in the order of a table of fixed size."""

    def add(self, request: Request, alone: Alone = NOTHING, reachable: Alone | None = None) -> int:
        """Gives the request a row and returns it, in a table twice the size if this one is full."""
        if not self.num_free:
            self._double()
        return super().add(request, alone, reachable)

    def _double(self) -> None:
        old, self.capacity = self.capacity, 2 * self.capacity
        grow_columns(self, self.capacity, **dict.fromkeys(_columns(), 0))
        self._free.extend(range(self.capacity - 1, old - 1, -1))
