"""Simulated requests with adapters: what their steps cost, and what no policy plans for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import BatchFeatures, LinearCostModel
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.request import SLO
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import System, system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload, WorkloadError
from tests.cost_models import FLAT
from tests.simulator.grouped import simulate

PLACE = system("opt-13b@a100-40g")
PRICE = 1e-5  # seconds a token and layer


def dearer(place: System) -> System:
    model = place.cost_model
    assert isinstance(model, LinearCostModel)
    dear = replace(model.coefficients, adapted_token=PRICE)
    return replace(place, cost_model=replace(model, coefficients=dear))


def workload(share: float, name: str = "humaneval", count: int = 40) -> Workload:
    return WorkloadSpec(name, count, rate=4.0, adapters=(share, 3)).make_workload(0)


def test_share() -> None:
    drawn = workload(0.5, count=160).adapter
    assert 60 < np.count_nonzero(drawn) < 100 and set(drawn.tolist()) == {0, 1, 2, 3}
    assert not workload(0.0).adapter.any() and workload(1.0).adapter.all()
    with pytest.raises(WorkloadError, match="adapters"):
        workload(1.5)
    half = workload(0.5).select(np.arange(0, 40, 2))
    assert half.adapter.tolist() == workload(0.5).adapter[::2].tolist()
    merged, order = Workload.merged([workload(0.5), workload(1.0)])
    both = np.concatenate([workload(0.5).adapter, workload(1.0).adapter])
    assert merged.adapter.tolist() == both[order].tolist()


def test_conversations_keep_theirs() -> None:
    work = workload(0.5, "agent", 60)
    goes_on = work.prefix_of >= 0
    assert goes_on.any()
    assert (work.adapter[goes_on] == work.adapter[work.prefix_of[goes_on]]).all()


@pytest.mark.parametrize("policy", ["sarathi", "goodput"])
def test_steps_with_adapters_cost_more(policy: str) -> None:
    def seconds(share: float) -> float:
        found = simulate(policy, workload(share), dearer(PLACE), checked=True)
        assert found.requests.finished.all()
        return float(found.summary()["mean_tpot_s"])

    none, some = seconds(0.0), seconds(0.5)
    assert some > 1.01 * none
    plain = simulate(policy, workload(0.5), PLACE, checked=True)
    assert plain.summary()["mean_tpot_s"] == none, "they are free where nobody measured"


@pytest.mark.parametrize(
    "policy",
    [
        "aptserve",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("aptserve_s", "aptserve_fcfs")),
    ],
)
def test_they_have_no_hidden_caches(policy: str) -> None:
    """A plan that has one is refused; those of the others are hidden, as memory is short."""
    place = system("opt-13b@a100-40g", "absorbed")
    spec = WorkloadSpec("sharegpt", 120, rate=8.0, slo=SLO(ttft=1.0, tbt=1.0))
    plain = spec.make_workload(0)
    hidden = []
    for share in (0.0, 0.5, 1.0):
        work = plain.with_adapters(share, 3, np.random.default_rng(0))
        found = simulate(policy, work, place, block_size=16, checked=True)
        assert found.requests.finished.all()
        hidden.append(int(found.batches.num_hidden.sum()))
    assert hidden[0] and hidden[1] and not hidden[2]


def test_it_does_not_run_compiled() -> None:
    with pytest.raises(SimulationError, match="adapters are not compiled"):
        simulate("sarathi", workload(0.5), PLACE, compiled=True)


def test_their_price_is_learned() -> None:
    assert isinstance(FLAT, LinearCostModel)
    learning = OnlineCostModel(FLAT)
    for step in range(400):
        rows = 4 + step % 13
        adapted = step % 2 == 1
        features = BatchFeatures.from_rows(
            np.ones(rows, np.int64),
            np.full(rows, 50 + step % 7),
            np.ones(rows, bool),
            adapted=adapted,
        )
        assert features.adapted_tokens == (rows if adapted else 0)
        seconds = float(FLAT.batch_time(features)) * (1.1 if adapted else 1.0)
        learning.observe(features, seconds)
    assert learning.error < 0.02
    prices = learning.model.coefficients
    assert prices.adapted_token > 0
