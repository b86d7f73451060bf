"""Routers: who gets a request, from snapshots that are late or lost."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, InferMaxCostModel, LinearCostModel
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.routing.estimate import first_token
from jaxserve.sched.routing.fleet import Fleet, Role, RoutingRequest
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.routing.random_draws import MODULUS, below, drawn, seeded
from jaxserve.sched.routing.routers import ROUTERS, NoReplica, Router
from jaxserve.sched.routing.snapshot import KNOWN, Prices, Snapshot, reset_known
from jaxserve.sched.routing.take_snapshot import (
    Lately,
    constant_fields,
    idle_snapshot,
    lately,
    serves_by_tier,
    take_snapshot,
)
from jaxserve.sched.slo.backlog import Backlog
from jaxserve.sched.slo.ttft_estimator import TtftEstimator
from jaxserve.sched.state.request_table import Outlook
from tests.cost_models import FLAT
from tests.sched.driver import Drive

MODEL = LinearCostModel(Coefficients(1e-5, 1e-3, 1e-9, 1e-5, 1e-6, 1e-10, 1e-5, 1e-6, 1e-9), 2)
FIXED = constant_fields(MODEL, make_policy("sarathi"), Limits(4096, 512, 64), 1000, 16)


def busy(time: float = 0.0, **numbers: Any) -> Snapshot:
    """A replica with that to do."""
    return dataclasses.replace(idle_snapshot(FIXED, time), **numbers)


def fleet_of(*snapshots: Snapshot) -> Fleet:
    fleet = Fleet(len(snapshots))
    for replica, snapshot in enumerate(snapshots):
        fleet.hear(replica, snapshot)
    return fleet


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=30)
@given(data=st.data(), count=st.integers(1, 9), seed=st.integers(0, 2**62))
def test_nothing_goes_to_a_dead_or_draining_replica(
    name: str, data: st.DataObject, count: int, seed: int
) -> None:
    states = data.draw(st.lists(st.sampled_from("udl"), min_size=count, max_size=count))
    fleet = fleet_of(*(busy(draining=state == "d") for state in states))
    for replica, state in enumerate(states):
        if state == "l":
            fleet.lose(replica)
    router = Router(name, fleet, seed)
    up = {replica for replica, state in enumerate(states) if state == "u"}
    assert set(np.flatnonzero(fleet.up).tolist()) == up
    for number in range(12):
        if not up:
            with pytest.raises(NoReplica, match="no replica takes requests"):
                router.choose(RoutingRequest(9), float(number))
            continue
        chosen = router.choose(RoutingRequest(9), float(number))
        assert chosen in up
        fleet.send(chosen, RoutingRequest(9), float(number))


def test_a_replica_that_nobody_has_heard_of_gets_nothing() -> None:
    fleet = Fleet(2)
    with pytest.raises(NoReplica):
        Router("slo", fleet).choose(RoutingRequest(9), 0.0)
    fleet.hear(1, busy())
    assert Router("slo", fleet).choose(RoutingRequest(9), 0.0) == 1
    fleet.lose(1)
    fleet.find(0)
    assert Router("round_robin", fleet).choose(RoutingRequest(9), 0.0) == 0


def test_turns_go_round_and_pass_the_dead() -> None:
    fleet = fleet_of(*[busy()] * 4)
    router = Router("round_robin", fleet)
    fleet.lose(2)
    assert [router.choose(RoutingRequest(1), 0.0) for _ in range(7)] == [0, 1, 3, 0, 1, 3, 0]


def test_the_fewest_unfinished_what_was_sent_since_included() -> None:
    fleet = fleet_of(busy(unfinished=3), busy(unfinished=1), busy(unfinished=2))
    router, chosen = Router("least_loaded", fleet), []
    for _ in range(4):
        chosen.append(router.choose(RoutingRequest(9), 1.0))
        fleet.send(chosen[-1], RoutingRequest(9), 1.0)
    assert chosen == [1, 1, 2, 0]
    fleet.hear(1, busy(2.0, unfinished=0))  # it had them all by then, and they are over
    assert router.choose(RoutingRequest(9), 2.0) == 1


def test_two_choices_are_two_and_all_are_drawn() -> None:
    fleet = fleet_of(*(busy(unfinished=load) for load in range(6)))
    router = Router("two_choices", fleet, seed=3)
    chosen = [router.choose(RoutingRequest(9), 0.0) for _ in range(400)]
    counts = np.bincount(chosen, minlength=6)
    assert counts[5] == 0, "the most loaded is never the less loaded of two"
    # The k-th is the less loaded of the pair with 5 - k of the 15 pairs.
    assert (np.abs(counts[:5] / 400 - np.arange(5, 0, -1) / 15) < 0.08).all()
    assert chosen != [Router("two_choices", fleet, seed=4).choose(RoutingRequest(9), 0.0)] * 400


@given(state=st.integers(1, MODULUS - 1), count=st.integers(1, 1024))
def test_draws_stay_in_their_range(state: int, count: int) -> None:
    after = drawn(state)
    assert 1 <= after < MODULUS and 0 <= below(after, count) < count
    assert 1 <= seeded(state, count) < MODULUS


@given(times=st.lists(st.floats(0, 10), min_size=1, max_size=8), at=st.floats(0, 10))
def test_a_snapshot_forgets_what_it_has_seen_and_keeps_what_came_since(
    times: list[float], at: float
) -> None:
    fleet, alone = fleet_of(busy()), fleet_of(busy(at, unfinished=5))
    for number, time in enumerate(sorted(times)):
        fleet.send(0, RoutingRequest(100 + number, number % 2), time)
        if time > at:
            alone.send(0, RoutingRequest(100 + number, number % 2), time)
    fleet.hear(0, busy(at, unfinished=5))
    for name in KNOWN.names or ():
        assert getattr(fleet.columns, name) == getattr(alone.columns, name), name


def test_an_older_snapshot_says_nothing() -> None:
    fleet = fleet_of(busy(2.0, unfinished=7))
    fleet.hear(0, busy(1.0, unfinished=1))
    assert fleet.columns.unfinished[0] == 7


def choice_of(ask: RoutingRequest, *snapshots: Snapshot, name: str = "slo") -> int:
    return Router(name, fleet_of(*snapshots)).choose(ask, 0.0)


def test_slo_looks_at_work_not_at_requests() -> None:
    """One replica has three short requests, the other one long prompt."""
    few, long = busy(unfinished=3, running=3), busy(unfinished=1, waiting=1, realtime_tokens=40_000)
    ask = RoutingRequest(100, ttft=1.0)
    assert choice_of(ask, few, long, name="least_loaded") == 1 and choice_of(ask, few, long) == 0


@pytest.mark.parametrize(
    ("ask", "one", "other"),
    [
        (
            RoutingRequest(400, ttft=0.5),
            {"running": 9, "cached": 8000, "free_blocks": 0, "mean_output": 200.0},
            {"running": 12},
        ),
        (RoutingRequest(3000, ttft=1.0), {"pace": 3.0}, {"running": 4}),
        (
            RoutingRequest(2000, ttft=9.0),
            {"running": 20, "cached": 20_000, "tbt": 0.015},
            {"running": 21, "cached": 21_000, "tbt": 5.0},
        ),
        (RoutingRequest(9, ttft=1.0), {"attainment": 0.0}, {"running": 5}),
        (RoutingRequest(9, ttft=1.0), {"busy": 0.3}, {}),
    ],
)
def test_slo_looks_at_blocks_and_at_how_steps_are(
    ask: RoutingRequest, one: dict[str, float], other: dict[str, float]
) -> None:
    assert choice_of(ask, busy(**one), busy(**other)) == 1


def test_slo_looks_at_tiers() -> None:
    behind = busy(best_effort_tokens=50_000, best_effort_quad=10**9, by_tier=True)
    some = busy(realtime_tokens=5_000)
    for tier, replica in ((Tier.REALTIME, 0), (Tier.BEST_EFFORT, 1)):
        assert choice_of(RoutingRequest(100, int(tier), 1.0), behind, some) == replica


def test_slo_sends_elsewhere_where_requests_are_given_up() -> None:
    """If another is in time; where none is, whoever has least before it."""
    ask = RoutingRequest(100, ttft=0.5)
    gives_up = busy(waiting=5, given_up=5, relegated=5, relegated_tokens=60_000)
    fleet = fleet_of(gives_up, busy(realtime_tokens=200, waiting=1))
    assert Router("slo", fleet).choose(ask, 0.0) == 1
    assert Router("least_loaded", fleet).choose(ask, 0.0) == 0
    s = fleet.columns
    first = first_token(s, s.realtime_work, s.realtime_short, ask, 0, 0.0)
    assert first[0] < first[1], "it does not wait for them"
    late = fleet_of(gives_up, busy(realtime_tokens=30_000, waiting=1))
    assert Router("slo", late).choose(ask, 0.0) == 0


def test_best_effort_requests_wait_for_those_who_are_relegated_real_time_ones_do_not() -> None:
    many = {"waiting": 70, "relegated": 70, "relegated_tokens": 5000}
    for by_tier in (True, False):
        fleet = fleet_of(busy(by_tier=by_tier), busy(by_tier=by_tier, **many))
        s = fleet.columns
        assert s.realtime_work[0] == s.realtime_work[1] < s.best_effort_work[1]
        assert (s.rows_short == -64).all(), "nor for their rows"


@given(tokens=st.integers(0, 10**5), more=st.integers(1, 10**4), age=st.floats(0, 5))
def test_the_first_token_comes_later_behind_more_and_sooner_with_time(
    tokens: int, more: int, age: float
) -> None:
    def seconds(behind: int, now: float) -> float:
        (s,) = np.zeros(1, KNOWN).view(np.recarray)
        reset_known(s, busy(realtime_tokens=behind))
        return float(first_token(s, s.realtime_work, s.realtime_short, RoutingRequest(500), 0, now))

    assert seconds(tokens, 0.0) < seconds(tokens + more, 0.0)
    assert seconds(tokens, age) <= seconds(tokens, 0.0)
    alone = seconds(0, 0.0)
    assert seconds(tokens, age) >= alone > 0


def expected(fleet: Fleet, now: float) -> float:
    s = fleet.columns
    return float(first_token(s, s.realtime_work, s.realtime_short, RoutingRequest(500), 0, now)[0])


@given(idle_s=st.floats(0.1, 5), more=st.integers(1, 10**4), count=st.integers(1, 4))
def test_time_without_work_does_nothing_for_what_comes_then(
    idle_s: float, more: int, count: int
) -> None:
    """A replica that had nothing to do when it was last heard of, and then gets some at once."""
    late, at_once = fleet_of(busy()), fleet_of(busy())
    for _ in range(count):
        late.send(0, RoutingRequest(more), idle_s)
        at_once.send(0, RoutingRequest(more), 0.0)
    assert expected(late, idle_s) == pytest.approx(expected(at_once, 0.0))
    # And as well behind a snapshot that comes later and is from before.
    late.hear(0, busy(0.05))
    assert expected(late, idle_s) == pytest.approx(expected(at_once, 0.0))


def test_the_steps_that_the_device_has_are_waited_for() -> None:
    alone, behind = fleet_of(busy()), fleet_of(busy(busy=0.3))
    assert expected(behind, 0.1) - expected(alone, 0.1) == pytest.approx(0.2)
    assert expected(behind, 0.4) == expected(alone, 0.4)


def test_the_sequences_of_a_call_add_up_as_calls_of_one_each() -> None:
    together, apart = fleet_of(busy(time=1.0)), fleet_of(busy(time=1.0))
    together.send(0, RoutingRequest(160, tbt=0.1, sequences=8, prompts=8), 1.0)
    for _ in range(8):
        apart.send(0, RoutingRequest(160, tbt=0.1), 1.0)
    for name in KNOWN.names or ():
        assert getattr(together.columns, name) == pytest.approx(getattr(apart.columns, name)), name


def test_a_prompt_is_computed_once_for_all_its_continuations() -> None:
    one, eight = fleet_of(busy(time=1.0)), fleet_of(busy(time=1.0))
    one.send(0, RoutingRequest(160, tbt=0.1), 1.0)
    eight.send(0, RoutingRequest(160, tbt=0.1, sequences=8), 1.0)
    assert eight.columns.realtime_work == one.columns.realtime_work > 0
    more = eight.columns.realtime_short - one.columns.realtime_short
    assert more == 2 * 7, "the last block of each other one's own, K and V"
    assert eight.columns.unfinished == 8 and eight.columns.decode > one.columns.decode
    (s,) = np.zeros(1, KNOWN).view(np.recarray)
    reset_known(s, busy())
    work = (s, s.realtime_work, s.realtime_short)
    asked = (RoutingRequest(500), RoutingRequest(500, sequences=8))
    first, of_eight = (float(first_token(*work, ask, 0, 0)) for ask in asked)
    assert of_eight == pytest.approx(first)


def test_a_call_is_as_late_as_the_last_of_its_sequences() -> None:
    fleet = fleet_of(busy(running=60, mean_output=50.0))  # of 64 rows
    (s,) = np.zeros(1, KNOWN).view(np.recarray)
    reset_known(s, busy(running=60, mean_output=50.0))
    assert fleet.columns.rows_short[0] == -4
    work = (s, s.realtime_work, s.realtime_short)
    few, many = (float(first_token(*work, RoutingRequest(50, sequences=k), 0, 0)) for k in (4, 16))
    assert many > few + 0.5 * 12 * float(s.per_row)


def test_prices_are_those_of_the_model() -> None:
    prices = Prices.from_cost_model(MODEL)
    assert prices == Prices.from_cost_model(OnlineCostModel(MODEL))
    assert prices == Prices.from_cost_model(InferMaxCostModel(MODEL, (0.0, 0.0, 0.0)))
    assert prices.read == 2e-9 and prices.step == pytest.approx(2 * 1.01e-3)

    class Own:
        def batch_time(self, features: Any) -> float:
            return 1.0

    with pytest.raises(ValueError, match="Own has no linear prices"):
        Prices.from_cost_model(Own())


def test_a_snapshot_is_plain_numbers() -> None:
    there = json.loads(json.dumps(busy(1.5, unfinished=2, tbt=0.5).as_dict()))
    assert Snapshot(**there) == busy(1.5, unfinished=2, tbt=0.5)


def test_means_of_the_latest() -> None:
    mean, seen = lately(0.0, 0, 4, 40)
    assert (mean, seen) == (10.0, 4)
    mean, seen = lately(mean, 200, 100, 100 * 20)
    assert (mean, seen) == (15.0, 200)
    learned = Lately()
    learned.began(2, 1)
    learned.ended(np.array([3, 5]))
    learned.stepped(2.0)
    assert (learned.attainment, learned.mean_output) == (0.5, 4.0) and 1 < learned.pace < 2


@pytest.mark.parametrize(
    "policy, by_tier", [("sarathi", False), ("priority", True), ("bros", True), ("vllm", False)]
)
def test_who_serves_by_tier(policy: str, by_tier: bool) -> None:
    assert serves_by_tier(make_policy(policy)) == by_tier


def test_what_a_router_sees_of_a_request() -> None:
    request = Request("r", (1, 2, 3), slo=SLO(ttft=0.5), tier=Tier.BEST_EFFORT)
    assert RoutingRequest.from_request(request, 16) == RoutingRequest(3, 1, 0.5, np.inf, np.inf)
    with pytest.raises(ValueError, match="no routing 'nowhere'; known: round_robin"):
        Router("nowhere", Fleet(1))


@settings(max_examples=30)
@given(
    prompts=st.lists(st.integers(1, 60), max_size=12),
    lost=st.lists(st.integers(1, 60), max_size=4),
    own=st.integers(1, 60),
    budget=st.integers(8, 64),
)
def test_routers_and_doors_predict_the_same_but_for_a_step(
    prompts: list[int], lost: list[int], own: int, budget: int
) -> None:
    """Where nothing is short and all come in order, but for relegated ones, which are not before
    it. A door counts steps, a router shares out what one costs by token, and adds the decode behind
    the last."""
    drive = Drive("sarathi", c=budget, p=budget, rows=64, blocks=1024)
    for prompt in prompts:
        drive.add(prompt=prompt, output=4)
    rows = [drive.add(prompt=prompt, output=4, ttft=1.0) for prompt in lost]
    drive.table.give_up(np.array(rows, np.int64), Outlook.RELEGATED)
    backlog = Backlog.from_scheduler(drive.scheduler, 0.0, 0.0)
    door = TtftEstimator(backlog).wait(Request("new", (0,) * own), 0.0).seconds
    known = constant_fields(FLAT, drive.policy, drive.limits, 1024, 4)
    fleet = fleet_of(take_snapshot(backlog, len(backlog), known, Lately(), draining=False))
    s = fleet.columns
    (router,) = first_token(s, s.realtime_work, s.realtime_short, RoutingRequest(own), 0, 0.0)
    prices, steps = Prices.from_cost_model(FLAT), -(-(sum(prompts) + own) // budget)
    # Those of a door have whole tokens, as many in each.
    assert abs(router - door) <= prices.step + steps * prices.token + 1e-9


def test_a_role_lasts_until_its_replica_is_forgotten() -> None:
    fleet, up = Fleet(2), np.array([True, True])
    assert fleet.taking(up, prompts=True).tolist() == [True, True]
    fleet.set_role(0, Role.PROMPTS)
    fleet.set_role(1, Role.DECODES)
    moves = Router("slo", fleet, link=Link(0.001, 0.0))
    fleet.grow(1)
    up = np.array([True, True, True])
    assert fleet.taking(up, prompts=True).tolist() == [True, False, True]
    assert fleet.taking(up, prompts=False).tolist() == [False, True, True]
    up[[0, 2]] = False
    assert fleet.taking(up, prompts=True).tolist() == [False, True, False], "there is no other"
    fleet.forget(1)
    fleet.set_role(2, Role.PROMPTS)
    up[1:] = True
    assert fleet.taking(up, prompts=True).tolist() == [False, True, True]
    for place in range(3):
        fleet.hear(place, idle_snapshot(FIXED))
    fleet.send(moves.choose(RoutingRequest(99), 0.1), RoutingRequest(99), 0.1)
    assert (fleet.prompts.argmax(1) == 0).all() and (fleet.prompts[:, 0] > 0).all()
    assert moves.goes_on_at(0, RoutingRequest(100), 0.2) == 1
    assert moves.goes_on_at(0, RoutingRequest(100), 0.2, besides=[1]) == 0, "2 is for prompts"
