"""Simulated drafts: the same texts whatever is planned, and the loop of an engine that drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.simulator.replica import replica
from jaxserve.simulator.replica.drafter import Guesses
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.simulator import SimulationError
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.closed_loop import parse_closed_loop
from jaxserve.simulator.workloads.guessable import Chances
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from tests.simulator.grouped import simulate

PLACE = system("llama-3-70b@4xa100")


def workload(
    share: float, right: float, count: int = 30, rate: float = 4.0, name: str = "humaneval"
) -> Workload:
    spec = WorkloadSpec(name, count, rate=rate, guessable=Chances(share, right))
    return spec.make_workload(0)


def run(policy: str, work: Workload, **options: Any) -> SimulationResult:
    return simulate(policy, work, PLACE, **{"checked": True, **options})


def test_without_guesses_nothing_changes() -> None:
    plain, drafting = (run(name, workload(0.0, 0.0)) for name in ("sarathi", "sarathi+spec"))
    np.testing.assert_array_equal(plain.requests.token_times, drafting.requests.token_times)
    assert drafting.requests.drafts is None and not drafting.seed_read
    assert "drafted_tokens" not in drafting.summary()


@pytest.mark.parametrize("policy", ["sarathi", "goodput", "aptserve_s", "bros"])
def test_what_is_guessed_comes_in_fewer_steps(policy: str) -> None:
    work = workload(0.6, 0.8)
    plain, drafting = (run(name, work) for name in (policy, f"{policy}+spec"))
    assert drafting.requests.finished.all() and drafting.seed_read
    assert len(drafting.batches) < 0.9 * len(plain.batches)
    assert drafting.requests.drafts is not None
    drafted, accepted = drafting.requests.drafts
    assert (accepted <= drafted).all() and 0 < accepted.sum() < drafted.sum()
    assert (accepted < work.output_len).all()
    summary = drafting.summary()
    assert summary["drafted_tokens"] == drafted.sum() == summary["drafted_tokens"]
    # Every batch computes what it decodes, its chunks and its drafts.
    tokens = drafting.batches.num_tokens.sum() - drafting.batches.num_recomputed.sum()
    known = work.prompt_len.sum() + work.output_len.sum() - accepted.sum() - len(work)
    late = tokens - known - drafted.sum()
    assert 0 <= late <= len(work), "who ends early takes part once more at most"


def test_a_text_that_is_always_right_comes_eight_tokens_a_step() -> None:
    work = replace(workload(1.0, 1.0, count=1), limit=np.array([400]), output_len=np.array([161]))
    found = run("sarathi+spec", work)
    # One for the prompt; before anything is known of the guesses, fewer may be drafted.
    assert 21 <= len(found.batches) <= 24
    assert found.requests.drafts is not None
    assert int(found.requests.drafts[1].sum()) >= 160 - 23


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_drafts_is_finished_before_the_next_is_planned(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flying, waited = [], []
    launch = replica.Replica._launch

    def watched(self: replica.Replica) -> Any:
        flying.append(self._pending)
        return launch(self)

    monkeypatch.setattr(replica.Replica, "_launch", watched)
    place = replace(PLACE, host=HostOverhead(plan=1e-3, launch=1e-3, finish=1e-3))
    found = simulate("sarathi+spec", workload(0.7, 0.8), place, overlap=overlap)
    assert found.requests.finished.all()
    assert all(step is None or step.drafts is None for step in flying)
    waited = [step is None for step in flying]
    assert all(waited) if not overlap else 0.1 < np.mean(waited) < 1
    if overlap:  # the device waits for the host where it has to
        gaps = found.batches.start[1:] - (found.batches.start + found.batches.duration)[:-1]
        assert (gaps > 2.9e-3).any()


def test_the_host_time_that_drafts_expose_is_what_policies_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    launch = replica.Replica._launch

    def watched(self: replica.Replica) -> Any:
        seen.append(self.scheduler.view.device.host_gap_s)
        return launch(self)

    monkeypatch.setattr(replica.Replica, "_launch", watched)
    place = replace(PLACE, host=HostOverhead(plan=1e-3, launch=2e-3, finish=3e-3))
    simulate("sarathi+spec", workload(0.5, 0.6), place)
    assert seen[0] == 0 and seen[-1] == pytest.approx(6e-3, rel=0.01)
    seen.clear()
    simulate("sarathi+spec", workload(0.5, 0.6), place, overlap=False)
    assert set(seen) == {0.0}
    # Where waiting for the host costs as much as a step, drafts hardly pay. Where each step waits
    # for the host anyway, they are free.
    few = workload(0.5, 0.6, count=12, rate=0.2)
    for finish, most in ((0.02, 1.01), (1.0, 0.85)):
        place = replace(PLACE, host=HostOverhead(finish=finish))
        plain, drafting = (simulate(name, few, place) for name in ("sarathi", "sarathi+spec"))
        assert drafting.batches.start[-1] < most * plain.batches.start[-1]


def test_texts_are_the_same_whatever_is_planned() -> None:
    work = workload(0.5, 0.6)
    one, again, other = (Guesses(work, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.ahead, again.ahead)
    assert (one.ahead != other.ahead).any()
    # A request's text depends on its number, not on the others.
    few = Guesses(work.first(10), 0)
    np.testing.assert_array_equal(few.offered, one.offered[: len(few)])
    first, second = (run("sarathi+spec", work, seed=seed) for seed in (0, 0))
    np.testing.assert_array_equal(first.requests.token_times, second.requests.token_times)


def test_it_finds_what_accepted_drafts_have_filled() -> None:
    """Turns are far apart, so each finds all of the one before it, drafted or not; but for a block
    that its last step has filled, as its keys are not told any more."""
    spec = WorkloadSpec("conversation", 20, rate=0.05, guessable=Chances(0.8, 0.8))
    work = spec.make_workload(0)
    plain, drafting = (run(name, work, prefix_caching=True) for name in ("sarathi", "sarathi+spec"))
    assert plain.requests.found is not None and drafting.requests.found is not None
    assert plain.requests.found.sum() > 0
    fewer = plain.requests.found - drafting.requests.found
    assert set(fewer) <= {0, 16} and (fewer > 0).mean() < 0.5


def test_replicas_and_closed_loops_draft_too() -> None:
    loop = parse_closed_loop("closed:batch=2,input=uniform:20:40,output=uniform:5:9")
    found = run("sarathi+spec", workload(0.8, 0.8), best_effort=loop, until=5.0)
    assert found.requests.drafts is not None
    mine = found.requests.workload.guess_share > 0
    assert found.requests.drafts[0][mine].sum() > 0
    assert not found.requests.drafts[0][~mine].any()
    several = run("sarathi+spec", workload(0.8, 0.8), replicas=2)
    assert several.requests.finished.all()


def test_drafts_are_priced_in_python() -> None:
    with pytest.raises(SimulationError, match="drafts are not compiled"):
        simulate("sarathi+spec", workload(0.5, 0.5), PLACE, compiled=True)
