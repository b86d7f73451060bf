"""What a deployment can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from jaxserve.deploy.settings import Settings

FILE = Path(__file__).parents[2] / "configs" / "deploy" / "ray.yaml"


def test_the_config_file_says_what_there_is() -> None:
    (application,) = yaml.safe_load(FILE.read_text())["applications"]
    settings = Settings(**application["args"])
    assert (settings.flags, settings.routing, settings.max_replicas) == ([], "slo", 2)


def test_flags_may_be_one_text() -> None:
    assert Settings(flags='--model="/a b" --policy=vllm').flags == ["--model=/a b", "--policy=vllm"]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"routing": "best"}, "no routing 'best'; known: round_robin"),
        ({"replicas": 3, "max_replicas": 2}, r"max_replicas: must be 0 or at least replicas \(3\)"),
        ({"replica": 3}, "replica\n  Extra"),
        ({"replicas": 0}, "replicas\n  .*greater than or equal to 1"),
        ({"snapshot_s": 60}, "snapshot_s\n  .*less than or equal to 10"),
    ],
)
def test_what_is_wrong_is_said_by_its_name(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Settings(**args)
