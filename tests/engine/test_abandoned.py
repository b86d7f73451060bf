"""An engine of a group that has lost a host: whoever listens ends the calls, and nobody waits for
its own thread, which may never come back."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConfigError
from jaxserve.engine.device.leader_executor import LeaderExecutor
from jaxserve.engine.device.sampling import SampleResult
from jaxserve.engine.engine import Engine
from jaxserve.engine.errors import EngineStopped, HostLost
from jaxserve.engine.output import Output
from jaxserve.engine.startup.assemble import assemble
from jaxserve.engine.startup.blueprint import Blueprint, Programs, build_programs
from jaxserve.engine.startup.build import build_engine
from jaxserve.engine.startup.choices.engine_choices import Choices, choose
from jaxserve.engine.startup.host_group import share_fate
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.hosts import group as group_module
from jaxserve.hosts.group import WELCOME, Group
from jaxserve.hosts.link import Link
from jaxserve.progress import Show
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.request import Request, SamplingParams
from tests.engine.simulated.engine_on_a_virtual_clock import LAYERS, MODEL, configured
from tests.hosts.peers import TIMEOUT, Losses, channels

PRIOR = LinearCostModel(Coefficients(1e-4, 1e-3, 0, 0, 0, 0, 0, 0, 0), LAYERS)
SHORT = SamplingParams(max_tokens=4)


class Stuck:
    """An executor whose steps wait for a host that is gone, until they fail."""

    copies_beside = False
    intact = True

    def __init__(self, chosen: Choices) -> None:
        self.buckets = chosen.memory.buckets
        self.waits, self.fails = threading.Event(), threading.Event()
        self.error: BaseException = HostLost("host 1 is gone")

    def admit(self, *_: Any) -> None:
        pass

    def submit(self, *_: Any, **__: Any) -> Stuck:
        return self

    def result(self) -> SampleResult:
        self.waits.set()
        assert self.fails.wait(TIMEOUT)
        raise self.error

    def close(self) -> None:
        pass


class Running:
    """The engine, with one request that waits; or none, busy=False."""

    def __init__(self, folder: Path, group: Group | None = None, *, busy: bool = True) -> None:
        config = configured(folder, 64, PRIOR, cache__num_blocks=64)
        chosen = choose(config)
        self.stuck = Stuck(chosen)
        tokenizer = load_tokenizer(None)
        executor = self.stuck if group is None else LeaderExecutor(self.stuck, group)
        self.engine: Engine = assemble(config, chosen, Programs(executor), tokenizer)
        if group is not None:
            share_fate(self.engine, group)
        self.told: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.outputs: list[Output] = []
        self.engine.add_failure_listener(self.told.put)
        self.engine.start()
        if busy:
            self.engine.submit(Request("one", (5, 6, 7), SHORT), self.outputs.append)
            assert self.stuck.waits.wait(TIMEOUT)

    def end(self) -> None:
        self.stuck.fails.set()
        assert self.engine._thread is not None
        self.engine._thread.join(TIMEOUT)
        assert not self.engine._thread.is_alive()


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path)


def test_whoever_listens_hears_of_it_though_the_thread_is_stuck(running: Running) -> None:
    lost = HostLost("host 1 is gone")
    running.engine.abandon(lost)
    assert running.told.get(timeout=TIMEOUT) is lost
    with pytest.raises(EngineStopped, match="the engine has failed: host 1 is gone"):
        running.engine.submit(Request("two", (5,), SHORT), running.outputs.append)
    running.end()  # the step fails after all: nobody is told a second time, or something else
    assert running.told.empty() and running.outputs == []


def test_a_step_that_fails_for_it_is_the_same(running: Running) -> None:
    running.end()
    assert running.told.get(timeout=TIMEOUT) is running.stuck.error
    running.engine.abandon(HostLost("host 2 is gone"))
    assert running.told.empty() and running.outputs == []


def test_an_engine_that_fails_ends_all_hosts_as_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may have begun what this one never will."""
    ended, lost = Losses(), Losses()
    monkeypatch.setattr(group_module, "end_process", lambda code: ended(str(code)))
    monkeypatch.setattr(group_module, "LAST_S", 0.0)
    here, there = channels()
    leader = Running(tmp_path, Group({1: here}, "nowhere:1"))
    assert there.receive(TIMEOUT).name == WELCOME
    follower = Link(there, "the leader", lost)
    follower.start()
    leader.stuck.error = RuntimeError("out of luck")
    leader.end()
    assert lost.wait() == "the leader: out of luck"
    assert ended.wait() == "1"


def test_a_blueprint_crosses_as_json_and_hosts_with_other_models_say_so(tmp_path: Path) -> None:
    config = configured(tmp_path, 64, PRIOR, cache__num_blocks=64)
    blueprint = Blueprint.from_choices(choose(config), masked_sampling=True)
    crossed = Blueprint.from_plain(json.loads(json.dumps(blueprint.plain())))
    assert crossed == blueprint and crossed.masked_sampling
    other = {**MODEL, "max_position_embeddings": 64, "ffn_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError, match=r"model\.path: d_ff is 128 here, the leader's is 64"):
        build_programs(config.model, 1, crossed, progress=Show.NOTHING, bar=iter)


def test_only_a_server_serves_over_hosts(tmp_path: Path) -> None:
    config = configured(tmp_path, 64, PRIOR, mesh__hosts=2)
    with pytest.raises(ConfigError, match=r"mesh\.hosts: only a server serves a model over"):
        build_engine(config)
