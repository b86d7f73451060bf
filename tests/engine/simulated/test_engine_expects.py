"""What the live engine predicts of its waits, while it learns what steps take, and what came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.request import SLO, Request, SamplingParams
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.slo_admission import is_late
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.simulator.workloads.workload import Lengths, Workload, poisson_arrivals
from tests.engine.simulated.engine_on_a_virtual_clock import LAYERS, Served, configured

# 10 ms a step, and 0.2 ms a token; the engine begins with half of that.
TRUE = LinearCostModel(Coefficients(1e-4, 5e-3, 0, 0, 0, 0, 0, 0, 0), LAYERS)
PRIOR = LinearCostModel(Coefficients(5e-5, 2.5e-3, 0, 0, 0, 0, 0, 0, 0), LAYERS)
TTFT = 0.5


class Told(Served):
    """An engine that is asked about each request when it comes. share: of the slack, beyond which
    it is refused. told: by number."""

    def __init__(
        self, folder: Path, workload: Workload, share: float, policy: str, *, overlap: bool = True
    ) -> None:
        self.told: dict[int, Wait] = {}
        self.refused: set[int] = set()
        self._share = share
        fields = {
            "cache__num_blocks": 800,
            "scheduler__max_batch_tokens": 256,
            "scheduler__max_prefill_tokens": 64,
            "scheduler__max_rows": 8,
            "scheduler__max_queue": len(workload),
            "scheduler__policy": policy,
            "engine__overlap": overlap,
        }
        super().__init__(configured(folder, 200, PRIOR, **fields), workload, TRUE)

    def _submit(self, number: int) -> None:
        request = self._requests.make_request(number, float(self._workload.arrival[number]))
        wait = self.told[number] = self.engine.expected_wait(request)
        if is_late(wait, request, self._share):
            self.refused.add(number)
        else:
            super()._submit(number)

    def ttft(self) -> dict[int, float]:
        arrival = self._workload.arrival
        return {n: times[0] - float(arrival[n]) for n, times in self.token_times.items()}

    def in_time(self) -> int:
        return sum(ttft <= TTFT for ttft in self.ttft().values())


def load(rate: float, count: int = 150) -> Workload:
    """About 15 a second are served: eight rows, of outputs of 40 tokens or so."""
    rng = np.random.default_rng(3)
    lengths = Lengths(rng.integers(4, 60, count), rng.integers(5, 80, count))
    limit = np.full(count, 120)
    terms = with_targets(SloColumns.none(count), SLO(ttft=TTFT))
    arrival = poisson_arrivals(rate, count, rng)
    return Workload.create(arrival, lengths, limit=limit, terms=terms)


@pytest.mark.parametrize("overlap", [True, False])
def test_without_a_queue(tmp_path: Path, overlap: bool) -> None:
    """The steps that have been launched by then are waited for, whoever is in them."""
    told = Told(tmp_path, load(8.0, 60), np.inf, "sarathi", overlap=overlap)
    ttft = told.ttft()
    ratios = np.array([ttft[n] / wait.seconds for n, wait in told.told.items()])[30:]
    np.testing.assert_allclose(np.quantile(ratios, [0.1, 0.5, 0.9]), 1.0, atol=0.05)


def test_in_an_overload(tmp_path: Path) -> None:
    """Those who are taken wait nearly as long as they were told, and most of them are in time,
    which otherwise next to nobody is."""
    workload = load(30.0)
    everybody, some = (Told(tmp_path, workload, share, "sarathi") for share in (np.inf, 0.75))
    ttft = some.ttft()
    late = [n for n in ttft if n > 50 and some.told[n].seconds > 0.1]
    ratios = np.array([ttft[n] / some.told[n].seconds for n in late])
    assert len(late) > 15 and 0.7 < np.median(ratios) < 1.4
    assert not everybody.refused and len(some.refused) > 30
    assert some.in_time() > 2 * everybody.in_time()
    assert some.in_time() > 0.7 * len(ttft)
    # What they get is what they would have got.
    for number, times in some.token_times.items():
        assert len(times) == len(everybody.token_times[number])


@pytest.mark.parametrize(("policy", "overlap"), [("bros", False), ("fastserve", True)])
def test_once_all_have_ended_nobody_waits(tmp_path: Path, policy: str, overlap: bool) -> None:
    told: Any = Told(tmp_path, load(30.0, 40), np.inf, policy, overlap=overlap)
    backlog = told.engine._ttft_estimator._latest[1]._backlog
    assert not len(backlog) and backlog.free_blocks == 800
    wait = told.engine.expected_wait(Request("new", (1,) * 20, SamplingParams(4)))
    assert wait.seconds == wait.alone
    assert not told.engine._ttft_estimator._since
    assert set(told.engine.stats().expected_wait) == {"realtime", "best_effort"}
