"""Many simulated replicas: nobody is lost or served twice, and the routers do what they are for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import SLO
from jaxserve.sched.routing.routers import ROUTERS
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.replica.event_queue import Events
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import Fault, Routing
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload, fixed_lengths
from tests.simulator.grouped import simulate

from .test_compiled import HOST, assert_same, drawn

SEVEN = system("llama-2-7b@a100")
LIMITS = Limits(4096, 512, 64)
RATE = 70.0  # requests/s that six replicas just about serve


def heavy_tailed(count: int, rate: float, seed: int = 0) -> Workload:
    """Chats, and a tenth of long documents."""
    rng = np.random.default_rng(seed)
    long = rng.random(count) < 0.1
    prompt = np.where(long, rng.integers(3000, 6000, count), rng.integers(20, 300, count))
    lengths = Lengths(prompt, rng.integers(1, 60, count))
    terms = with_targets(SloColumns.none(count), SLO(ttft=1.0, tbt=0.5))
    return Workload.create(np.cumsum(rng.exponential(1 / rate, count)), lengths, terms=terms)


def served(routing: Routing, workload: Workload, replicas: int, **options: Any) -> SimulationResult:
    place = {"limits": LIMITS, "replicas": replicas, "routing": routing}
    return simulate("sarathi", workload, SEVEN, **place, **options)


@given(
    name=st.sampled_from(list(ROUTERS)),
    seed=st.integers(0, 1 << 20),
    dead=st.lists(st.integers(0, 4), unique=True, max_size=5),
    at=st.floats(0.0, 3.0),
    notice=st.sampled_from([0.0, 0.4]),
    interval=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=15, deadline=None)
def test_nobody_is_lost_or_served_twice(
    name: str, seed: int, dead: list[int], at: float, notice: float, interval: float
) -> None:
    workload = heavy_tailed(150, 40.0, seed)
    faults = tuple(Fault(replica, at + replica / 10, notice=notice) for replica in dead)
    routing = Routing(name, interval=interval, faults=faults)
    requests = served(routing, workload, 5, seed=seed).requests
    over = requests.finished.astype(int) + requests.failed + requests.refused
    assert (over == 1).all(), "each ends in one way"
    noticed = {fault.replica: fault.time + notice for fault in faults}
    for replica, time in noticed.items():
        mine = requests.replica == replica
        assert not (requests.arrival[mine] > time).any(), "it gets nothing any more"
        # The step that the host is waiting for still ends.
        assert not (requests.finish[mine] > time - notice + 0.5).any(), "it ends nobody any more"
    assert np.isin(requests.replica[requests.failed], dead).all()
    if len(dead) < 5:
        assert requests.finished.all()
    else:
        assert requests.refused[requests.arrival > max(noticed.values())].all()
    assert (requests.tokens[requests.failed] < requests.output_len[requests.failed]).all()


def test_whoever_loses_a_replica_goes_on_elsewhere() -> None:
    workload = Workload.create(np.array([0.0, 0.01, 0.02]), fixed_lengths(400, 300, 3))
    alone = served(Routing(), workload, 1).requests
    at = float(alone.first_token[0]) + 1e-4
    late = dataclasses.replace(workload, arrival=np.array([0.0, 0.01, at - 1e-5]))
    fault = Fault(0, at, notice=0.5)
    requests = served(Routing(faults=(fault,)), late, 2).requests
    assert requests.replica.tolist() == [1, 1, 1] and requests.finished.all()
    assert requests.first_token[0] < at, "its first token came from the first replica"
    gaps = np.diff(requests.token_times[:300])
    assert gaps.max() > 0.5 and (gaps > 0.1).sum() == 1, "one gap, until its router has noticed"
    assert requests.first_token[2] > at + 0.5
    again = Routing(faults=(fault, Fault(1, at + 1.0, notice=0.1)))
    twice = served(again, late, 3).requests
    assert twice.finished.all() and 2 in twice.replica.tolist()
    none = Routing(faults=(fault, Fault(1, at, notice=0.1)))
    gone = served(none, late, 2).requests
    assert gone.failed.tolist() == [True, True, False] and gone.refused.tolist()[2]
    assert (gone.tokens[:2] < 300).all() and (gone.tokens[:2] > 0).all()


@pytest.mark.parametrize("interval", [0.0, 0.25])
def test_slo_attains_more_where_requests_differ(interval: float) -> None:
    workload = heavy_tailed(2500, RATE)
    routing = {"interval": interval, "loss": 0.05 if interval else 0.0}
    shares = {
        name: float(served(Routing(name, **routing), workload, 6).attained.mean())
        for name in ROUTERS
    }
    assert shares["slo"] > shares["round_robin"] + 0.05, shares
    assert shares["slo"] >= shares["least_loaded"] and shares["slo"] >= shares["two_choices"]


def test_slo_spares_a_slow_replica_and_round_robin_does_not() -> None:
    workload = heavy_tailed(1500, 30.0)
    count = {}
    for name in ("round_robin", "slo"):
        routing = Routing(name, interval=0.25, faults=(Fault(2, 5.0, slowdown=4.0),))
        requests = served(routing, workload, 6).requests
        later = requests.arrival > 10.0
        count[name] = int(((requests.replica == 2) & later).sum()) / int(later.sum())
    assert count["round_robin"] == pytest.approx(1 / 6, abs=0.01)
    assert count["slo"] < 0.1


def test_several_routers_have_samples_of_their_own() -> None:
    workload = heavy_tailed(300, 40.0)
    requests = served(Routing("least_loaded", routers=3), workload, 7).requests
    assert (requests.replica % 3 == np.arange(300) % 3).all()
    assert len(set(requests.replica.tolist())) == 7


def test_a_thousand_replicas() -> None:
    requests = served(Routing("slo", interval=0.1), heavy_tailed(3000, 3000.0), 1024).requests
    assert requests.finished.all() and requests.ttft.max() < 3.0


@pytest.mark.parametrize(
    "routing, problem",
    [
        ({"name": "nowhere"}, "there is no routing 'nowhere'; known: round_robin"),
        ({"routers": 0}, "routers must be at least 1, got 0"),
        ({"interval": -1.0}, "interval must be 0 or more seconds, got -1.0"),
        ({"interval": 0.5, "age": 0.5}, "less than the interval of 0.5, got 0.5"),
        ({"loss": 0.5}, "loss must be a share of what is published, got 0.5"),
        ({"faults": (Fault(0, 1.0), Fault(0, 2.0))}, "faults must be of different replicas"),
    ],
)
def test_impossible_routing_is_refused(routing: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        Routing(**routing)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", [{"time": -1.0}, {"slowdown": 0.5}, {"notice": math.inf}])
def test_impossible_faults_are_refused(fault: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"seconds|0 or more"):
        Fault(**{"replica": 0, "time": 0.0, **fault})  # type: ignore[arg-type]


def test_routing_fits_the_replicas() -> None:
    workload = heavy_tailed(3, 1.0)
    with pytest.raises(SimulationError, match="routers must be at most as many as replicas, 2"):
        served(Routing(routers=3), workload, 2)
    with pytest.raises(SimulationError, match="there is no replica 2 that could have a fault"):
        served(Routing(faults=(Fault(2, 1.0),)), workload, 2)


def test_events_come_in_order_and_move() -> None:
    events = Events(3)
    assert events.first() == (math.inf, -1)
    for event, time in ((2, 1.0), (0, 5.0), (1, 1.0), (1, 7.0), (0, 1.0)):
        events.at(event, time)
    found = []
    while events.first()[1] >= 0:
        found.append(events.first())
        events.at(found[-1][1], math.inf)
    assert found == [(1.0, 0), (1.0, 2), (7.0, 1)]


def test_batches_need_not_be_kept() -> None:
    workload = heavy_tailed(50, 20.0)
    for compiled in (True, False):
        options: dict[str, Any] = {"compiled": compiled, "record_batches": False}
        result = served(Routing("slo"), workload, 2, **options)
        assert len(result.batches) == 0 and result.requests.finished.all()


# The same compiled and in Python.


@st.composite
def faults(draw: st.DrawFn, replicas: int) -> tuple[Fault, ...]:
    hit = draw(st.lists(st.integers(0, replicas - 1), unique=True, max_size=replicas))
    return tuple(
        Fault(
            replica,
            draw(st.sampled_from([0.0, 0.1, 0.5, 2.0])),
            draw(st.sampled_from([3.0, math.inf])),
            draw(st.sampled_from([0.0, 0.3])),
        )
        for replica in hit
    )


@given(
    data=st.data(),
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(["sarathi", "priority", "edf+ef", "infermax:enough=3"]),
    kv_tokens=st.integers(400, 3000),
    rate=st.sampled_from([20.0, 200.0]),
    rules=st.sampled_from(["jaxserve", "infermax_paper"]),
    host=st.sampled_from([HostOverhead(), HOST]),
    replicas=st.integers(1, 6),
    routing=st.sampled_from(list(ROUTERS)),
    interval=st.sampled_from([0.0, 0.05, 0.3]),
    late=st.sampled_from([0.0, 0.5]),
    loss=st.sampled_from([0.0, 0.4]),
    max_queue=st.sampled_from([None, 3]),
)
@settings(max_examples=20, deadline=None)
def test_the_outcome_is_the_same(
    data: st.DataObject,
    seed: int,
    policy: str,
    rate: float,
    host: HostOverhead,
    replicas: int,
    routing: str,
    interval: float,
    late: float,
    loss: float,
    **options: Any,
) -> None:
    place = dataclasses.replace(SEVEN, host=host)
    options |= {
        "replicas": replicas,
        "routing": Routing(
            routing,
            data.draw(st.integers(1, replicas)),
            interval,
            late * interval,
            loss if interval else 0.0,
            data.draw(faults(replicas)),
        ),
        "limits": Limits(400, 100, 8),
        "seed": seed,
    }
    workload = drawn(seed, 40, rate)
    slow = simulate(policy, workload, place, compiled=False, coast=False, **options)
    quick = simulate(policy, workload, place, compiled=True, **options)
    assert_same(quick, slow)
    np.testing.assert_array_equal(quick.requests.failed, slow.requests.failed)
    assert_same(simulate(policy, workload, place, compiled=False, **options), slow)
