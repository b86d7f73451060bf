"""Whatever the workload: every policy stays within C, P and M and ends every request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxserve.sched.cache.groups.groups import peak_blocks
from jaxserve.sched.cache.groups.windows import WindowGroups
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.request import Tier
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from tests.sched.driver import Drive

UNIFIED = [name for name in policies() if isinstance(make_policy(name), UnifiedPolicy)]
NAMES = [*policies(), *(f"{name}+ef" for name in UNIFIED)]  # for +spec see test_drafts_in_plans.py
PROBING = [
    *("rank_i:full_prefill=true:probing=true", "rank_o:probing=true", "sarathi_nocp:probing=true"),
    *("vllm:probing=true", "fastserve:probing=true", "infermax:probing=true"),
]
PENALTIES = [f"aptserve:penalty={charge}" for charge in ("remaining", "redecide")]
HYBRID = [name for name in policies() if make_policy(name).hybrid_cache]
MAX_PROMPT, MAX_OUTPUT = 20, 12
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Job:
    """gap: steps since the one before arrived."""

    prompt: int
    output: int
    gap: int
    tier: Tier
    ttft: float | None
    tbt: float | None


@dataclass(frozen=True)
class Case:
    jobs: list[Job]
    rows: int
    blocks: int
    budget: int
    prefill: int


targets = st.none() | st.sampled_from((0.5, 2.0, 30.0))
jobs = st.builds(
    Job,
    prompt=st.integers(1, MAX_PROMPT),
    output=st.integers(1, MAX_OUTPUT),
    gap=st.sampled_from((0, 0, 0, 1, 5)),
    tier=st.sampled_from(Tier),
    ttft=targets,
    tbt=targets,
)
cases = st.builds(
    Case,
    jobs=st.lists(jobs, min_size=1, max_size=14),
    rows=st.integers(1, 6),
    # From room for the longest request and no more, to room for most.
    blocks=st.integers(2 * -(-(MAX_PROMPT + MAX_OUTPUT) // BLOCK_SIZE), 50),
    budget=st.integers(1, 40),
    prefill=st.integers(1, 40),
)


def serve(
    policy: str,
    case: Case,
    rho: float | None = None,
    host_slots: int = 0,
    guessable: tuple[float, float] | None = None,
    groups: WindowGroups | None = None,
) -> Drive:
    """Runs the case to its end; `Drive` checks every step."""
    whole = not make_policy(policy).chunked
    c = max(case.budget, MAX_PROMPT + MAX_OUTPUT if whole else case.rows)
    drive = Drive(
        policy,
        c=c,
        p=c if whole else min(case.prefill, c),
        rows=case.rows,
        blocks=_blocks(case.blocks, c, groups),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_PROMPT + MAX_OUTPUT,
        seed=case.budget,
        rho=rho,
        host_slots=host_slots,
        guessable=guessable,
        groups=groups,
    )
    for job in case.jobs:
        for _ in range(job.gap if drive.live else 0):
            if drive.live:
                drive.step(float(len(drive.plans)))
        slo = {"ttft": job.ttft, "tbt": job.tbt}
        drive.add(
            job.prompt,
            job.output,
            arrival=float(len(drive.plans)),
            tier=job.tier,
            **{name: value for name, value in slo.items() if value is not None},
        )
    drive.to_the_end()
    return drive


def _blocks(blocks: int, ahead: int, groups: WindowGroups | None) -> int:
    """More by what the longest request needs in groups with a window."""
    longest = MAX_PROMPT + MAX_OUTPUT
    alone = (peak_blocks(longest, BLOCK_SIZE, each, ahead) for each in (groups, None))
    return blocks + int(np.subtract(*alone))


quick = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# One row: what a best-effort request gives to a real-time one must not go to another of its kind.
GIVES_WAY = Case(
    jobs=[
        *[Job(1, 2, 0, Tier.BEST_EFFORT, ttft=None, tbt=None)] * 2,
        Job(1, 1, 0, Tier.REALTIME, ttft=None, tbt=None),
    ],
    rows=1,
    blocks=16,
    budget=1,
    prefill=1,
)


@pytest.mark.parametrize("policy", [*NAMES, *PROBING])
@quick
@example(case=GIVES_WAY)
@given(case=cases)
def test_serves_everything_within_the_limits(policy: str, case: Case) -> None:
    drive = serve(policy, case)
    assert len(drive.ended) == len(case.jobs)
    assert len(drive.preempted) + drive.cuts == drive.scheduler.preemptions
    if "+ef" in policy:
        assert not drive.preempted


@pytest.mark.parametrize("policy", ["aptserve_kv", *HYBRID, *PENALTIES])
@quick
@given(rho=st.sampled_from([-1e-3, 0.0, 1e-3, 1.0]), case=cases)
def test_hidden_caches_stay_within_the_limits(policy: str, rho: float, case: Case) -> None:
    drive = serve(policy, case, rho)
    assert len(drive.ended) == len(case.jobs)
    assert len(drive.preempted) == drive.scheduler.preemptions
    assert drive.policy.hybrid_cache or not drive.hidden
    assert rho > 0 or not drive.projected


WINDOWED = [name for name in NAMES if not make_policy(name).two_sided]


@pytest.mark.parametrize("policy", WINDOWED)
@settings(quick, max_examples=3)
@given(case=cases, window=st.integers(1, 20), count=st.integers(1, 3), host=st.integers(0, 60))
def test_windows_stay_within_the_limits(
    policy: str, case: Case, window: int, count: int, host: int
) -> None:
    drive = serve(policy, case, host_slots=host, groups=WindowGroups(window, count))
    assert len(drive.ended) == len(case.jobs)


@settings(quick, max_examples=20)
@given(case=cases)
def test_vllm_starves_nobody(case: Case) -> None:
    """Requests start in order of arrival; and all of them do, or the run would not end."""
    drive = serve("vllm", case)
    arrival = drive.order_of_first_start()
    assert arrival == sorted(arrival)


@settings(quick, max_examples=25)
@given(case=cases)
def test_orca_never_preempts(case: Case) -> None:
    assert not serve("orca", case).preempted
