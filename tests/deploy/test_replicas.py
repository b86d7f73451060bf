"""Replicas by name, which come and go."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.deploy import replicas as module
from jaxserve.deploy.replicas import Replicas
from jaxserve.sched.routing.behind import Sent
from jaxserve.sched.routing.fleet import RoutingRequest
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.routing.routers import ROUTERS, NoReplica
from jaxserve.sched.routing.snapshot import Prices, Snapshot
from jaxserve.sched.routing.take_snapshot import idle_snapshot

ROUTING_REQUEST = RoutingRequest(100, ttft=1.0)
KNOWN = {
    **dataclasses.asdict(Prices(1e-2, 1e-4, 1e-5, 1e-7, 1e-3, 0.0, 0.0)),
    "prefill_tokens": 512,
    "max_rows": 16,
    "by_tier": True,
    "num_blocks": 1000,
    "block_size": 16,
}


def said(time: float, **changes: float) -> dict[str, float]:
    idle = idle_snapshot(KNOWN, time)
    snapshot: Snapshot = dataclasses.replace(idle, mean_output=50.0, **changes)  # type: ignore[arg-type]
    return snapshot.as_dict()


def busy(time: float) -> dict[str, float]:
    return said(time, unfinished=40, running=16, waiting=24, realtime_tokens=50_000, tbt=np.inf)


def test_the_slo_router_avoids_the_busy_one() -> None:
    replicas = Replicas("slo")
    for time, idle in ((1.0, "b"), (2.0, "a")):
        replicas.update({each: (said if each == idle else busy)(time) for each in "abc"})
        assert replicas.choose(ROUTING_REQUEST, time + 0.1) == idle


def test_what_was_sent_counts_until_the_next_snapshot() -> None:
    replicas = Replicas("least_loaded")
    replicas.update({"a": said(1.0), "b": said(1.0, unfinished=2)})
    for _ in range(3):
        replicas.sent("a", ROUTING_REQUEST, 1.5)
    assert replicas.choose(ROUTING_REQUEST, 1.6) == "b"
    replicas.update({"a": said(1.0), "b": said(1.0, unfinished=2)})  # nothing new
    assert replicas.choose(ROUTING_REQUEST, 1.6) == "b"
    replicas.update({"a": said(2.0), "b": said(1.0, unfinished=2)})
    assert replicas.choose(ROUTING_REQUEST, 2.1) == "a"


@pytest.mark.parametrize("routing", ROUTERS)
def test_a_replica_that_has_said_nothing_is_there_and_one_that_is_gone_is_not(routing: str) -> None:
    replicas = Replicas(routing)
    with pytest.raises(NoReplica):
        replicas.choose(ROUTING_REQUEST, 0.0)
    replicas.update({"new": None})
    assert replicas.choose(ROUTING_REQUEST, 0.0) == "new"
    replicas.lose("new")
    replicas.sent("new", ROUTING_REQUEST, 0.5)  # it was on its way
    with pytest.raises(NoReplica):
        replicas.choose(ROUTING_REQUEST, 1.0)


def test_one_that_serves_no_more_is_avoided_until_it_says_that_it_does() -> None:
    replicas = Replicas("least_loaded")
    replicas.update({"a": said(1.0), "b": busy(1.0)})
    replicas.avoid("a")
    replicas.update({"a": said(1.0), "b": busy(1.0)})  # nothing new
    assert replicas.choose(ROUTING_REQUEST, 1.1) == "b"
    replicas.update({"a": said(2.0, draining=True), "b": busy(1.0)})
    assert replicas.choose(ROUTING_REQUEST, 2.1) == "b"
    replicas.update({"a": said(3.0), "b": busy(1.0)})
    assert replicas.choose(ROUTING_REQUEST, 3.1) == "a"


def test_there_may_be_any_number_and_a_place_is_used_again_without_what_was_known() -> None:
    replicas = Replicas("least_loaded")
    replicas.update({number: said(1.0, unfinished=number + 5) for number in range(40)})
    assert replicas.choose(ROUTING_REQUEST, 1.0) == 0
    replicas.update({**{number: said(1.0, unfinished=6) for number in range(1, 40)}, "new": None})
    assert 0 not in replicas and replicas.choose(ROUTING_REQUEST, 1.0) == "new"
    replicas.update({"new": said(0.5, unfinished=100), "newer": None})
    assert replicas.choose(ROUTING_REQUEST, 1.0) == "newer"


def test_a_new_replica_does_not_get_everything() -> None:
    """It has seen no output end, so it knows nothing of how long its rows are taken."""
    replicas = Replicas("slo")
    full = said(1.0, unfinished=40, running=16, waiting=24, realtime_tokens=24, free_blocks=500)
    replicas.update({"old": full, "new": {**full, "mean_output": 0.0}})
    chosen = []
    for _ in range(20):
        chosen.append(replicas.choose(ROUTING_REQUEST, 1.0))
        replicas.sent(chosen[-1], ROUTING_REQUEST, 1.0)
    assert chosen.count("old") == chosen.count("new")


def test_an_unknown_routing_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"'nowhere'.*slo"):
        Replicas("nowhere")


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("routing", ROUTERS)
def test_fresh_routers_that_know_nothing_of_each_other_do_not_agree(
    routing: str, heard: bool
) -> None:
    """Of replicas that are as good each takes one by lot, and no seed is the same by itself."""
    names = "abcdefgh"
    replicas = {name: said(1.0) if heard else None for name in names}
    first, calls = [], dict.fromkeys(names, 0)
    for seed in range(64):
        router = Replicas(routing, seed)
        router.update(replicas)
        for number in range(2):
            chosen = str(router.choose(ROUTING_REQUEST, 1.1))
            router.sent(chosen, ROUTING_REQUEST, 1.1)
            calls[chosen] += 1
            if not number:
                first.append(chosen)
    assert set(first) == set(names) and max(map(first.count, names)) <= 20, "8 are the mean"
    assert max(calls.values()) <= 32, "16 are the mean"
    others = [Replicas(routing) for _ in range(64)]
    for router in others:
        router.update(replicas)
    # 64 of them agree once in 10^57 times.
    assert len({router.choose(ROUTING_REQUEST, 1.1) for router in others}) > 1


def test_a_tie_is_only_among_those_who_are_as_good() -> None:
    routers = [Replicas("least_loaded", seed) for seed in range(32)]
    for router in routers:
        router.update({"a": busy(1.0), "b": said(1.0), "c": busy(1.0), "d": said(1.0)})
    assert {router.choose(ROUTING_REQUEST, 1.1) for router in routers} == {"b", "d"}


@pytest.mark.parametrize("routing", ROUTERS)
def test_what_others_have_begun_goes_only_to_their_like(routing: str) -> None:
    replicas = Replicas(routing)
    replicas.update(
        {"a": said(1.0), "b": said(1.0, unfinished=9), "c": said(1.0), "d": None},
        {"a": "fp_2", "b": "fp", "c": "fp_2"},
    )
    begun = ROUTING_REQUEST.after(30, "fp")
    assert begun.prompt_len == ROUTING_REQUEST.prompt_len + 30 and begun.ttft == np.inf
    assert {replicas.choose(begun, 1.1) for _ in range(8)} == {"b"}
    assert ROUTING_REQUEST.after(0, "fp") is ROUTING_REQUEST
    with pytest.raises(NoReplica):
        replicas.choose(ROUTING_REQUEST.after(30, "fp_of_another"), 1.1)


LINK = Link(0.001, 1e-6)


def test_a_request_goes_on_at_a_replica_with_the_role_for_it() -> None:
    """A replica that takes the place of one that has gone has its rank, and so its role."""
    replicas = Replicas("slo", link=LINK, roles=(1, 1))
    fingerprints = {"a": "fp", "b": "fp"}
    replicas.update({"a": said(1.0), "b": said(1.0)}, fingerprints, {"a": 1, "b": 0})
    assert replicas.choose(ROUTING_REQUEST, 1.1) == "b"
    begun = ROUTING_REQUEST.after(1, "fp")
    assert replicas.goes_on_at("b", begun, 1.2) == "a"
    assert replicas.goes_on_at("a", begun, 1.2) is None
    replicas.update({"a": said(2.0), "c": said(2.0)}, {"a": "fp", "c": "fp_2"}, {"a": 1, "c": 0})
    assert replicas.choose(ROUTING_REQUEST, 2.1) == "c"
    assert replicas.goes_on_at("c", ROUTING_REQUEST.after(1, "fp_2"), 2.2) is None
    assert replicas.goes_on_at("gone", begun, 2.2) is None


def test_without_a_link_nothing_moves() -> None:
    replicas = Replicas("slo")
    replicas.update({"a": busy(1.0), "b": said(1.0)})
    assert not replicas.moves
    assert replicas.goes_on_at("a", ROUTING_REQUEST.after(1, ""), 1.1) is None
    assert replicas.behind("a", [Sent(ROUTING_REQUEST, 0.0, 0.0, False)], 1.1) == []


def test_who_says_nothing_while_others_do_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is, if nobody says anything: then the news are late."""
    replicas, now = Replicas("slo"), [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    replicas.update({"a": said(1.0), "b": said(1.0)})
    now[0] += 2 * module.SILENT_S
    replicas.update({"a": said(1.0), "b": said(1.0)})
    assert not replicas.silent
    for number in range(module.MISSED):
        assert not replicas.silent, "a's may be on their way"
        replicas.update({"a": said(1.0), "b": said(2.0 + number / 10)})
    assert replicas.silent == {"a"} and replicas.choose(ROUTING_REQUEST, 2.2) == "b"
    replicas.update({"a": said(3.0), "b": said(2.0)})
    assert not replicas.silent and replicas.choose(ROUTING_REQUEST, 3.1) in "ab"
    now[0] += 2 * module.SILENT_S
    replicas.update({"b": said(4.0)})
    assert not replicas.silent, "the other is gone"


@pytest.mark.parametrize("pause", [0.0, 3.0])
def test_nobody_is_out_of_reach_who_is_heard_in_turn(
    monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """With the longest period, and when Ray's controller begins again after a while."""
    replicas, now = Replicas("slo"), [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    times = dict.fromkeys("abc", 1.0)
    for _ in range(10):
        for name in "abc":
            times[name] = now[0] + 1.0
            replicas.update({name: said(time) for name, time in times.items()})
            assert not replicas.silent
            now[0] += 0.1
        now[0] += module.SILENT_S * (1.0 + pause)


def test_one_that_waits_where_it_would_be_late_goes_where_it_is_in_time() -> None:
    """It is counted there at once, and not again when it has been sent."""
    replicas = Replicas("slo", link=LINK)
    replicas.update({"a": said(1.0), "b": said(1.0), "c": said(1.0)}, dict.fromkeys("abc", "fp"))
    there = [Sent(ROUTING_REQUEST, 1.8, 1.8, False) for _ in range(3)]
    for one in there:
        replicas.sent("a", one.ask, one.sent)
    fingerprints = {"a": "fp", "b": "fp", "c": "fp_2"}
    replicas.update({"a": busy(2.0), "b": said(2.0), "c": said(2.0)}, fingerprints)
    left = replicas.behind("a", there, 2.0)
    assert left and {to for _, to in left} <= {"b", "c"}
    wanted = [Sent(ROUTING_REQUEST._replace(fingerprint="fp"), 9.8, 9.8, False)]
    fresh = {"a": busy(10.0), "b": said(10.0), "c": said(10.0)}
    replicas.update(fresh, fingerprints)
    assert [to for _, to in replicas.behind("a", wanted, 10.0)] == ["b"]
    assert replicas.behind("gone", there, 2.0) == []


def test_one_without_news_for_a_while_gets_nothing_while_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last snapshot says that it had little to do: by now it would have done that."""
    replicas, now = Replicas("slo"), [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    replicas.update({"a": said(1.0), "b": busy(1.0)})
    assert replicas.choose(ROUTING_REQUEST, 1.1) == "a"
    for step in range(1, 6):
        now[0] += module.DOUBTED_S / 4
        replicas.update({"a": said(1.0), "b": busy(1.0 + step)})
    assert not replicas.silent and replicas.choose(ROUTING_REQUEST, 6.1) == "b"
    replicas.lose("b")
    assert replicas.choose(ROUTING_REQUEST, 6.1) == "a", "there is no other one"
    replicas.update({"a": said(7.0), "b": busy(7.0)})
    assert replicas.choose(ROUTING_REQUEST, 7.1) == "a"
