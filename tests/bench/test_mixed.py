"""`bench mixed`: real-time requests over a best-effort batch, served and simulated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench import cli
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.request import Tier
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator.settings import EngineOptions
from jaxserve.simulator.simulator import simulate
from jaxserve_lab.bench import mixed
from tests.bench.test_cli import SMALL
from tests.engine.harness import write_shape

FEW = (
    "--num_requests=6",
    "--batch=9",
    "--scale=20",
    "--rate=50",
    "--config.engine.max_model_len=64",
)


@pytest.mark.slow
def test_every_turn_is_served_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"--model={write_shape(tmp_path, 'opt')}"
    policies = ("--policies=bros,priority", "--repeats=2")
    assert cli.main(["mixed", model, *SMALL, *FEW, *policies, "--json"]) == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert list(found["policies"]) == ["bros", "priority"]
    for by_policy in found["policies"].values():
        for which in ("served", "simulated"):
            turns = by_policy["turns"][which]
            assert len(turns) == 2
            for name, value in by_policy[which].items():
                assert value == np.median([turn[name] for turn in turns])
                assert math.isfinite(value) and value >= 0
            assert by_policy[which]["batch_tokens_per_s"] > 0 < by_policy[which]["normalised_ms"]
    assert found["config"]["scheduler"]["max_queue"] < 10_000
    rows = [line.split() for line in err.splitlines() if "served" in line or "simulated" in line]
    assert [row[0] for row in rows] == ["bros", "simulated", "priority", "simulated"]


def test_a_turn_is_the_same_under_every_policy_and_another_is_not() -> None:
    args = mixed.parse(["--num_requests=30", "--batch=40"])
    one, again, other = (mixed.workload(args, turn) for turn in (0, 0, 1))
    for name in ("arrival", "prompt_len", "output_len"):
        np.testing.assert_array_equal(getattr(one, name), getattr(again, name))
        assert (getattr(one, name) != getattr(other, name)).any()
    batch = one.tier == Tier.BEST_EFFORT
    assert batch.sum() == 40 and (one.arrival[batch] == 0).all() and (one.arrival[~batch] > 0).all()
    assert np.isinf(one.ttft[batch]).all() and (one.ttft[~batch] == 0.1).all()
    assert np.isinf(one.tbt[batch]).all() and (one.tbt[~batch] == 0.025).all()
    assert one.prompt_len[batch].min() >= 128 and one.prompt_len[batch].max() <= 256
    assert one.output_len[batch].min() >= 8 and one.output_len[batch].max() <= 32
    assert (one.prompt_len + one.output_len).max() <= mixed.LONGEST


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--rate=0", "--rate must be a positive number, got 0"),
        ("--tbt_ms=nan", "--tbt_ms must be a positive number, got nan"),
        ("--batch=0", "--batch must be at least 1, got 0"),
        ("--policies=vllm,nobody", "--policies: .*nobody"),
        ("--config.engine.record=x", "mixed makes recordings of its own"),
        ("--port=1", "--port is for serve.py"),
    ],
)
def test_a_wrong_flag_is_explained(flag: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        mixed.parse([flag])


def test_attainment_is_of_means_and_the_batch_of_its_own_time() -> None:
    """A batch of one, whose tokens come at 1, 2, 4, 5 and 6 s, and two real-time requests, with
    tokens from 3 s to 6 s and from 3 s to 5 s."""
    args = mixed.parse(["--num_requests=2", "--batch=1", "--ttft_ms=2500", "--tbt_ms=1000"])
    prompt, output, due = np.array([4, 4, 4]), np.array([4, 3, 5]), np.array([0.25, 0.5, 0.0])
    load = mixed._in_order(prompt, output, due, args)
    second = LinearCostModel(Coefficients(0, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)
    result = simulate("vllm", load, second, engine=EngineOptions(kv_tokens=99, block_size=1))
    assert mixed._measures(result, np.array([0.0, 0.5, 0.25])) == {
        "normalised_ms": pytest.approx(1e3 * (5.75 / 4 + 4.5 / 3) / 2),
        "ttft_attained": 0.5,
        "tpot_attained": 1.0,
        "ttft_p99_ms": pytest.approx(2747.5),
        "tbt_p99_ms": 1000.0,
        "batch_tokens_per_s": pytest.approx(5 / 6),
        "lengthened_steps": 2,
        "lengthened_s": 0.75,
        "preemptions": 0,
    }
