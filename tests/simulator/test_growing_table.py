"""The simulator's table grows, and is the engine's but for that."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Program, Request, SamplingParams
from jaxserve.sched.state.growing_table import FIRST_ROWS, GrowingTable
from jaxserve.sched.state.request_table import RequestTable, State
from jaxserve.simulator.replica.scheduler_state import SimulatedScheduler
from tests.cost_models import FLAT

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


def test_decodes_of_several_steps_are_service_of_their_program() -> None:
    known = {"num_blocks": 8, "block_size": 4, "max_model_len": 32}
    made = SimulatedScheduler(make_policy("vllm"), Limits(64, 64, 8), **known, cost_model=FLAT)
    for i, name in enumerate(["a", None, "a", "b"]):
        made.add(Request(str(i), (1,), program=name and Program(name)))
    made.advance(np.arange(4), np.array([1, 2, 3, 4]))
    assert made.table.attained[:4].tolist() == [4, 0, 4, 4]


@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 6),
    gaps=st.lists(st.sampled_from([0.0625, 0.125, 0.25, 0.5]), max_size=8),
)
def test_tokens_of_several_steps_are_received_as_one_by_one(
    seed: int, rows: int, gaps: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    limits = Limits(64, 64, 8)
    known = {"num_blocks": 8, "block_size": 4, "max_model_len": 32}
    made = [
        SimulatedScheduler(make_policy("vllm"), limits, **known, cost_model=FLAT) for _ in range(2)
    ]
    targets = rng.choice([0.1, 0.125, 0.3, 0.0], rows).tolist()
    for scheduler in made:
        for i, tbt in enumerate(targets):
            scheduler.add(Request(str(i), (1,), slo=SLO(tbt=tbt or None)))
        scheduler.receive(np.arange(rows), 1.0)
    times = 1.25 + np.cumsum(gaps)
    together, single = made
    if gaps:
        counts = rng.integers(1, len(gaps) + 1, rows)
        for step, time in enumerate(times.tolist()):
            single.receive(np.flatnonzero(counts > step), time)
    else:
        counts = np.zeros(rows, np.int64)
    together.receive_several(np.arange(rows), counts, times)
    for name in ("received", "first_token", "last_token", "late_gaps", "longest_gap"):
        one, other = getattr(together.table, name), getattr(single.table, name)
        assert one.tolist() == other.tolist(), name
