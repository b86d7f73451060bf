"""`jaxserve simulate` before several replicas: routers, snapshots, faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.sched.routing.moves import Link
from jaxserve.simulator.settings import Fault, Routing
from jaxserve.simulator.simulate import flags
from jaxserve.simulator.simulate.cli import main
from jaxserve.simulator.simulate.routing_flags import routing

ROUTED = ["--workload=fixed:64x16x24", "--kv_tokens=512", "--rate=40", "--slo_ttft_ms=300"]
ROUTED += ["--arrivals=poisson", "--replicas=3"]


def test_routers_snapshots_and_faults_are_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def replicas(*argv: str) -> tuple[list[int], dict[str, Any]]:
        path = tmp_path / "requests.json"
        argv = (*ROUTED, *argv, "--jobs=1", "--seeds=1", "--json", f"--requests_table={path}")
        assert main(argv) == 0
        (point,) = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
        replica = [row["replica"] for row in json.loads(path.read_text())]
        return replica, {**point, **point["mean"]}

    turns, plain = replicas()
    assert turns == [0, 1, 2] * 8 and plain["routing"] == "round_robin"
    assert plain["num_failed"] == 0
    # Two routers: 0 and 2 are the first one's, which has every other request.
    assert replicas("--routers=2")[0] == [0, 1, 2, 1] * 6
    _, slow = replicas("--faults=1:slow=9")
    assert slow["mean_ttft_s"] > plain["mean_ttft_s"] and slow["num_failed"] == 0
    dead, found = replicas("--faults=1:at=100ms:notice=50ms,2:slow=2")
    assert found["num_failed"] + found["num_finished"] == 24
    assert 1 not in dead[12:]


def test_flags_say_what_is_before_the_replicas() -> None:
    argv = [*ROUTED, "--routing=slo", "--routers=2", "--snapshot_s=0.5", "--snapshot_age_s=0.1"]
    argv += ["--snapshot_loss=0.05", "--faults=0:at=20s:slow=3,2:at=500ms:notice=2s"]
    args = flags.parser("").parse_args(argv)
    assert flags.check(args) == ""
    faults = Fault(0, 20.0, 3.0), Fault(2, 0.5, notice=2.0)
    assert routing(args) == Routing("slo", 2, 0.5, 0.1, 0.05, faults)


def test_a_link_is_between_replicas() -> None:
    args = flags.parser("").parse_args(
        [*ROUTED, "--routing=slo", "--link=2ms:5s", "--roles=2:1", "--host_tokens=9"]
    )
    assert flags.check(args) == ""
    assert routing(args) == Routing("slo", link=Link(0.002, 0.005), roles=(2, 1))


SEEN = ["--replicas=2", "--routing=slo"]
LINKED = [*SEEN, "--link=1ms:1ms", "--host_tokens=9"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--faults=0"], "--faults is for more than one of --replicas"),
        (["--replicas=2", "--link=1ms:1ms"], "--link is for --routing=slo"),
        ([*SEEN, "--link=1ms:1ms"], "--link moves caches from host memory to host memory"),
        ([*SEEN, "--roles=1:1"], "--roles is for replicas between which requests move"),
        ([*LINKED, "--roles=1:2"], "--roles must be --replicas together, 2, got 1:2"),
        ([*LINKED, "--roles=1:1", "--routers=2"], "each of 2 --routers needs both, got 1:1"),
        ([*LINKED, "--roles=2:0"], "PROMPTS:DECODES are at least 1 each, got '2:0'"),
        ([*LINKED, "--roles=3"], "PROMPTS:DECODES are two numbers of replicas, got '3'"),
        ([*LINKED, "--roles=1:" + 400 * "9"], "PROMPTS:DECODES are two numbers of replicas"),
        ([*SEEN, "--link=1ms"], "LATENCY:PER_1000 are two times, got '1ms'"),
        ([*SEEN, "--link=soon:1ms"], "latency"),
        ([*SEEN, "--link=1ms:1ms:1ms"], "time of 1000 tokens: must be a time such as"),
        (["--replicas=99999"], "--replicas: must be at most 16384, got 99999"),
        (["--replicas=2", "--routers=0"], "--routers: must be at least 1, got 0"),
        (
            ["--replicas=2", "--routers=two"],
            "--routers: must be a whole number from 1 to 2147483647, got 'two'",
        ),
        (["--replicas=x"], "--replicas: must be a whole number from 1 to 16384, got 'x'"),
        (["--replicas=99999999999"], "--replicas: must be at most 16384, got 99999999999"),
        (["--replicas=2", "--routers=3"], "--routers must be at most --replicas, 2, got 3"),
        ([*SEEN, "--snapshot_s=-1"], "--snapshot_s: must be a number from 0 to 1e+06, got '-1'"),
        ([*SEEN, "--snapshot_s=inf"], "--snapshot_s: must be a number from 0 to 1e+06, got 'inf'"),
        ([*SEEN, "--snapshot_s=1e-9"], "--snapshot_s: must be 0, or at least 0.001, got '1e-9'"),
        ([*SEEN, "--snapshot_loss=5%"], "--snapshot_loss: must be a number from 0 to 1, got '5%'"),
        ([*SEEN, "--snapshot_loss=0.1"], "--snapshot_s says when"),
        (
            [*SEEN, "--snapshot_s=0.5", "--snapshot_age_s=0.5"],
            "--snapshot_age_s must be less than --snapshot_s, 0.5, got 0.5",
        ),
        (
            ["--replicas=2", "--snapshot_s=1"],
            "--routing that looks at snapshots: least_loaded, two_choices, slo",
        ),
        (["--replicas=2", "--faults=2"], "there is no replica 2, the last of --replicas is 1"),
        (["--replicas=2", "--faults=x:at=1s"], "begins with a replica, 0 to 16383, got 'x:at=1s'"),
        (["--replicas=2", "--faults=0,0:at=1s"], "--faults: replica 0 is given twice"),
        (["--replicas=2", "--faults=1:at=5"], "replica 1: at: must be a time such as 200ms"),
        (
            ["--replicas=2", "--faults=1:slow=0.5"],
            "slow must be a number from 1 to 1e+06, got '0.5'",
        ),
        (
            ["--replicas=2", "--faults=1:slow=2:notice=1s"],
            "replica 1: notice= is of one that dies, slow= of one that does not",
        ),
        (["--replicas=2", "--faults=1:how=5s"], "replica 1: may have at=, slow= and notice=, got"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--workload=alpaca", *argv])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 2
