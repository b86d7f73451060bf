"""The maths of sched/metrics.py, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.bench.steps import step_metrics
from jaxserve.engine.stats import StepStats
from jaxserve.sched.metrics import RequestTimes, load_metrics, summarise
from jaxserve.sched.request import SLO


def request(due: float, *token_times: float, finished: bool = True) -> RequestTimes:
    return RequestTimes(due, np.array(token_times), finished)


def test_one_request() -> None:
    one = request(1.0, 1.5, 1.6, 1.9, 2.0)
    assert one.ttft == pytest.approx(0.5)
    assert one.tbt == pytest.approx([0.1, 0.3, 0.1])
    assert one.e2e == pytest.approx(1.0)
    assert one.normalised_latency == pytest.approx(0.25)


def test_percentiles_interpolate_linearly() -> None:
    found = summarise([1.0, 2.0, 3.0, 4.0], scale=10.0)
    # Rank of a percentile q among n sorted values: q (n - 1), here of 3.
    assert found == pytest.approx(
        {"mean": 25.0, "p50": 25.0, "p90": 37.0, "p99": 39.7, "max": 40.0}
    )
    assert summarise([7.0]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 7.0)
    assert summarise([]) is None


# Three requests and a refused one: first due at 1, last token at 5.
LOAD = [
    request(1.0, 1.2, 1.3, 1.4),  # TTFT 0.2; TBT 0.1, 0.1; end to end 0.4
    request(2.0, 3.0, 3.5, 5.0),  # TTFT 1.0; TBT 0.5, 1.5; end to end 3.0
    request(4.0, 4.1),  # TTFT 0.1; no TBT
    request(4.5, finished=False),
]


def test_a_load() -> None:
    found = load_metrics(LOAD, SLO())
    assert found["duration_s"] == pytest.approx(4.0)
    assert found["output_tokens"] == 7
    assert found["output_tokens_per_s"] == pytest.approx(7 / 4)
    assert found["finished_per_s"] == pytest.approx(3 / 4)
    assert found["ttft_ms"]["mean"] == pytest.approx(1300 / 3)
    assert found["ttft_ms"]["p50"] == pytest.approx(200)
    # TBTs pooled: 100, 100, 500, 1500 ms.
    assert found["tbt_ms"]["mean"] == pytest.approx(550)
    assert found["tbt_ms"]["p50"] == pytest.approx(300)
    assert found["tbt_ms"]["p99"] == pytest.approx(500 + 0.97 * 1000)
    # P99 of each request: 100 ms, and 500 + 0.99 x 1000 ms.
    assert found["request_p99_tbt_ms"]["max"] == pytest.approx(1490)
    assert found["request_p99_tbt_ms"]["mean"] == pytest.approx((100 + 1490) / 2)
    # Per token: 400 / 3, 3000 / 3, 100 / 1 ms.
    assert found["normalised_latency_ms"]["mean"] == pytest.approx((400 / 3 + 1000 + 100) / 3)
    assert found["e2e_ms"]["max"] == pytest.approx(3000)
    assert found["slo"] is None


@pytest.mark.parametrize(
    ("slo", "ttft", "tbt", "both"),
    [
        (SLO(ttft=0.5, tbt=0.2), 2 / 4, 2 / 4, 2 / 4),
        (SLO(ttft=0.15, tbt=0.2), 1 / 4, 2 / 4, 1 / 4),
        (SLO(ttft=2.0), 3 / 4, 3 / 4, 3 / 4),
        # The second request's P99 of 1.49 is just within; its largest, 1.5, would not be.
        (SLO(tbt=1.495), 3 / 4, 3 / 4, 3 / 4),
        (SLO(tbt=1.485), 3 / 4, 2 / 4, 2 / 4),
    ],
)
def test_slo_attainment(slo: SLO, ttft: float, tbt: float, both: float) -> None:
    found = load_metrics(LOAD, slo)["slo"]
    assert found["ttft_attainment"] == pytest.approx(ttft)
    assert found["tbt_attainment"] == pytest.approx(tbt)
    assert found["attainment"] == pytest.approx(both)
    assert found["goodput_per_s"] == pytest.approx(both * 4 / 4.0)  # 4 requests in 4 s


def test_nothing_finished() -> None:
    found = load_metrics([request(1.0, finished=False)], SLO(ttft=1.0))
    assert found["ttft_ms"] is found["tbt_ms"] is found["e2e_ms"] is None
    assert found["output_tokens_per_s"] is None
    assert found["slo"]["attainment"] == 0.0
    assert found["slo"]["goodput_per_s"] is None


def step(rows: int, decodes: int, tokens: int, step_time: float, host_time: float) -> StepStats:
    prefill = tokens - decodes
    return StepStats(rows, decodes, decodes, prefill, 0, 16, step_time, host_time, preemptions=1)


def test_steps_are_grouped_by_what_they_compute() -> None:
    found = step_metrics(
        [
            step(3, 2, 10, 0.030, 0.003),  # a prompt chunk beside two decodes
            step(3, 3, 3, 0.010, 0.001),
            step(3, 3, 3, 0.020, 0.002),
            step(1, 1, 1, 0.004, 0.004),
        ]
    )
    assert found["all"]["count"] == 4
    assert found["all"]["step_ms"]["p50"] == pytest.approx(15)
    assert found["with_prefill"]["count"] == 1
    assert found["with_prefill"]["host_ms"]["max"] == pytest.approx(3)
    assert found["decode"]["count"] == 3
    assert found["fullest_decode"]["rows"] == 3
    assert found["fullest_decode"]["count"] == 2
    assert found["fullest_decode"]["host_ms"]["mean"] == pytest.approx(1.5)
    assert found["preemptions"] == 4
    assert found["padded_tokens"] == 4 * 16 - 17


def test_no_steps() -> None:
    found = step_metrics([])
    assert found["all"] == {"count": 0, "step_ms": None, "host_ms": None}
    assert found["fullest_decode"]["rows"] == 0
