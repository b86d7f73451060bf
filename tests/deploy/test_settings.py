"""What a deployment can be told, and the demonstration, as far as it needs no Ray."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from jaxserve.deploy.local.cluster import Cluster
from jaxserve.deploy.local.demo import main, ready_text
from jaxserve.deploy.settings import Settings

ROOT = Path(__file__).parents[2]
FILE, PAGE = ROOT / "configs" / "deploy" / "ray.yaml", ROOT / "docs" / "ray.md"


def test_the_config_file_says_what_there_is() -> None:
    (application,) = yaml.safe_load(FILE.read_text())["applications"]
    settings = Settings(**application["args"])
    assert (settings.flags, settings.routing, settings.max_replicas) == ([], "slo", 2)


def test_the_page_has_every_setting() -> None:
    (table,) = re.findall(r"\n\n(\| name .*?)\n\n", PAGE.read_text(), re.DOTALL)
    named = {
        name for row in table.splitlines() for name in re.findall("`(.*?)`", row.split("|")[1])
    }
    assert named == set(Settings.model_fields)


def test_a_link_and_roles_are_for_the_router() -> None:
    assert Settings().router == {"routing": "slo", "link": None, "roles": [0, 0]}
    made = Settings(link="2ms:5ms", roles="1:2", replicas=3).router
    assert made == {"routing": "slo", "link": [0.002, 5e-6], "roles": [1, 2]}


def test_flags_may_be_one_text() -> None:
    assert Settings(flags='--model="/a b" --policy=vllm').flags == ["--model=/a b", "--policy=vllm"]


def test_each_host_gets_what_is_said() -> None:
    settings = Settings(hosts=2, num_cpus=0, num_gpus=4, resources={"TPU": 0, "fast": 1})
    assert settings.bundle == {"GPU": 4, "fast": 1}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"routing": "best"}, "no routing 'best'; known: round_robin"),
        ({"replicas": 3, "max_replicas": 2}, r"max_replicas: must be 0 or at least replicas \(3\)"),
        ({"replica": 3}, "replica\n  Extra"),
        ({"replicas": 0}, "replicas\n  .*greater than or equal to 1"),
        ({"hosts": 0}, "hosts\n  .*greater than or equal to 1"),
        ({"hosts": 2, "num_cpus": 0}, "num_cpus: with hosts, Ray has to reserve something"),
        ({"link": "fast"}, "LATENCY:PER_1000 are two times, got 'fast'"),
        (
            {"link": "1ms:1ms", "routing": "two_choices"},
            "link: is for routing slo, got two_choices",
        ),
        ({"link": "1ms:1ms", "hosts": 2}, "link: a replica over several hosts sends no cache"),
        ({"roles": "1:1"}, "roles: needs link"),
        ({"link": "1ms:1ms", "roles": "1:2"}, r"roles: must be together replicas \(2\)"),
        ({"link": "1ms:1ms", "roles": "1:1", "max_replicas": 3}, "without max_replicas, got 1:1"),
        ({"link": "1ms:1ms", "roles": "0:2"}, "at least 1 each"),
        ({"link": "1ms:1ms", "roles": "9" * 400 + ":1"}, "two numbers of replicas"),
        ({"snapshot_s": 60}, "snapshot_s\n  .*less than or equal to 10"),
    ],
)
def test_what_is_wrong_is_said_by_its_name(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Settings(**args)


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
