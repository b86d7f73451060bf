"""What a replica learns from its engine and says of itself, how many of them there should be, and
the page of all."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.deploy.load import ATTAINED, ENOUGH, LATE, QUEUED, Load, attainment, wanted_replicas
from jaxserve.deploy.metrics import metrics_page
from jaxserve.deploy.replica_stats import WINDOW_S, ReplicaStats
from jaxserve.engine.output import FinishReason
from jaxserve.engine.stats import RequestStats
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.slo.verdict import Verdict
from tests.deploy.engine import Engine

IDLE = Load()
FULL = Load(busy=0.9)


def missing(busy: float, met: int, count: int = 100) -> Load:
    return Load(busy=busy, ended={"chat": count, "batch": count}, met={"chat": met, "batch": count})


@pytest.mark.parametrize(
    ("loads", "now", "count"),
    [
        ([], 3, 3),  # nobody has said anything
        ([IDLE], 1, 1),
        ([IDLE, IDLE, IDLE], 3, 2),  # one at a time
        ([FULL, FULL], 2, 2),
        ([FULL, IDLE], 2, 2),  # the other one has no room
        ([Load(busy=0.2), Load(busy=0.2)], 2, 1),
        ([Load(busy=0.2)], 2, 2),  # one of them says nothing yet
        ([Load(wait_share=1.5 * LATE)], 1, 2),
        ([Load(wait_share=1.5 * LATE)] * 4, 4, 6),
        ([Load(wait_share=100.0)] * 4, 4, 8),  # twice as many at most
        ([Load(waiting=3 * QUEUED, busy=1.0), FULL], 2, 3),
        ([Load(waiting=0.01), IDLE], 2, 2),  # somebody waits
        ([Load(wait_share=LATE / 2), IDLE], 2, 2),
        ([missing(0.9, 90)], 1, 2),
        ([missing(0.9, 96)], 1, 1),
        ([missing(0.1, 10)], 1, 1),  # not for want of room
        ([missing(0.9, 0, ENOUGH - 1)], 1, 1),  # too few to say
    ],
)
def test_wanted(loads: list[Load], now: int, count: int) -> None:
    assert wanted_replicas(loads, now) == count


def test_attainment_is_that_of_all_replicas_together() -> None:
    loads = [missing(0.5, 100), missing(0.5, 50, 50), missing(0.5, 0, 50)]
    assert attainment(loads) == {"chat": 0.75, "batch": 1.0}
    assert min(attainment(loads).values()) < ATTAINED


@given(
    st.builds(
        Load,
        *(st.floats(0, 10) for _ in range(3)),
        st.dictionaries(st.sampled_from(["a", "b:c"]), st.integers(0, 9)),
        st.dictionaries(st.sampled_from(["a", "b:c"]), st.integers(0, 9)),
    )
)
def test_metrics_say_all_of_it(load: Load) -> None:
    assert Load.from_metrics(load.as_metrics()) == load


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def tally(engine: Engine, clock: Clock) -> ReplicaStats:
    return ReplicaStats(engine, clock=clock, wall=lambda: 1000.0 + clock.now)


def serve(tally: ReplicaStats, number: int, ttft: float, slo_class: str = "chat") -> None:
    """A request with a target of half a second, and an output of 20 tokens."""
    slo = SLO(ttft=0.5)
    tally.on_arrival(number, Request(str(number), (1,), slo=slo, slo_class=slo_class))
    verdict = Verdict(slo, slo_class, Tier.REALTIME, ttft <= 0.5, None, None)
    stats = RequestStats(
        number, FinishReason.LENGTH, Tier.REALTIME, 1, 20, 0, 0.0, ttft, 1.0, verdict
    )
    tally.on_finish(stats)


def test_attainment_is_by_class_and_of_the_last_minute(tally: ReplicaStats, clock: Clock) -> None:
    serve(tally, 0, ttft=9.0)
    clock.now += WINDOW_S / 2
    serve(tally, 1, ttft=0.1)
    serve(tally, 2, ttft=9.0, slo_class="code")
    assert tally.load().ended == {"chat": 2, "code": 1}
    assert tally.load().met == {"chat": 1, "code": 0}
    clock.now += WINDOW_S / 2 + 1
    assert tally.load().ended == {"chat": 1, "code": 1}
    clock.now += WINDOW_S
    assert tally.load().ended == {} and tally.load().wait_share == 0.0


def test_the_wait_is_told_of_the_target_that_requests_have(tally: ReplicaStats) -> None:
    assert tally.load().wait_share == 0.0
    serve(tally, 0, ttft=0.1)
    assert tally.load().wait_share == 0.5  # the engine expects 0.25 s


def test_a_snapshot_has_what_was_learned_and_is_of_now(tally: ReplicaStats) -> None:
    serve(tally, 0, ttft=0.1)
    serve(tally, 1, ttft=9.0)
    found = tally.snapshot()
    assert (found.mean_output, found.attainment) == (20.0, 0.5)
    assert found.time == 1100.0 and found.free_blocks == found.num_blocks and not found.draining


def test_one_that_takes_no_more_says_so_as_of_now(tally: ReplicaStats, clock: Clock) -> None:
    clock.now += 50.0  # no step since
    found = tally.snapshot(draining=True)
    assert found.draining and found.time == 1150.0


def test_one_that_is_stuck_says_nothing_new(
    engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though time passes between the readings of two clocks, at times more of it."""
    engine.submit(Request("1", (1,)), lambda output: None)
    steps = [dataclasses.replace(engine.backlog(), time=at) for at in (90.0, 95.0)]
    walls = iter([1100.0, 1110.5, 1121.0])
    tally = ReplicaStats(engine, clock=clock, wall=lambda: next(walls))
    found = []
    for step in (steps[0], steps[0], steps[1]):
        monkeypatch.setattr(engine, "backlog", lambda step=step: step)
        found.append(tally.snapshot().time)
        clock.now += 10.0
    assert found == [1090.0, 1090.0, 1096.0]


def test_steps_that_take_longer_than_predicted_are_told(
    tally: ReplicaStats, engine: Engine
) -> None:
    before = tally.snapshot()
    engine.step()  # 8 ms for 9
    assert before.pace == 1.0 > tally.snapshot().pace > 8 / 9


def told(count: float) -> list[Metric]:
    counter = CounterMetricFamily("jaxserve:calls", "Calls.", labels=("model_name",))
    counter.add_metric(("m",), count)
    histogram = HistogramMetricFamily("jaxserve:ttft_seconds", "TTFT.")
    histogram.add_metric((), [("0.1", count), ("+Inf", count + 1)], 0.5)
    return [counter, histogram]


def test_samples_say_whose_they_are_and_families_are_one() -> None:
    text = metrics_page({"b": told(2.0), "a": told(1.0)}, lambda _: True).decode()
    assert text.count("# TYPE jaxserve:calls_total counter") == 1
    assert text.count("# TYPE jaxserve:ttft_seconds histogram") == 1
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert len(found) == 2 * 5
    assert found["jaxserve:calls_total", ("model_name", "m"), ("replica", "b")] == 2.0
    assert found["jaxserve:ttft_seconds_bucket", ("le", "0.1"), ("replica", "a")] == 1.0
    assert found["jaxserve:ttft_seconds_sum", ("replica", "a")] == 0.5


def test_a_reader_sees_the_adapters_that_it_may_use() -> None:
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    info = GaugeMetricFamily("jaxserve:lora_requests_info", "Adapters.", labels=labels)
    info.add_metric(("8", "law,sql", "tax"), 1.0)
    text = metrics_page({"a": [info]}, {"law", "tax"}.__contains__).decode()
    assert 'running_lora_adapters="law",waiting_lora_adapters="tax"' in text
    assert 'max_lora="8"' in text and "sql" not in text
