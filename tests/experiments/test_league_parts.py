"""What the league is made of: its workloads, saturation, cut-down cases, processes, code."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from jaxserve.sched.policies.goodput.prices import Prices
from jaxserve.sched.request import SLO, Rule, Tier
from jaxserve.simulator.capacity import FINE
from jaxserve.simulator.workloads.workload import WorkloadError
from jaxserve_lab.experiments.common.processes import worked
from jaxserve_lab.experiments.league import code, reading, runs, workloads
from jaxserve_lab.experiments.league.collect import Found
from jaxserve_lab.experiments.league.optimum import CutCase, latency, optimum
from jaxserve_lab.experiments.league.reading import advice
from jaxserve_lab.experiments.league.runs import (
    LEVEL,
    LeagueCase,
    LeagueNumbers,
    SaturationCase,
    run,
    saturate,
    simulated,
)
from jaxserve_lab.experiments.league.standings import Standings
from jaxserve_lab.experiments.league.workloads import (
    LLAMA,
    LONGEST,
    OPT,
    WORKLOADS,
    lasting_count,
    make_workload,
    trace_of,
)

HOUR = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,{100 + i},{1 + i % 7}\n" for i in range(300)
)


@pytest.mark.parametrize("name", [name for name, one in WORKLOADS.items() if not one.reuse])
def test_a_workload_fits_and_is_the_same_at_every_rate(name: str) -> None:
    for place in WORKLOADS[name].systems:
        slow, fast = make_workload(name, place, 0.5, 40, 1), make_workload(name, place, 4.0, 40, 1)
        assert len(slow) == 40 and slow.arrival[0] == 0
        assert (slow.prompt_len + slow.limit == LONGEST[place]).all()
        assert (slow.prompt_len == fast.prompt_len).all() and (slow.ttft == fast.ttft).all()
        np.testing.assert_allclose(slow.arrival, 8 * fast.arrival)
        targets = np.array([slow.ttft, slow.tbt, slow.jct])
        assert np.isfinite(targets).any(axis=0).all()  # everybody has one
        assert (make_workload(name, place, 0.5, 40, 2).prompt_len != slow.prompt_len).any()


@pytest.mark.parametrize("name", [name for name, one in WORKLOADS.items() if one.reuse])
def test_sessions_fit_and_are_found_again(name: str) -> None:
    made, most = make_workload(name, LLAMA, 1.0, 60, 1), WORKLOADS[name].longest(LLAMA)
    assert made.arrival[0] == 0 and np.isfinite(made.ttft).all()
    assert (made.prompt_len + made.limit == most).all() and most >= LONGEST[LLAMA]
    assert made.prefix_len.sum() > 0.3 * made.prompt_len.sum()
    found = simulated(LeagueCase(LLAMA, name, "at", "sarathi", 1, 1.0, 60)).requests.found
    assert found is not None and found.any()
    plain = simulated(LeagueCase(LLAMA, "sharegpt", "at", "sarathi", 1, 1.0, 20)).requests
    assert plain.found is None


def test_shares_and_tiers_of_a_mixed_workload() -> None:
    made = make_workload("three-classes", OPT, 1.0, 200, 0)
    best_effort = made.tier == Tier.BEST_EFFORT
    assert best_effort.sum() == 40 and np.isinf(made.ttft[best_effort]).all()
    assert (made.jct[best_effort] == 60.0).all()
    assert sorted(set(made.ttft[~best_effort])) == [0.5, 2.0]
    assert (np.flatnonzero(best_effort) != np.arange(160, 200)).any()  # not all at the end


def test_targets_drawn_as_accelgen_has_them() -> None:
    made = make_workload("mixed-prompts", OPT, 1.0, 600, 0)
    assert 0.14 < made.tbt.min() < 0.15 and 0.225 < made.tbt.max() < 0.235
    assert made.ttft[made.prompt_len > 1536].mean() > 3 * made.ttft[made.prompt_len < 512].mean()
    # Scales are from 0.5 to 1.5 of one time for prompts of a group.
    made = make_workload("alpaca", OPT, 1.0, 600, 0)
    assert 2.5 < made.ttft.max() / made.ttft.min() < 3.0


def test_an_hour_is_taken_where_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / WORKLOADS["azure-conv"].trace
    assert trace_of("azure-conv", "") == "" == trace_of("sharegpt", str(tmp_path))
    with pytest.raises(WorkloadError, match="there is no"):
        trace_of("azure-conv", str(tmp_path))
    file.write_text(HOUR)
    path = trace_of("azure-conv", str(tmp_path))
    made = [make_workload("azure-conv", OPT, 2.0, 50, seed, path) for seed in range(3)]
    assert [one.prompt_len[0] for one in made] == [100, 200, 300]  # elsewhere in the hour
    for one in made:
        assert (np.diff(one.prompt_len) == 1).all()
        assert one.arrival[-1] == pytest.approx(49 / 2.0)
    with pytest.raises(WorkloadError, match="301 requests are needed"):
        make_workload("azure-conv", OPT, 2.0, 301, 0, path)


def test_what_an_idle_system_cannot_serve_in_time_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("alpaca", "mixed-prompts", "longbench"):  # targets drawn, and given
        after = make_workload(name, OPT, 1.0, 400, 0)
        assert workloads._in_time_alone(after.lengths, after.terms, OPT).all()
    with monkeypatch.context() as patch:
        patch.setattr(workloads, "_draw_again", lambda *_: None)
        before = make_workload("alpaca", OPT, 1.0, 400, 0)
    after = make_workload("alpaca", OPT, 1.0, 400, 0)
    late = ~workloads._in_time_alone(before.lengths, before.terms, OPT)
    assert 0 < late.sum() < 40
    assert (after.ttft[late] > before.ttft[late]).any()
    # The others stay as they were.
    assert (after.ttft[~late] == before.ttft[~late]).all()
    assert (after.prompt_len == before.prompt_len).all()
    monkeypatch.setitem(workloads.DOCUMENT, OPT, SLO(1e-6, 1.0))
    with pytest.raises(WorkloadError, match="too late"):
        make_workload("longbench", OPT, 1.0, 10, 0)


def test_an_overload_lasts_and_ends() -> None:
    count = lasting_count(2.0)
    made = make_workload("sharegpt", OPT, 2.0, count, 0, lasting=True)
    assert count == 2700 == len(made)
    begin, end = (np.count_nonzero(made.arrival < s) for s in (600.0, 900.0))
    assert 0.9 * 2400 < begin < 1.1 * 2400 and 0.9 * 300 < end - begin < 1.2 * 300
    steady = make_workload("sharegpt", OPT, 2.0, count, 0)
    assert (made.prompt_len == steady.prompt_len).all()
    short = make_workload("sharegpt", OPT, 2.0, count // 10, 0, lasting=True)
    assert 80 < short.arrival[-1] < 110


def test_only_the_window_counts() -> None:
    case = LeagueCase(OPT, "sharegpt", "at", "sarathi", 0, 30.0, 60)
    found, result = run(case), runs.simulated(case)
    requests, met = result.requests, result.met.slo(Rule.PAPERS)
    window = slice(10, 60)  # the first sixth warms up
    seconds = requests.arrival[59] - requests.arrival[10]
    assert 0 < met[window].mean() < 1
    assert found.attainment == pytest.approx(met[window].mean(), rel=1e-4)
    assert found.goodput == pytest.approx(met[window].sum() / seconds, rel=1e-4)
    wrote = (requests.token_times >= requests.arrival[10]) & (
        requests.token_times <= requests.arrival[59]
    )
    assert found.throughput == pytest.approx(wrote.sum() / seconds, rel=1e-4)


def test_saturation_is_where_the_best_policy_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "FURTHER", ("rank_i", "edf"))
    case = SaturationCase(OPT, "longbench", 1, 10.0, 8, 40)
    found = saturate(case)
    assert found.idle == 1.0 and found.count == case.count(found.rate)

    def with_gap(name: str, rate: float) -> float:
        return run(LeagueCase(OPT, "longbench", "", name, 0, rate, case.count(rate))).with_gap

    assert found.policy in runs.FURTHER and with_gap(found.policy, found.rate) >= LEVEL
    above = FINE.rate(FINE.nearest(found.rate) + runs.CLIMB)
    assert all(with_gap(name, above) < LEVEL for name in runs.FURTHER)


def test_no_policy_of_whole_prompts_beats_a_proven_optimum() -> None:
    found = optimum(CutCase("lmsys", 30.0))
    assert found.proven
    took = [
        latency("lmsys", name) or 0.0 for name in ("vllm", "sarathi", "orca", "bros", "aptserve")
    ]
    assert min(took) >= found.latency * (1 - 1e-5)
    assert max(took) > found.latency * 1.01


def square(number: int) -> int:
    if number < 0:
        raise ValueError("no negative ones")
    if number > 99:
        os._exit(1)
    return number**2


def test_work_on_several_processes() -> None:
    assert dict(worked(range(5), 2, square)) == {n: n**2 for n in range(5)}
    with pytest.raises(ValueError, match="negative"):
        list(worked([1, -1], 2, square))
    with pytest.raises(ValueError, match="died"):
        list(worked([1, 100], 2, square))


def standings(goodputs: dict[str, tuple[float, float]], own: tuple[str, ...] = ()) -> Standings:
    """Of two workloads: goodputs there by policy."""
    found = Found({}, {}, {}, {}, {})
    for policy, values in goodputs.items():
        for workload, goodput in zip(("sharegpt", "two-tiers"), values, strict=True):
            case = LeagueCase(OPT, workload, "at", policy, 0, 1.0, 9)
            nothing = dict.fromkeys((field.name for field in fields(LeagueNumbers)), 0.0)
            found.runs[case] = LeagueNumbers(
                **{**nothing, "goodput": goodput, "with_gap": 1 / goodput}
            )
    entrants = [policy for policy in goodputs if policy not in own]
    return Standings(found, entrants, own)


def test_standings_are_relative_to_the_best_entrant() -> None:
    made = standings({"a": (2.0, 1.0), "b": (1.0, 4.0), "mine": (4.0, 4.0)}, ("mine",))
    assert made.policies == ["mine", "b", "a"]
    assert [made.relative(point, "a") for point in made.points] == [1.0, 0.25]
    assert made.share("a") == 0.625 and made.share("b") == 0.75
    assert made.relative(made.points[0], "mine") == 2.0  # better than any entrant
    assert made.worst("a").workload == "two-tiers"
    assert made.ranked(made.where(workload="sharegpt")) == ["a", "b"]
    # By another rule, and against all others.
    assert made.ruled("with_gap").ranked(made.where(workload="sharegpt")) == ["b", "a"]
    assert made.against_others("b").relative(made.points[1], "b") == 4.0


def test_advice_names_the_best_and_where_another_is_better() -> None:
    said = advice(standings({"a": (2.0, 3.0), "b": (0.2, 4.0)}))
    assert "`--policy=a`" in said and "88% of the best" in said
    assert "the next, `b`, reaches 55%." in said
    assert said.endswith(" For several tiers, `b` is better at saturation (100% against 75%).")
    assert "better" not in advice(standings({"a": (2.0, 4.0), "b": (0.2, 4.0)}))


def test_a_sentence_that_the_numbers_do_not_carry_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = standings({"a": (2.0, 3.0), "b": (0.2, 4.0)})
    said = [(True, "A is best."), (False, "Pigs fly.")]
    monkeypatch.setattr(reading, "CLAIMS", (lambda s: said[0],))
    assert list(reading.reading(made)) == ["A is best."]
    monkeypatch.setattr(reading, "CLAIMS", tuple(lambda s, one=one: one for one in said))
    with pytest.raises(reading.NotCarried, match="do not carry: Pigs fly"):
        list(reading.reading(made))


def test_which_runs_a_change_of_code_makes_old(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def forget() -> None:
        code.of_all.cache_clear()
        code.code_of.cache_clear()

    request.addfinalizer(forget)
    names = ("sarathi", "aptserve")
    before = {name: code.code_of(name) for name in names}
    read, edits = Path.read_text, dict[str, str]()

    def edited(path: Path, *args: str, **more: str) -> str:
        name = next((name for name in edits if str(path).endswith(f"/{name}")), "")
        return read(path, *args, **more) + edits.get(name, "")

    def changed(files: dict[str, str]) -> set[str]:
        edits.clear()
        edits.update(files)
        forget()
        return {name for name in names if code.code_of(name) != before[name]}

    monkeypatch.setattr(Path, "read_text", edited)
    comment, more = "\n# A comment.\n", "\nMORE = 1\n"
    nobodys = {"sched/unified/unified_policy.py": comment, "simulator/optimal/solve.py": more}
    assert changed(nobodys) == set()
    assert changed({"sched/policies/apt/knapsack.py": more}) == {"aptserve"}
    assert changed({"sched/policies/sarathi.py": more}) == {"sarathi"}
    for everybodys in ("sched/unified/unified_policy.py", "simulator/replica/event_loop.py"):
        assert changed({everybodys: more}) == set(names)


def test_what_prices_bring_where_rows_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of the requests are in time than without them (docs/goodput.md)."""
    case = LeagueCase(LLAMA, "sharegpt", "far above", "goodput", 0, 36.75, 588)
    found = run(case).attainment
    monkeypatch.setattr(Prices, "affordable", lambda _, rows, worth: np.ones(len(rows), bool))
    assert found > 1.1 * run(case).attainment
