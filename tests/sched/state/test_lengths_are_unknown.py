"""How much a request will write is known to no policy that a server takes: until an output has
ended in one of two workloads and goes on in the other, their plans are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy, policies, variants
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.simulator.grouped import simulate

_ALL = [*policies(), *(f"sarathi+{suffix}" for suffix in variants())]
NAMES = [name for name in _ALL if not make_policy(name).hypothetical]
KNOWING = [name for name in _ALL if name not in NAMES and name != "oracle"]
OPT = system("opt-13b@a100-40g")
COUNT, LIMIT = 12, 60
ROUNDING = 1e-9  # seconds; of sums in another order


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two workloads that differ in some outputs' lengths."""

    one: Workload
    other: Workload
    options: dict[str, Any]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    arrival = np.cumsum(rng.exponential(draw(st.sampled_from([1e-4, 0.02, 0.2])), COUNT))
    prompt, output = rng.integers(1, 200, COUNT), rng.integers(1, LIMIT + 1, COUNT)
    changed = rng.random(COUNT) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    changed[rng.integers(COUNT)] = True
    other = np.where(changed, rng.integers(1, LIMIT + 1, COUNT), output)
    limit = np.full(COUNT, LIMIT)
    made = [Workload.create(arrival, Lengths(prompt, o), limit=limit) for o in (output, other)]
    options = {
        "kv_tokens": draw(st.sampled_from([320, 640, 4000])),
        "limits": Limits(400, draw(st.sampled_from([64, 400])), draw(st.sampled_from([4, 20]))),
        "seed": draw(st.integers(0, 3)),
        "coast": draw(st.booleans()),
    }
    return Pair(*made, options)


def run(policy: str, workload: Workload, pair: Pair) -> SimulationResult:
    return simulate(policy, workload, OPT, record_rows=True, **pair.options)


def known_from(pair: Pair, result: SimulationResult) -> float:
    """When it becomes known that an output has ended that goes on in the other workload; never, if
    there is no such one."""
    shorter = np.minimum(pair.one.output_len, pair.other.output_len)
    differs = pair.one.output_len != pair.other.output_len
    last = (result.requests.offsets + shorter - 1)[differs]
    return float(result.requests.token_times[last].min(initial=np.inf))


def plans_before(result: SimulationResult, time: float) -> list[tuple[Any, ...]]:
    """The batches that start, and so were planned, before that time."""
    assert result.rows is not None
    found = []
    for start, batch in zip(result.batches.start.tolist(), result.rows[0], strict=True):
        if start < time - ROUNDING:
            order = np.argsort(batch.requests)
            columns = (batch.requests, batch.tokens, batch.decoding)
            gone = sorted(batch.preempted.tolist())
            found.append((start, *(c[order].tolist() for c in columns), gone))
    return found


def long_outputs() -> Pair:
    """Whoever knows how long they get starts others, or in another order."""
    arrival, prompt = np.linspace(0, 0.01, COUNT), np.full(COUNT, 20)
    outputs = 30 + np.arange(COUNT), 59 - np.arange(COUNT)
    limit = np.full(COUNT, LIMIT)
    one, other = (Workload.create(arrival, Lengths(prompt, o), limit=limit) for o in outputs)
    return Pair(one, other, {"kv_tokens": 400, "limits": Limits(400, 64, 20)})


@pytest.mark.parametrize("policy", NAMES)
@example(pair=long_outputs())
@settings(max_examples=1, deadline=None)
@given(pair=pairs())
def test_plans_are_the_same_until_an_output_ends(policy: str, pair: Pair) -> None:
    one, other = run(policy, pair.one, pair), run(policy, pair.other, pair)
    time = known_from(pair, one)
    assert time == known_from(pair, other)
    assert plans_before(one, time) == plans_before(other, time)


@pytest.mark.parametrize("policy", KNOWING)
def test_hypothetical_policies_do_know(policy: str) -> None:
    """So the comparison can tell."""
    pair = long_outputs()
    one, other = run(policy, pair.one, pair), run(policy, pair.other, pair)
    time = min(known_from(pair, one), known_from(pair, other))
    assert plans_before(one, time) != plans_before(other, time)
