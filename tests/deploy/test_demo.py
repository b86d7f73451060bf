"""The demonstration, as far as it needs no Ray."""

from __future__ import annotations

import pytest

from jaxserve.deploy.local.cluster import Cluster
from jaxserve.deploy.local.demo import main, ready_text
from jaxserve.deploy.settings import Settings


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--http_port=-1"], "argument --http_port: must be 0 to 65535, got '-1'"),
        (["--grpc_port=70000"], "argument --grpc_port: must be 0 to 65535, got '70000'"),
        (["--replicas=0"], "--replicas: Input should be greater than or equal to 1"),
        (["--routing=best"], "--routing: there is no routing 'best'; known: round_robin"),
        (["--hosts=2"], "--flags: mesh.tensor must be a multiple of the 2 hosts"),
        (["--hosts=2", "--num_cpus=0"], "--num_cpus: with hosts, Ray has to reserve something"),
        (["--flags=--port=9"], "--flags: server.port has no meaning for a replica"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_flag(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    first = capsys.readouterr().err.splitlines()[0]
    assert ended.value.code == 2 and first.startswith(f"jaxserve.deploy.local.demo: {problem}"), (
        first
    )


def test_the_lines_to_try_have_the_addresses() -> None:
    text = ready_text(Cluster(8000, 9000), Settings(hosts=2), 1.25)
    assert "after 1.2 s" in text and "replicas 2 of 2 hosts, chosen by slo" in text
    assert "--address=127.0.0.1:9000" in text and "curl http://127.0.0.1:8000/v1/comp" in text
