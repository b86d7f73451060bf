"""The simulator's table grows, and is the engine's but for that."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.request import Request, SamplingParams
from jaxserve.sched.simulation.replica.scheduler_state import FIRST_ROWS, GrowingTable
from jaxserve.sched.state.request_table import RequestTable, State

ROWS, WIDTH = 4, 6


def test_a_growing_table_gives_the_rows_of_a_large_one() -> None:
    growing, large = GrowingTable(FIRST_ROWS), RequestTable(8 * FIRST_ROWS)
    rng = np.random.default_rng(0)
    live: list[int] = []
    for i in range(6 * FIRST_ROWS):
        request = Request(str(i), (0,) * (i + 1), SamplingParams(max_tokens=i + 1))
        row = growing.add(request)
        assert row == large.add(request)
        live.append(row)
        if rng.random() < 0.3:
            gone = live.pop(int(rng.integers(len(live))))
            growing.remove(gone)
            large.remove(gone)
    assert growing.capacity > FIRST_ROWS
    rows = np.array(live)
    for name in ("prompt_len", "max_tokens", "seq", "state"):
        assert getattr(growing, name)[rows].tolist() == getattr(large, name)[rows].tolist()
    assert growing.in_state(State.WAITING).tolist() == large.in_state(State.WAITING).tolist()
