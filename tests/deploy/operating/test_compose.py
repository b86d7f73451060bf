"""The compose file builds and runs the image as the image and the server are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.config import Config, ServerConfig
from jaxserve.server import server as runner
from jaxserve.server.access.options import KEYS_VARIABLE
from jaxserve.server.startup import launch
from tests.deploy.operating import test_kubernetes
from tests.deploy.operating.test_dockerfile import EXTRAS, TEXT, said

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy" / "compose.yaml"
SERVICE: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]["jaxserve"]
CACHE = "/cache"


def filled(value: str, **variables: str) -> str:
    """With variables as compose fills them in: all of ours have a default."""
    return re.sub(r"\$\{(\w+):-(.*?)\}", lambda m: variables.get(m[1]) or m[2], value)


def served(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Config:
    given = [filled(each, **variables) for each in SERVICE["command"]]
    return test_kubernetes.served(given, monkeypatch)


def ports() -> dict[int, tuple[str, int]]:
    """Where each of the container's is published."""
    cut = (port.rsplit(":", 2) for port in SERVICE["ports"])
    return {int(inside): (address, int(outside)) for address, outside, inside in cut}


def test_it_builds_the_image() -> None:
    build = SERVICE["build"]
    assert (FILE.parent / build["context"]).resolve() == ROOT
    assert build["args"].keys() == {"EXTRAS"} and f"\nARG {'EXTRAS'}=" in f"\n{TEXT}"
    assert filled(build["args"]["EXTRAS"]) in EXTRAS
    assert "healthcheck" not in SERVICE, "the image has one"


def test_its_command_is_one_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    config = served(monkeypatch)
    assert config.server.host == "0.0.0.0"
    inside = {config.server.http_port, config.server.port, config.server.metrics_port}
    assert ports().keys() == inside == set(map(int, said("EXPOSE").split()))
    chosen = served(monkeypatch, MODEL="opt_125m_cpu", ALLOWED_HOSTS="gpu1.example")
    assert chosen.model.preset == "opt-125m" and chosen.server.names == ("gpu1.example",)
    with pytest.raises(launch.UsageError):
        served(monkeypatch, MODEL="--no-such")


def test_who_needs_no_key_comes_from_this_machine() -> None:
    assert {address for address, _ in ports().values()} == {"127.0.0.1"}
    assert filled(SERVICE["environment"][KEYS_VARIABLE]) == ""
    assert {inside: outside for inside, (_, outside) in ports().items()} == {
        each: each for each in ports()
    }


def test_what_is_written_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the image is read-only."""
    config = served(monkeypatch)
    assert SERVICE["read_only"] is True and SERVICE["tmpfs"] == ["/tmp"]
    mounted = dict(filled(volume).split(":")[:2][::-1] for volume in SERVICE["volumes"])
    assert mounted[CACHE] in yaml.safe_load(FILE.read_text())["volumes"]
    for folder in (config.server.batch_dir, config.engine.compilation_cache_dir):
        assert Path(folder).is_relative_to(CACHE)


def test_it_has_the_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = float(SERVICE["stop_grace_period"].removesuffix("s"))
    grace = served(monkeypatch).server.grace_s
    assert grace == ServerConfig.grace_s
    assert seconds > grace + runner._MAX_FLUSH_S + runner._CLOSE_S


def test_it_says_only_what_compose_knows() -> None:
    """By the compose specification, as far as it is used here."""
    assert SERVICE.keys() == {
        *("image", "build", "hostname", "command", "environment", "ports", "volumes", "tmpfs"),
        *("read_only", "shm_size", "cap_drop", "security_opt", "restart", "stop_grace_period"),
    }
    assert SERVICE["restart"] in ("no", "always", "on-failure", "unless-stopped")
