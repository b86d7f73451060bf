"""Best-effort requests without targets make room for requests that have some and can be in time,
under every policy that knows targets, and waits are predicted so."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.policies.goodput.batch import GoodputBatch, GoodputWork
from jaxserve.sched.policies.goodput.outlook import Deadlines, Lengths, Outlook
from jaxserve.sched.policies.goodput.pausing import FREE_OF_LOSS, Memory, Returns
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.metrics import attained
from jaxserve.sched.slo.ttft_estimator import TtftEstimator
from jaxserve.sched.state.request_table import RUNNING
from jaxserve.simulator.simulator import default_limits
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.closed_loop import ClosedLoop
from jaxserve.simulator.workloads.lengths import Uniform
from jaxserve.simulator.workloads.specs import WorkloadSpec
from tests.sched.driver import Drive
from tests.sched.policies.test_goodput import STANDARD, learned
from tests.simulator.grouped import simulate

PLACE = system("llama-3-8b@a100")
SLACK = ("qoserve", "fairbatching", "slidingserve")
MORE = (*SLACK, "aptserve_s")
BEST = Tier.BEST_EFFORT
SECONDS = 20.0


def served(policy: str) -> tuple[float, int]:
    """What share of chats was in time beside twice as many long best-effort requests as there are
    rows, and how many tokens those wrote."""
    spec = WorkloadSpec("alpaca", rate=2, duration=SECONDS, slo=SLO(1.0, 0.2))
    found = simulate(
        policy,
        spec.make_workload(0),
        PLACE,
        limits=default_limits(make_policy(policy), PLACE, max_rows=32),
        best_effort=ClosedLoop(64, Uniform(200, 1000), Uniform(400, 800)),
        until=SECONDS,
        compiled=False,
    ).requests
    chats = found.workload.tier == Tier.REALTIME
    met = attained(found.times, found.workload.terms).slo()
    return float(met[chats].mean()), int(found.times.tokens[~chats].sum())


@pytest.mark.parametrize(
    "policy", ["goodput", "aptserve", *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)]
)
def test_chats_are_in_time_beside_a_batch_that_fills_all_rows(policy: str) -> None:
    met, wrote = served(policy)
    assert met > 0.97, met
    assert wrote > 0.8 * served("sarathi")[1], "the batch has what is left"


def test_a_parameter_keeps_the_papers_rule() -> None:
    assert served("qoserve:makes_way=false")[0] < 0.9


@pytest.mark.parametrize("scarce", [{"rows": 4}, {"blocks": 64}])
@pytest.mark.parametrize("policy", ["goodput", "aptserve", *MORE])
def test_the_newcomer_has_its_place_in_the_next_step(policy: str, scarce: dict[str, int]) -> None:
    """Whether rows or blocks are short, and however long the caches are."""
    drive = Drive(policy, c=256, p=256, max_model_len=256, **({"blocks": 4096} | scarce))
    batch = [drive.add(prompt=20, output=100, tier=BEST) for _ in range(4)]
    now = 0.0
    while len(drive.plans) < 4 or ("blocks" in scarce and drive.pool.num_free >= 8):
        drive.step(now)
        now += 0.01
    chat = drive.add(prompt=16, output=4, arrival=now, ttft=0.5, tbt=0.5)
    other = drive.add(prompt=40, output=4, arrival=now, tier=BEST)
    step = drive.step(now)
    while chat not in step and policy == "aptserve":  # once prompts have waited for as long
        now += 0.01
        step = drive.step(now)
    assert step.get(chat) == 16 and other not in step and now < 0.5
    assert len(drive.preempted) >= 1 and set(drive.preempted) < set(batch)
    drive.to_the_end()


@pytest.mark.parametrize("policy", SLACK)
def test_who_is_due_at_last_keeps_its_cache(policy: str) -> None:
    drive = Drive(policy, rows=1, ttlt=5.0)
    batch = drive.add(prompt=8, output=40, tier=BEST)
    drive.step(0.0)
    drive.add(prompt=8, output=4, arrival=5.1, ttft=1.0)
    assert drive.step(5.2) == {batch: 1} and not drive.preempted


def test_who_has_no_targets_is_paused_before_who_has_missed_its_own() -> None:
    """The cache of that one takes longer to come back than the prompt."""
    drive = Drive("goodput", rows=2)
    learned(drive, 30)
    lost = drive.add(prompt=30, output=30, ttft=1e-3, tbt=9.0)
    batch = drive.add(prompt=24, output=30, tier=BEST)
    while len(drive.table.in_state(RUNNING)) < 2:
        drive.step(1.0 + 0.01 * len(drive.plans))
    chat = drive.add(prompt=8, output=4, arrival=1.2, ttft=0.5)
    assert drive.step(1.2)[chat] == 8 and drive.preempted == [batch] != [lost]


def test_a_prompt_without_targets_makes_room_before_it_is_computed() -> None:
    drive = Drive("goodput", c=16, p=16, rows=1)
    batch = drive.add(prompt=60, output=4, tier=BEST)
    drive.step(0.0)
    assert 0 < drive.table.computed[batch] < 60
    chat = drive.add(prompt=8, output=4, arrival=0.1, ttft=0.5)
    assert drive.step(0.1) == {chat: 8} and drive.preempted == [batch]


@pytest.mark.parametrize("tier", Tier)
def test_who_was_paused_takes_the_place_of_who_has_no_targets_alone(tier: Tier) -> None:
    """The other one loses nothing either: it is sure to get to 102 tokens."""
    drive = Drive("goodput", rows=1)
    learned(drive, 150)
    targets = {} if tier == BEST else {"ttft": 9.0, "tbt": 9.0, "max_tbt": 1e4}
    holder = drive.add(prompt=8, output=200, tier=tier, **targets)
    drive.step(0.0)
    chat = drive.add(prompt=8, output=9, arrival=0.1, ttft=9.0, tbt=9.0)
    view, rows = drive.scheduler.view, np.array([holder, chat])
    lengths = Lengths()
    lengths.read(view)
    due = Deadlines.of_rows(view, rows, STANDARD, 0.2)
    seen = Outlook.of_rows(view, rows, due, np.ones(2), 0.2, lengths, 0.01)
    work = GoodputWork.of_rows(view, rows, seen, kind=0)
    assert work.loss[0] == 0.0
    for paused in (False, True):
        work.paused[1] = paused
        batch, nobody = GoodputBatch(view, work), np.zeros(2, bool)
        memory = Memory(view, work, batch, nobody, 0.01, Returns(), swaps=True)
        found = memory.make_room(np.array([1]), FREE_OF_LOSS)
        assert (found == 1) == (memory.preempted == [holder]) == (tier == BEST or not paused)


def waiting(
    drive: Drive, now: float, tier: Tier = Tier.REALTIME, ttft: float | None = 0.5
) -> float:
    """How long it would be for one that comes now, seconds."""
    request = Request("new", (0,) * 16, SamplingParams(8), SLO(ttft=ttft), tier, now)
    found = TtftEstimator(Backlog.from_scheduler(drive.scheduler, now, now))
    return found.wait(request, now).seconds


@pytest.mark.parametrize("policy", ["goodput", *SLACK, "bros", "priority"])
def test_who_makes_room_is_predicted(policy: str) -> None:
    """Outputs have 30 tokens. For a chat the batch makes room, for others nobody does."""
    drive = Drive(policy, rows=4)
    learned(drive, 30)
    for _ in range(4):
        drive.add(prompt=20, output=32, tier=BEST)
    while (drive.table.generated[drive.table.in_state(RUNNING)] > 1).sum() < 4:
        drive.step(0.01 * len(drive.plans))
    now = 0.01 * len(drive.plans)
    chat, more = waiting(drive, now), waiting(drive, now, BEST, None)
    row = drive.add(prompt=16, output=8, arrival=now, ttft=0.5)
    assert drive.step(now).get(row) == 16, "the policy does what is predicted"
    assert chat < 0.005 < 0.02 < more


@pytest.mark.parametrize("policy", ["goodput", *SLACK])
def test_chats_make_no_room_for_each_other(policy: str) -> None:
    drive = Drive(policy, rows=4)
    learned(drive, 30)
    for _ in range(4):
        drive.add(prompt=20, output=32, ttft=9.0, tbt=9.0)
    for step in range(3):
        drive.step(0.01 * step)
    assert waiting(drive, 0.03) > 0.02


@pytest.mark.promise(39)
def test_nobody_is_refused_for_a_batch_that_makes_room() -> None:
    """With refusals as a server has them, of who is expected to be late."""
    spec = WorkloadSpec("alpaca", rate=2, duration=20.0, slo=SLO(1.0, 0.2))
    found = simulate(
        "goodput",
        spec.make_workload(0),
        PLACE,
        limits=Limits(8192, 512, 32),
        refuse_late=1.0,
        best_effort=ClosedLoop(64, Uniform(200, 1000), Uniform(400, 800)),
        until=20.0,
        compiled=False,
    ).requests
    chats = found.workload.tier == Tier.REALTIME
    assert not (found.refused & chats).any()
