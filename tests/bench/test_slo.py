"""`bench slo`: requests of three classes, served under policies that take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench import cli
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator.simulate import spread
from jaxserve_lab.bench import slo
from jaxserve_lab.bench.slo import CLASSES, Alone
from tests.bench.test_cli import SMALL
from tests.engine.harness import write_shape

ALONE = Alone(lengths=(16, 480), ttft=(0.01, 0.474), tpot=0.002)
FEW = ("--num_requests=8", "--scale=20", "--config.engine.max_model_len=64", "--slo_scale=100")


def test_every_policy_serves_every_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"--model={write_shape(tmp_path, 'opt')}"
    policies = ("--policies=accelgen:long=16,edf", "--repeats=2")
    assert cli.main(["slo", model, *SMALL, *FEW, *policies, "--json"]) == 0
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert list(found["policies"]) == ["accelgen:long=16", "edf"]
    capacity = found["requests_per_s"]
    assert capacity["offered"] == 0.7 * max(capacity["at_once"].values())
    (short, first), (_, last) = found["alone_ms"]["ttft"].items()
    assert short == "16" and 0 < first <= last and found["alone_ms"]["tpot"] > 0
    for by_policy in found["policies"].values():
        served, simulated = by_policy["served"], by_policy["simulated"]
        assert [turn["requests"]["finished"] for turn in served["turns"]] == [8, 8]
        for real, predicted in zip(served["turns"], simulated["turns"], strict=True):
            assert predicted["output_tokens"] == real["output_tokens"]
            for name, group in real["classes"].items():
                assert predicted["classes"][name]["requests"] == group["requests"]
    for numbers in (by[which] for by in found["policies"].values() for which in by):
        turns = numbers["turns"]
        rates = [turn["slo"]["goodput_per_s"] for turn in turns]
        assert numbers["mean"]["slo"]["goodput_per_s"] == np.mean(rates)
        assert numbers["half_width"]["slo"]["goodput_per_s"] == spread.half_width(rates)
        for turn in turns:
            assert sum(one["requests"] for one in turn["classes"].values()) == 8
    rows = [line.split()[:2] for line in err.splitlines() if line.startswith("  class all")]
    assert rows == [["class", "all"]] * 4


def test_a_turn_is_the_same_under_every_policy_and_another_is_not() -> None:
    args = slo.parse(["--num_requests=40"])
    one, again, other = (slo.workload(args, turn, ALONE, 10.0) for turn in (0, 0, 1))
    for name in ("arrival", "prompt_len", "output_len", "ttft", "jct", "slo_class"):
        np.testing.assert_array_equal(getattr(one, name), getattr(again, name))
        assert (getattr(one, name) != getattr(other, name)).any()


def test_targets_are_multiples_of_what_a_request_takes_alone() -> None:
    args = slo.parse(["--num_requests=400", "--slo_scale=2"])
    made = slo.workload(args, 0, ALONE, 10.0)
    assert made.classes == ("interactive", "standard", "offline")
    shares = np.bincount(made.slo_class) / 400
    assert shares == pytest.approx([one.share for one in CLASSES.values()], abs=0.1)
    # A millisecond a token from 16 tokens on, less 6, and 2 ms for each token of the output.
    alone = (np.clip(made.prompt_len, 16, 480) - 6) / 1e3
    whole = alone + 0.002 * (made.output_len - 1)
    for index, one in enumerate(CLASSES.values()):
        mine = made.slo_class == index
        for name, unit in (("ttft", alone), ("tbt", np.full(400, 0.002)), ("jct", whole)):
            multiple = getattr(one, name)
            expected = np.inf if multiple is None else 2 * multiple * unit[mine]
            assert getattr(made, name)[mine] == pytest.approx(expected)
    assert (made.limit == made.output_len).all()


def test_documents_are_as_long_as_fits_and_the_others_short() -> None:
    args = slo.parse(["--num_requests=2000"])
    drawn = slo.lengths(args, np.random.default_rng(1))
    assert (drawn.total <= slo.LONGEST).all()
    long = drawn.prompt_len > 160
    assert 0.25 < long.mean() < 0.45  # 35% documents, of which some are short, and a few chats
    assert np.median(drawn.prompt_len[~long]) < 50
    assert drawn.prompt_len.max() > 400


def test_what_takes_longer_alone_has_more_time() -> None:
    assert ALONE.prompts(np.array([2, 16, 248, 480, 500])) == pytest.approx(
        [0.01, 0.01, 0.242, 0.474, 0.474]
    )


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--load=0", "--load must be a positive number, got 0"),
        ("--slo_scale=inf", "--slo_scale must be a positive number, got inf"),
        ("--num_requests=2", "--num_requests must be at least 3, got 2"),
        ("--repeats=0", "--repeats must be at least 1, got 0"),
        ("--policies=vllm,nobody", "--policies: .*nobody"),
        ("--policies=vllm,vllm", "--policies: one is there twice"),
        ("--config.engine.max_model_len=63", "max_model_len must be at least 64, got 63"),
        ("--config.engine.record=x", "slo makes recordings of its own"),
        ("--port=1", "--port is for serve.py"),
    ],
)
def test_a_wrong_flag_is_explained(flag: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        slo.parse([flag])
