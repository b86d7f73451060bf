"""The image has what the manifests and the server want of it. `make lint` has hadolint."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from jaxserve.config import ServerConfig
from jaxserve.server.startup import launch
from tests.deploy.test_kubernetes import PODS, SERVER, container

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def said(instruction: str) -> str:
    """What the last of these instructions says."""
    return re.findall(rf"^{instruction} (.+)$", TEXT, re.M)[-1]


def test_it_says_where_the_server_listens() -> None:
    config = ServerConfig()
    expected = {config.http_port, config.port, config.metrics_port}
    assert set(map(int, said("EXPOSE").split())) == expected
    assert f"http://localhost:{config.http_port}/health" in said("HEALTHCHECK")


def test_its_command_is_one_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command: list[Any] = json.loads(said("ENTRYPOINT"))
    assert command[-2:] == ["python", "serve.py"]
    values = flags.FlagValues()
    launch.parse_flags(["serve.py", *json.loads(said("CMD"))], "configs/tiny_cpu.py", values)
    config = launch.read_config(values)
    assert config.server.host == "0.0.0.0"
    assert f"install --directory --owner={said('USER').split(':')[0]} " in TEXT
    cache = config.engine.compilation_cache_dir
    assert f" {cache}\n" in TEXT and f" NUMBA_CACHE_DIR={cache}/" in said("ENV")


def test_its_user_is_the_pods() -> None:
    user, _, group = said("USER").partition(":")
    assert user != "0" and f"useradd --uid {user} " in TEXT
    security = SERVER["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))


def test_extras_are_those_of_the_package() -> None:
    assert said("ARG").partition("=")[2] in EXTRAS
    images = {container(pod)["image"] for pod in PODS if "jaxserve:" in container(pod)["image"]}
    assert images
    for image in images:
        first, *_ = image.rpartition(":")[2].split("-")
        assert first in EXTRAS


def test_the_context_has_the_package_and_nothing_else() -> None:
    nothing, *kept = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith(("*", "!"))
    ]
    assert nothing == "*"
    taken = {line.removeprefix("!") for line in kept if line.startswith("!")}
    links = {path.name for path in (ROOT / "jaxserve").iterdir() if path.is_symlink()}
    assert {"jaxserve", "serve.py", "pyproject.toml"} | links <= taken
    assert taken <= {path.name for path in ROOT.iterdir()}
