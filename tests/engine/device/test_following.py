"""What the leader's executor is told, the followers' executors are told, in the same order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.buckets import make_buckets
from jaxserve.engine.device.executor import PendingSample
from jaxserve.engine.device.leader_executor import LeaderExecutor
from jaxserve.engine.device.pooling_step import Wanted
from jaxserve.engine.device.sampling import SampleResult
from jaxserve.engine.device.sampling_state import SlotParams
from jaxserve.engine.errors import HostLost
from jaxserve.engine.startup.follower_executor import IN_FLIGHT, replay_calls
from jaxserve.hosts import group as group_module
from jaxserve.hosts.group import Group
from jaxserve.hosts.link import Link
from tests.hosts.peers import TIMEOUT, Losses, channels

LAYOUT = Layout(8, 4, 2, 4, False)
PACKED = np.arange(LAYOUT.size, dtype=np.int32)
MASKS = np.full((4, 3), 7, np.uint32)


class Recorder:
    """An executor that notes what it is told."""

    copies_beside = False
    intact = True
    buckets = make_buckets(4, 8, width=2)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.waited: list[int] = []
        self.broken = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*given: Any, **named: Any) -> None:
            self.calls.append((name, *given, *named.values()))

        return note

    def admit(self, slot: int, params: SlotParams) -> None:
        self.calls.append(("admit", slot, params.packed, params.counts))

    def submit(self, *given: Any, **named: Any) -> Any:
        if self.broken:
            raise jax.errors.JaxRuntimeError("connection reset by peer")
        self.calls.append(("submit", *given, *named.values()))
        return _Handle(self, len(self.calls))

    def compute(self, *given: Any, **named: Any) -> PendingSample:
        self.calls.append(("compute", *given, *named.values()))
        return PendingSample(4, len(self.calls), None, None)

    def sample(self, pending: PendingSample, masks: np.ndarray) -> Any:
        self.calls.append(("sample", pending.logits, masks))
        return _Handle(self, len(self.calls))


class _Handle:
    def __init__(self, of: Recorder, number: int) -> None:
        self._of, self._number = of, number

    def result(self) -> SampleResult:
        if self._of.broken:
            raise jax.errors.JaxRuntimeError("connection reset by peer")
        self._of.waited.append(self._number)
        return SampleResult(np.zeros(4))  # type: ignore[arg-type]

    def prompt(self) -> SampleResult:
        return self.result()


class Pair:
    """A leader and a follower in one process."""

    def __init__(self) -> None:
        here, there = channels()
        self.local, self.remote, self.lost = Recorder(), Recorder(), Losses()
        self.group = Group({1: here}, "nowhere:1")
        there.receive(TIMEOUT)  # the welcome
        self._there = there
        link = Link(there, "the leader", self.lost)
        link.start()
        self.leader = LeaderExecutor(self.local, self.group)
        self._thread = threading.Thread(target=replay_calls, args=(link, self.remote), daemon=True)
        self._thread.start()

    def die(self) -> None:
        self._there.close()

    def close(self) -> None:
        self.leader.close()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(group_module, "end_process", lambda code: None)
    yield Pair()


def flat(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Arrays as lists, that calls can be compared."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.name, value.tolist()
        return [plain(each) for each in value] if isinstance(value, tuple) else value

    return [tuple(plain(value) for value in call) for call in calls]


def test_the_follower_makes_the_same_calls(pair: Pair) -> None:
    leader, slots = pair.leader, np.array([[1, 2], [3, 0], [3, 1]], np.int32)
    assert leader.buckets is pair.local.buckets and not leader.copies_beside
    targets, wanted = np.arange(8, dtype=np.int32), Wanted.nothing(LAYOUT)
    leader.admit(3, SlotParams(PACKED, None))
    leader.admit(2, SlotParams(PACKED, np.arange(5, dtype=np.uint16)))
    first = leader.submit(LAYOUT, PACKED, full=False)
    leader.submit(LAYOUT, PACKED[::-1], full=np.bool_(True), targets=targets)
    leader.submit(LAYOUT, PACKED, full=False, wanted=wanted)
    one = leader.compute(LAYOUT, PACKED, targets=targets, wanted=wanted)
    other = leader.compute(LAYOUT, PACKED)
    leader.sample(other, MASKS)
    leader.sample(one, MASKS + 1)
    leader.project_to_kv(LAYOUT, PACKED)
    leader.copy_slots(np.array([[1, 2, 3, 4]], np.int32))
    leader.save((-1, np.int64(4)), (1, 2), slots)
    leader.load((4,), (2,), slots[:2])
    leader.discard((np.int64(4), -1))
    np.testing.assert_array_equal(first.result().tokens, np.zeros(4))
    pair.close()
    assert pair.local.calls[-1] == ("close",)
    told, made = flat(pair.local.calls[:-1]), flat(pair.remote.calls)
    assert [call[0] for call in told] == [call[0] for call in made]
    assert told == made
    sampled = [call for call in made if call[0] == "sample"]
    assert sampled[0][1] > sampled[1][1]  # each with its own step


def test_the_follower_waits_for_the_steps_before_the_last(pair: Pair) -> None:
    """Whatever goes wrong on its devices is raised there."""
    for _ in range(5):
        pair.leader.submit(LAYOUT, PACKED, full=False)
    pair.close()
    assert pair.remote.waited == [1, 2, 3, 4, 5][:-IN_FLIGHT]
    assert not pair.lost.any


def test_a_step_that_fails_as_a_host_is_gone_says_which(pair: Pair) -> None:
    handle = pair.leader.submit(LAYOUT, PACKED, full=False)
    pair.local.broken = True
    pair.group.on_loss(lambda why: None)
    pair.die()
    with pytest.raises(HostLost, match="host 1 is gone"):
        handle.result()
    with pytest.raises(HostLost, match="host 1 is gone"):
        pair.leader.submit(LAYOUT, PACKED, full=False)


def test_a_step_that_fails_by_itself_is_no_hosts_fault(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.engine.device.leader_executor.PATIENCE_S", -1.0)
    handle = pair.leader.submit(LAYOUT, PACKED, full=False)
    pair.local.broken = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="connection reset"):
        handle.result()
    pair.close()
