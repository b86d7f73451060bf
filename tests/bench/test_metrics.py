"""The maths of sched/slo/metrics.py, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.bench.runs import step_metrics
from jaxserve.engine.stats import StepStats
from jaxserve.sched.request import SLO, Rule, Tier
from jaxserve.sched.slo.classes import parse_classes, with_targets
from jaxserve.sched.slo.metrics import (
    Times,
    attained,
    load_metrics,
    overtaken,
    summarise,
    tokens_in_time,
)
from jaxserve.sched.slo.slo_columns import SloColumns
from tests.server.fake_engine import step_stats


def load(*requests: tuple[float, list[float]], refused: tuple[int, ...] = ()) -> Times:
    """From due times and token times."""
    return Times.from_tokens(
        [due for due, _ in requests],
        [times for _, times in requests],
        [i not in refused for i in range(len(requests))],
    )


def wanting(count: int, slo: SLO) -> SloColumns:
    return with_targets(SloColumns.none(count), slo)


def test_percentiles_interpolate_linearly() -> None:
    found = summarise([1.0, 2.0, 3.0, 4.0], scale=10.0)
    # Rank of a percentile q among n sorted values: q (n - 1), here of 3.
    assert found == pytest.approx(
        {"mean": 25.0, "p50": 25.0, "p90": 37.0, "p99": 39.7, "max": 40.0}
    )
    assert summarise([7.0]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 7.0)
    assert summarise([]) is None


# Three requests and a refused one: first due at 1, last token at 5.
LOAD = load(
    (1.0, [1.2, 1.3, 1.4]),  # TTFT 0.2; TBT 0.1, 0.1; end to end 0.4
    (2.0, [3.0, 3.5, 5.0]),  # TTFT 1.0; TBT 0.5, 1.5; end to end 3.0
    (4.0, [4.1]),  # TTFT 0.1; no TBT
    (4.5, []),
    refused=(3,),
)


def test_a_load() -> None:
    found = load_metrics(LOAD, SloColumns.none(4))
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
    ("slo", "ttft", "tbt", "jct", "all_three"),
    [
        (SLO(ttft=0.5, tbt=0.2), 2 / 4, 2 / 4, None, 2 / 4),
        # The second request's P99 of 1.49 is just within; its largest, 1.5, would not be.
        (SLO(tbt=1.495), None, 3 / 4, None, 3 / 4),
        (SLO(tbt=1.485), None, 2 / 4, None, 2 / 4),
        (SLO(ttft=0.15, jct=0.5), 1 / 4, None, 2 / 4, 1 / 4),
    ],
)
def test_slo_attainment(
    slo: SLO, ttft: float | None, tbt: float | None, jct: float | None, all_three: float
) -> None:
    """Of a target that nobody has there is no share."""
    found = load_metrics(LOAD, wanting(4, slo))["slo"]
    assert found["ttft_attainment"] == ttft
    assert found["tbt_attainment"] == tbt
    assert found["jct_attainment"] == jct
    assert found["attainment"] == pytest.approx(all_three)
    assert found["goodput_per_s"] == pytest.approx(all_three * 4 / 4.0)  # 4 requests in 4 s


def test_nothing_finished() -> None:
    found = load_metrics(load((1.0, []), refused=(0,)), wanting(1, SLO(ttft=1.0)))
    assert found["ttft_ms"] is found["tbt_ms"] is found["e2e_ms"] is None
    assert found["output_tokens_per_s"] is None
    assert found["slo"]["attainment"] == 0.0
    assert found["slo"]["goodput_per_s"] is None


def test_a_class_is_judged_by_its_own_targets() -> None:
    """Two requests that got the same, in classes that want different things of it."""
    times = load((0.0, [1.0, 2.0]), (0.0, [1.0, 2.0]), (0.0, [1.0, 2.0]))
    hasty, patient = parse_classes("hasty:0.5:ttft=500ms,patient:0.5:tier=best_effort:jct=1.5s")
    terms = SloColumns(
        np.array([0, 1, 0], np.int8),
        np.array([hasty.slo.ttft, np.inf, np.inf]),
        np.full(3, np.inf),
        np.array([np.inf, patient.slo.jct, np.inf]),
        np.full(3, np.inf),
        np.array([0, 1, 2]),
        np.ones(3, bool),
        ("hasty", "patient", "easy"),
    )
    found = load_metrics(times, terms)
    shares = {
        name: [group["slo"][f"{t}attainment"] for t in ("ttft_", "tbt_", "jct_", "")]
        for name, group in found["classes"].items()
        if group["slo"] is not None
    }
    assert shares == {"hasty": [0, None, None, 0], "patient": [None, None, 0, 0]}
    assert found["classes"]["easy"]["slo"] is None
    assert found["slo"]["attainment"] == 0.0, "who has no targets attains none"
    assert found["slo"]["goodput_per_s"] == 0.0
    assert found["tiers"]["realtime"]["slo"]["attainment"] == 0.0
    assert found["tiers"]["best_effort"]["slo"]["attainment"] == 0


def drawn(seed: int, count: int) -> tuple[Times, SloColumns]:
    """Requests of three classes with all kinds of gaps, some at a target exactly."""
    rng = np.random.default_rng(seed)
    terms = SloColumns(
        rng.integers(0, 2, count).astype(np.int8),
        rng.choice([0.5, 1.0, np.inf], count),
        rng.choice([0.25, 0.5, np.inf], count),
        rng.choice([1.0, 30.0, np.inf], count),
        rng.choice([0.25, 0.5, np.inf], count),
        rng.integers(0, 3, count),
        np.ones(count, bool),
        ("a", "b", "c"),
    )
    requests, refused = [], []
    for i in range(count):
        tokens = int(rng.choice([0, 1, 2, 5, 101, 250]))
        if not tokens or rng.random() < 0.1:
            refused.append(i)
        gaps = rng.choice([0.0625, 0.25, 0.5, 1.0], tokens, p=[0.4, 0.3, 0.29, 0.01])
        due = float(rng.integers(0, 4))
        requests.append((due, (due + rng.choice([0.25, 0.5, 2.0]) + np.cumsum(gaps)).tolist()))
    return load(*requests, refused=tuple(refused)), terms


@given(st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_attainment_of_many_is_that_of_each(seed: int) -> None:
    times, terms = drawn(seed, 12)
    met = attained(times, terms)
    for i, at in enumerate(times.offsets.tolist()):
        mine = times.token_times[at : at + int(times.tokens[i])]
        done = bool(times.finished[i])
        assert met.ttft[i] == (done and mine[0] - times.due[i] <= terms.ttft[i])
        tbt = np.diff(mine)
        within = not len(tbt) or np.percentile(tbt, 99) <= terms.tbt[i]
        assert met.tbt[i] == (done and within)
        assert met.jct[i] == (done and mine[-1] - times.due[i] <= terms.jct[i])
        most = terms.max_tbt_that_counts[i]
        assert met.max_tbt[i] == (done and max(np.diff(mine), default=0.0) <= most)
        assert met.slo()[i] == (met.slo(Rule.PAPERS)[i] and met.max_tbt[i])


def test_a_stream_that_stands_still_is_attained_by_the_papers_rule_only() -> None:
    steady = np.linspace(1.0, 2.0, 201).tolist()
    times = load((0.0, steady), (0.0, [*steady, 7.0]))
    terms = wanting(2, SLO(ttft=2.0, tbt=0.1))
    found = load_metrics(times, terms)["slo"]
    assert (found["attainment"], found["tbt_attainment"], found["max_tbt_attainment"]) == (
        0.5,
        1.0,
        0.5,
    )
    assert found["goodput_per_s"] == pytest.approx(1 / 7)
    assert attained(times, terms).slo(Rule.PAPERS).all()
    given = load_metrics(times, wanting(2, SLO(ttft=2.0, tbt=0.1, max_tbt=6.0)))["slo"]
    assert given["attainment"] == 1.0


@given(st.integers(0, 1 << 30), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_numbers_of_tiers_and_classes_add_up(seed: int, count: int) -> None:
    times, terms = drawn(seed, count)
    found = load_metrics(times, terms)
    met = attained(times, terms)
    for groups in (found["tiers"], found["classes"]):
        for name in ("requests", "finished", "output_tokens"):
            total = {
                "requests": count,
                "finished": int(times.finished.sum()),
                "output_tokens": found["output_tokens"],
            }[name]
            assert sum(group[name] for group in groups.values()) == total
        some = [group for group in groups.values() if group["ttft_ms"] is not None]
        if some:
            weighted = sum(group["ttft_ms"]["mean"] * group["finished"] for group in some)
            assert weighted == pytest.approx(found["ttft_ms"]["mean"] * times.finished.sum())
            assert max(g["e2e_ms"]["max"] for g in some) == found["e2e_ms"]["max"]
        attaining = sum(g["slo"]["goodput_per_s"] or 0.0 for g in groups.values() if g["slo"])
        within = (met.slo() & times.finished & terms.asked).sum()
        assert attaining * found["duration_s"] == pytest.approx(within)
    by_name = {tier.name.lower(): int((terms.tier == tier).sum()) for tier in Tier}
    assert {name: g["requests"] for name, g in found["tiers"].items()} == {
        name: number for name, number in by_name.items() if number
    }


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(), 7),
        (SLO(ttft=0.3), 6),
        (SLO(tbt=0.2), 5),
        (SLO(tbt=0.6), 6),
        (SLO(ttft=0.15, tbt=0.2), 3),
    ],
)
def test_tokens_are_judged_one_by_one(slo: SLO, met: int) -> None:
    assert tokens_in_time(LOAD, wanting(4, slo)) == (met, 8)  # the refused one lacks its first


@pytest.mark.parametrize(("end", "of"), [(5.05, 4), (5.2, 5), (5.6, 6)])
def test_tokens_that_are_late_at_the_end_count(end: float, of: int) -> None:
    # The first has its third token at 5 and goes on, as does the second, which has none.
    times = load((4.0, [4.2, 4.3, 5.0]), (4.6, []), (1.0, [1.1]), refused=(0, 1))
    cut = dataclasses.replace(times, going=np.array([True, True, False]), end=end)
    met = 3  # within 0.5 s to the first and 0.15 s to the others
    assert tokens_in_time(cut, wanting(3, SLO(ttft=0.9, tbt=0.15))) == (met, of)


def step(rows: int, decodes: int, tokens: int, step_time: float, host_time: float) -> StepStats:
    prefill = tokens - decodes
    return dataclasses.replace(
        step_stats(rows),
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefill_tokens=prefill,
        padded_tokens=16,
        preemptions=1,
        step_time=step_time,
        receive_time=0.0,
        plan_time=host_time,
        launch_time=0.0,
        finish_time=0.0,
    )


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


def test_who_is_overtaken() -> None:
    """The second waits from 0.1 to 0.9 while the third is served, the fourth is of another group;
    the first waits longer, but for nobody who came later."""
    times = load((0.0, [0.5, 3.0]), (0.1, [1.0, 1.5]), (0.2, [0.4, 0.9]), (0.3, [0.6, 2.9]))
    assert overtaken(times, np.array([0, 0, 0, 1])) == pytest.approx(1.0), "0.5 to 1.5"
    assert overtaken(times, np.array([0, 1, 1, 0])) == pytest.approx(2.4), "0.5 to 2.9"
    assert overtaken(times, np.array([0, 1, 1, 2])) == pytest.approx(0.8)
    assert overtaken(times, np.arange(4)) == 0.0
    going = dataclasses.replace(
        load((0.0, []), (1.0, [2.0, 3.0]), refused=(0,)), going=np.array([True, False]), end=9.0
    )
    assert overtaken(going, np.zeros(2)) == 3.0, "it has nothing yet"
    assert overtaken(load((0.0, []), (1.0, [2.0]), refused=(0,)), np.zeros(2)) == 0.0


ticks = st.integers(0, 12)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(ticks, st.lists(st.integers(1, 8), min_size=1, max_size=4)), max_size=6))
def test_overtaking_is_what_going_through_all_of_them_says(
    found: list[tuple[int, list[int]]],
) -> None:
    times = load(*((due, (due + np.cumsum(gaps)).tolist()) for due, gaps in sorted(found)))
    longest = 0.0
    for i, (due, own) in enumerate(
        zip(times.due, np.split(times.token_times, np.cumsum(times.tokens)), strict=False)
    ):
        for begin, end in itertools.pairwise([due, *own]):
            others = times.token_times[int(times.tokens[: i + 1].sum()) :]
            longest = max([longest, *(others[(others > begin) & (others < end)] - begin)])
    assert overtaken(times, np.zeros(len(times))) == longest
