"""Rows of the request table by state: kept in order, whoever comes and goes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.request import Request
from jaxserve.sched.state.growing_table import GrowingTable
from jaxserve.sched.state.request_table import FREE, RUNNING, WAITING

MOVES = st.lists(
    st.tuples(st.sampled_from(["add", "start", "preempt", "end", "look"]), st.integers(0, 99)),
    max_size=60,
)


def one_of(rows: np.ndarray, number: int) -> np.ndarray:
    """Up to three of them, from somewhere on."""
    return rows[number % len(rows) :][:3] if len(rows) else rows


@settings(max_examples=150, deadline=None)
@given(MOVES)
def test_the_order_is_that_of_sorting_anew(moves: list[tuple[str, int]]) -> None:
    table, preempted = GrowingTable(4), 0
    for what, number in [*moves, ("look", 0)]:
        waiting, running = (np.flatnonzero(table.state == s) for s in (WAITING, RUNNING))
        if what == "add":
            table.add(Request("r", (1,)))
        elif what == "start":
            table.move(one_of(waiting, number), RUNNING)
        elif what == "preempt":
            rows = one_of(running, number)
            table.preempted_order[rows] = np.arange(preempted + 1, preempted + 1 + len(rows))
            preempted += len(rows)
            table.move(rows, WAITING)
        elif what == "end":
            for row in one_of(np.flatnonzero(table.state != FREE), number).tolist():
                table.remove(row)
        else:
            for state, rows in ((WAITING, waiting), (RUNNING, running)):
                by_arrival = rows[np.argsort(table.seq[rows])]
                assert table.in_state(state).tolist() == by_arrival.tolist()
                assert table.in_state(state) is table.in_state(state)
            order = table.preempted_order
            first = sorted(waiting[order[waiting] > 0].tolist(), key=lambda row: -order[row])
            rest = [r for r in table.in_state(WAITING).tolist() if not order[r]]
            assert table.requeued().tolist() == first + rest


def test_nothing_is_kept_of_rows_for_which_nobody_asks() -> None:
    table = GrowingTable(4)
    row = np.array([table.add(Request("r", (1,)))])
    assert table.in_state(WAITING).tolist() == [0]
    for _ in range(5000):
        table.move(row, RUNNING)
        table.move(row, WAITING)
    held = [len(listing._joined) for listing in table._listings]
    assert max(held) < 1100
    assert table.in_state(WAITING).tolist() == [0] and not len(table.in_state(RUNNING))
