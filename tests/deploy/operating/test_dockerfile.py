"""The image has what the manifests and the server want of it. `make lint` has hadolint."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxserve.config import ServerConfig
from jaxserve.server.access.browser_origins import Browsers, NotAllowed
from jaxserve.server.access.options import access_settings
from jaxserve.server.startup.process import URL_FILE
from tests.deploy.operating.test_kubernetes import PODS, SERVER, container, served
from tests.server.access.certificates import Authority, needs_openssl
from tests.server.processes import PATIENCE

ROOT = Path(__file__).parents[3]
TEXT = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
CONSTRAINTS = "deploy/constraints.txt"
PINNED = {
    requirement.name: requirement.specifier
    for line in (ROOT / CONSTRAINTS).read_text().splitlines()
    if not line.startswith("#")
    for requirement in [Requirement(line)]
}


def said(instruction: str) -> str:
    """What the last of these instructions says."""
    return re.findall(rf"^{instruction} (.+)$", TEXT, re.M)[-1]


def test_it_says_where_the_server_listens() -> None:
    config = ServerConfig()
    expected = {config.http_port, config.port, config.metrics_port}
    assert set(map(int, said("EXPOSE").split())) == expected


def healthy(environment: dict[str, str]) -> bool:
    """What the image's own check says, where there is a server with this environment."""
    command = json.loads(said("HEALTHCHECK").partition(" CMD ")[2])
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True)
    return done.returncode == 0


@pytest.fixture(params=["http", pytest.param("https", marks=needs_openssl)])
def fields(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """Of a server on any port but the usual one."""
    if request.param == "http":
        return ("server.http_port=0", "server.host=0.0.0.0")
    pair = Authority(tmp_path, "ca").issue("server")
    return ("server.http_port=0", f"server.tls_cert={pair.cert}", f"server.tls_key={pair.key}")


@pytest.mark.skipif(shutil.which("wget") is None, reason="needs wget")
def test_its_health_check_finds_the_server(
    tmp_path: Path, fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f" {URL_FILE}=/tmp/" in said("ENV")
    told = {URL_FILE: str(tmp_path / "url")}
    monkeypatch.setenv(*next(iter(told.items())))
    assert not healthy(told), "there is no server yet"
    command = [sys.executable, "-m", "tests.server.run_fake_server", "0", *fields]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline()
        assert healthy(told)
        server.send_signal(signal.SIGUSR1)
        given_up = time.monotonic() + PATIENCE
        while healthy(told):  # until its engine has failed
            assert time.monotonic() < given_up
        server.terminate()
    assert not healthy(told)


def test_what_it_installs_is_locked() -> None:
    assert f" PIP_CONSTRAINT=/src/{CONSTRAINTS}\n" in f"{TEXT}\n".replace("ENV", "")
    assert f"!{CONSTRAINTS}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert all(len(pin) == 1 and str(pin).startswith("==") for pin in PINNED.values())
    assert unlocked(PINNED) == []


def test_what_is_not_locked_is_found() -> None:
    gone = {name: pin for name, pin in PINNED.items() if name not in ("starlette", "libtpu")}
    older = Requirement("numba==0.63").specifier
    assert unlocked({**gone, "numba": older}) == [
        "libtpu is not locked",
        "numba==0.63, and pyproject.toml wants numba>=0.64",
        "starlette is not locked",
    ]


def unlocked(pinned: dict[str, Any]) -> list[str]:
    """What is not in the lock of the packages that the image may install, and theirs, as far as
    they are installed here; and what is there in a version that is not wanted."""
    project = PYPROJECT["project"]
    extras = re.search(r"^LOCKED := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert extras is not None
    wanted = [*PYPROJECT["build-system"]["requires"], *project["dependencies"]]
    wanted += [each for name in extras[1].split() for each in EXTRAS[name]]
    found, seen = set[str](), set[str]()
    left = [(Requirement(each), "pyproject.toml") for each in wanted]
    while left:
        requirement, by = left.pop()
        name = canonicalize_name(requirement.name)
        if name == canonicalize_name(project["name"]):
            left += [(Requirement(e), by) for x in requirement.extras for e in EXTRAS[x]]
            continue
        if name not in pinned:
            found.add(f"{name} is not locked")
        elif not requirement.specifier.contains(str(pinned[name])[2:]):
            found.add(f"{name}{pinned[name]}, and {by} wants {name}{requirement.specifier}")
        key = f"{name}[{','.join(sorted(requirement.extras))}]"
        if key not in seen:
            seen.add(key)
            left += [(each, name) for each in needed(requirement)]
    return sorted(found)


def needed(requirement: Requirement) -> Iterator[Requirement]:
    """By its installed version; nothing of what is not installed. Of devices' packages in extras
    the device's own are looked at, too."""
    try:
        texts = importlib.metadata.requires(requirement.name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for each in map(Requirement, texts):
        asked = ({"extra": extra} for extra in ("", *requirement.extras))
        if each.marker is None or any(map(each.marker.evaluate, asked)):
            yield each


def test_under_its_hosts_name_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented command gives the container that name."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (command,) = re.findall(r"docker run .*--publish.*", page)
    assert '--hostname "$(hostname)"' in command
    monkeypatch.setattr("socket.gethostname", lambda: "gpu1")
    browsers = access_settings(ServerConfig(host="0.0.0.0")).browsers
    assert isinstance(browsers, Browsers)
    browsers.check(["gpu1:8000"], [])
    with pytest.raises(NotAllowed):
        browsers.check(["rebound.example:8000"], [])


def test_its_command_is_one_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    command: list[Any] = json.loads(said("ENTRYPOINT"))
    assert command[-2:] == ["python", "serve.py"]
    config = served(json.loads(said("CMD")), monkeypatch)
    assert config.server.host == "0.0.0.0"
    assert f"install --directory --owner={said('USER').split(':')[0]} " in TEXT
    cache = config.engine.compilation_cache_dir
    assert f" {cache}\n" in TEXT
    for kept in ("NUMBA_CACHE_DIR", "HF_HOME"):
        assert f" {kept}={cache}/" in said("ENV")


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
    assert all((ROOT / path).exists() for path in taken)
