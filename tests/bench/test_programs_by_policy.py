"""`bench programs`: programs served under policies that take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench import cli
from jaxserve.server.startup.launch import UsageError
from jaxserve_lab.bench import programs
from jaxserve_lab.bench.slo import Alone
from tests.bench.test_cli import SMALL
from tests.engine.harness import write_shape

ALONE = Alone(lengths=(16, 480), ttft=(0.01, 0.474), tpot=0.002)
FEW = ("--num_requests=20", "--programs=3", "--lengths=closed-research", "--scale=600")
QUICK = ("--wait_scale=1000", "--deadline=1000", "--config.engine.max_model_len=64")


def test_every_policy_serves_every_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"--model={write_shape(tmp_path, 'opt')}"
    policies = ("--policies=sarathi,edf", "--repeats=1")
    assert cli.main(["programs", model, *SMALL, *FEW, *QUICK, *policies, "--json"]) == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert list(found["policies"]) == ["sarathi", "edf"]
    calls = len(programs.workload(programs.parse([*FEW, *QUICK]), 0))
    for by_policy in found["policies"].values():
        for kind in ("served", "simulated"):
            (turn,) = by_policy[kind]["turns"]
            assert turn["calls"] == calls and turn["given_up"] == 0
            assert turn["finished"] == turn["begun"] and turn["attainment"] == 1.0
            assert turn["in_time_per_s"] > 0 and turn["slowdown"]["mean"] > 0
        served, simulated = (by_policy[kind]["mean"] for kind in ("served", "simulated"))
        assert served["begun"] == simulated["begun"]
        # Recorded pauses are those from the end to the arrival, as the clocks of this machine say.
        pauses = [one["tool_time_s"] + one["think_time_s"] for one in (served, simulated)]
        assert pauses[1] >= pauses[0] * 0.99
    rows = [line.split()[:2] for line in err.splitlines()]
    assert ["sarathi", "served"] in rows and sum("simulated" in row for row in rows) == 2


def test_programs_have_as_much_time_as_they_take_alone() -> None:
    args = programs.parse(["--num_requests=60", "--wait_scale=2"])
    made, again, other = (programs.workload(args, turn) for turn in (0, 0, 1))
    np.testing.assert_array_equal(made.prompt_len, again.prompt_len)
    assert made.programs.wait.sum() != other.programs.wait.sum()
    takes = programs.served_alone(made, ALONE)
    timed = programs.with_deadlines(made, takes, 3.0)
    for one in range(3):
        mine = made.programs.program == one
        alone = takes[mine].sum() + made.programs.wait[mine].sum()
        assert timed.programs.deadline[mine] == pytest.approx(np.full(mine.sum(), 3 * alone))
    first = np.flatnonzero(~made.programs.waits)[0]
    prompt = ALONE.prompts(made.prompt_len[[first]])[0]
    assert takes[first] == pytest.approx(prompt + 0.002 * (made.output_len[first] - 1))


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--programs=0", "--programs must be at least 1, got 0"),
        ("--wait_scale=0", "--wait_scale must be a positive number, got 0"),
        ("--deadline=nan", "--deadline must be a positive number, got nan"),
        ("--config.engine.max_model_len=63", "max_model_len must be at least 64, got 63"),
        ("--config.engine.record=x", "programs makes recordings of its own"),
    ],
)
def test_a_wrong_flag_is_explained(flag: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        programs.parse([flag])
