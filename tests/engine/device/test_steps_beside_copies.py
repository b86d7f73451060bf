"""Checkpoints go to the host beside the steps: who waits for them, and who never does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.device import cache_moves, host_copies
from jaxserve.engine.device.host_copies import HostCopies
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.stats import Observer, StepStats
from jaxserve.sched.plan import BatchPlan, Checkpoint, Operation, Preempt, Restore
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.state.request_table import RUNNING, WAITING
from tests.engine.conftest import Texts
from tests.engine.harness import SAMPLING, SCARCE, TIMEOUT, engine, generate, prompts, send
from tests.sharing_caches import SharingCaches

AWAY = 8  # steps
HOST = {"cache__host_gib": 0.001}


class ThereAndBack(Policy):
    """Serves all, but once there are two requests the first one's cache goes to the host, and comes
    back AWAY steps later."""

    moves_cache = True

    def __init__(self) -> None:
        self._left: int | None = None

    def plan(self, view: View, now: float) -> BatchPlan:
        table, operations = view.table, list[Operation]()
        running, waiting = table.in_state(RUNNING), table.in_state(WAITING)
        zero, computed = np.zeros(1, np.int64), table.computed.copy()
        rows = np.concatenate([running, waiting])
        if self._left is None and len(running) > 1:
            away, self._left = running[:1], AWAY
            operations = [Checkpoint(away, zero, computed[away]), Preempt.whole(away)]
        elif self._left:
            self._left -= 1
            if not self._left:
                operations = [Restore(waiting[:1], zero)]
                computed[waiting[:1]] = view.host.segments(int(waiting[0]))[0].end
        if self._left:
            rows = running[-1:]
        counts = table.prompt_len[rows] + table.generated[rows] - computed[rows]
        return BatchPlan(rows, counts, computed[rows] + counts, 0 * rows, tuple(operations))


class Trace(Observer):
    """What happened, in order. No copy to the host is made until `gate` is open; `asked` is when
    one is wanted back."""

    def __init__(self, on: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.gate, self.asked = threading.Event(), threading.Event()
        self._watch(on.executor, monkeypatch)
        copy = host_copies._copy

        def hold(*args: Any) -> None:
            assert self.gate.wait(TIMEOUT)
            copy(*args)
            self.log.append("copied")

        monkeypatch.setattr(host_copies, "_copy", hold)
        on.add_observer(self)

    def _watch(self, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        submit, save, load = executor.submit, executor.save, executor.load

        def launch(*args: Any, **kwargs: Any) -> Any:
            self.log.append("launched")
            return submit(*args, **kwargs)

        def leave(*args: Any) -> None:
            save(*args)
            self.log.append("saved")

        def come_back(*args: Any) -> None:
            self.log.append("wanted")
            self.asked.set()
            load(*args)
            self.log.append("loaded")

        monkeypatch.setattr(executor, "submit", launch)
        monkeypatch.setattr(executor, "save", leave)
        monkeypatch.setattr(executor, "load", come_back)

    def on_step(self, stats: StepStats) -> None:
        self.log.append("finished")


def test_no_step_waits_for_a_checkpoint_but_a_restore_does(
    shapes: dict[str, Path], alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone("opt")[:2]
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: ThereAndBack())
    with engine(shapes["opt"], **HOST) as running:
        trace = Trace(running, monkeypatch)
        streams = [send(running, prompt, **SAMPLING)[1] for prompt in prompts()[:2]]
        assert trace.asked.wait(TIMEOUT)
        log = trace.log[:]
        meanwhile = log[log.index("saved") : log.index("wanted")]
        assert meanwhile.count("launched") >= AWAY - 1 and meanwhile.count("finished") >= AWAY - 2
        assert "copied" not in log and "loaded" not in log
        trace.gate.set()
        assert [stream.wait().tokens() for stream in streams] == expected
        assert trace.log.index("copied") < trace.log.index("loaded")
        (thread,) = running.executor._mover._host._thread._threads  # type: ignore[attr-defined]
    assert not thread.is_alive(), "the engine has stopped"


class Late(HostCopies):
    """Makes copies when one is wanted back, or there is no room to put it off any longer."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._gate, self.put_off = threading.Event(), 0

    def copy_from(self, staged: Any, parts: Any) -> None:
        self._thread.submit(self._gate.wait, TIMEOUT)
        self.put_off += 1
        super().copy_from(staged, parts)

    def make_room(self, slots: int) -> None:
        if self._staged + slots > self._room:
            self._gate.set()
        super().make_room(slots)
        if self._staged + slots <= self._room // 2:
            self._gate.clear()

    def get_copy(self, key: int) -> np.ndarray:
        self._gate.set()
        return super().get_copy(key)

    def close(self) -> None:
        self._gate.set()
        super().close()


def test_text_is_the_same_however_late_copies_are_made(
    shapes: dict[str, Path], alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    lots = np.random.default_rng(0).integers(0, 10**6, 50).tolist()
    policy = SharingCaches(lots)
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: policy)
    monkeypatch.setattr(cache_moves, "HostCopies", Late)
    with engine(shapes["opt"], **SCARCE, cache__host_gib=1e-3, cache__rho="0") as running:
        assert generate(running, prompts()[:10], **SAMPLING) == alone("opt")[:10]
        assert running.executor._mover._host.put_off > 10  # type: ignore[attr-defined]
    assert min(policy.did[what] for what in ("join", "checkpoint", "restore", "drop")) > 0


def test_what_a_copy_raises_ends_those_of_the_step(
    shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("nothing left to copy to")

    monkeypatch.setattr(policy_choice, "make_policy", lambda name: ThereAndBack())
    with engine(shapes["opt"], **HOST) as running:
        monkeypatch.setattr(host_copies, "_copy", fail)
        streams = [send(running, prompt, **SAMPLING)[1] for prompt in prompts()[:2]]
        ends = [stream.wait().last() for stream in streams]
        assert {last.finish_reason for last in ends} == {FinishReason.ERROR}
        # One who came behind the step that failed has a policy that still counts on the other.
        assert "MemoryError: nothing left to copy to" in {last.error for last in ends}
