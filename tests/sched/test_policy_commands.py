"""`jaxserve policies`, `jaxserve bench plan` and `simulate`."""

from __future__ import annotations

import json
import re

import pytest

from jaxserve.bench import cli
from jaxserve.commands import policies as command
from jaxserve.sched.parameters import parameters
from jaxserve.sched.plan import Checkpoint, Join
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.state.request_table import State
from jaxserve_lab.bench import planning_time


def test_lists_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    text = capsys.readouterr().out
    for name, entry in policies().items():
        assert entry.summary and entry.source
        assert f"{name} " in text and entry.summary in text and entry.source in text
    assert "NAME+ef: eviction-free" in text
    assert " watermark=0.01 " in text


def test_says_what_a_server_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["name"] for p in found["policies"] if not p["deployable"]] == ["oracle", "rank_o"]
    assert [v["suffix"] for v in found["variants"]] == ["ef", "spec"]
    known = {p["name"]: p["parameters"] for p in found["policies"]}
    assert known["aptserve"]["slo_decay"] == "0.0"
    assert known["sarathi"]["reserve"] == "prompt" and "groups" not in known["sarathi"]


@pytest.mark.parametrize("name", policies())
def test_every_parameter_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([name]) == 0
    text = capsys.readouterr().out.split("\n\n", 1)[1]
    lost = {one for one in parameters(make_policy(name)) if not re.search(rf"\b{one}\b", text)}
    assert not lost


def test_explains_one_policy_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["edf", "--json"]) == 0
    assert [p["name"] for p in json.loads(capsys.readouterr().out)["policies"]] == ["edf"]
    with pytest.raises(SystemExit):
        command.main(["fde"])
    assert "there is no policy 'fde'; known: accelgen" in capsys.readouterr().err


def test_times_plans(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "plan",
        "--policies=sarathi:watermark=0.1,vllm+ef",
        "--candidates=8,16",
        "--repeats=2",
        "--json",
    ]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["plan_ms"]
    assert set(found) == {"sarathi:watermark=0.1", "vllm+ef"}
    assert set(found["sarathi:watermark=0.1"]) == {"decode", "mixed"}
    assert set(found["sarathi:watermark=0.1"]["mixed"]) == {"8", "16"}


def test_times_plans_with_hidden_caches(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["plan", "--policies=aptserve", "--candidates=16", "--repeats=2", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["plan_ms"]
    assert set(found["aptserve"]) == {"decode", "mixed", "prefill", "scarce"}


def test_times_plans_that_move_caches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--policies=bros", "--candidates=32", "--repeats=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["plan_ms"]
    assert set(found["bros"]) == {"decode", "mixed", "full"}


def test_the_situation_without_memory_is_what_it_says() -> None:
    full = planning_time.full("bros", 64)
    table, view = full.table, full.view
    tiers = [table.tier[table.in_state(state)].tolist() for state in (State.RUNNING, State.WAITING)]
    assert tiers == [[1] * 32 + [0] * 16, [0] * 16]
    decided = make_policy("bros", initial=64).plan(view, 1.0)
    assert any(isinstance(op, Join) for op in decided.operations)
    assert any(isinstance(op, Checkpoint) for op in decided.operations)


@pytest.mark.parametrize("name", ["aptserve", "aptserve_s", "aptserve_fcfs"])
def test_the_situations_with_hidden_caches_are_what_they_say(name: str) -> None:
    policy = make_policy(name)
    prefill = planning_time.situation(64, 56, hidden=True)
    assert prefill.pool.kind[prefill.table.in_state(State.RUNNING)].tolist() == [0, 1] * 4
    decided = policy.plan(prefill.view, 1.0)
    started = prefill.table.state[decided.rows] == State.WAITING
    assert 0 < started.sum() < 56 and decided.kinds.any()
    scarce = planning_time.scarce(64)
    decided = policy.plan(scarce.view, 1.0)
    assert len(decided.preempted) > 0 and len(decided) + len(decided.preempted) <= 64


def test_the_situations_are_what_they_say() -> None:
    for waiting in (0, 8):
        made = planning_time.situation(16, waiting=waiting)
        decided = made.policy.plan(made.view, 0.0)
        started = len(decided) - (16 - waiting)
        assert 0 <= started <= waiting and (decided.num_tokens[: 16 - waiting] == 1).all()
        assert bool(started) == bool(waiting)


def test_a_workload_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--workload=nowhere.csv"]) == 2
    assert "nowhere.csv" in capsys.readouterr().err


@pytest.mark.slow
def test_times_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policies=sarathi,aptserve_kv", "--workload=fixed:64x8x20", "--json"]
    assert cli.main(["simulate", *argv]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["simulate_s"]
    assert set(found) == {"sarathi", "aptserve_kv"}
    assert found["sarathi"]["compiled"] >= 0 and found["sarathi"]["latency_s"] > 0
    assert found["aptserve_kv"]["compiled"] is None and found["aptserve_kv"]["python"] > 0
    few = ["--policies=aptserve_kv", "--workload=fixed:64x8x20", "--ways=compiled", "--json"]
    assert cli.main(["simulate", *few]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last, parse_constant=pytest.fail)["simulate_s"]
    assert found["aptserve_kv"] == {"latency_s": None, "compiled": None}


@pytest.mark.parametrize(
    "argv",
    [["--policies=nobody"], ["--ways=slowly"], ["--num_requests=0"]],
)
def test_wrong_command_lines_of_simulations(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["simulate", *argv])
    assert error.value.code == 2 and "--help says what there is" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--policies=nobody"],
        ["--policies=sarathi:watermark=x"],
        ["--candidates=1"],
        ["--repeats=0"],
    ],
)
def test_wrong_command_lines(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["plan", *argv])
    assert error.value.code == 2 and "--help says what there is" in capsys.readouterr().err
