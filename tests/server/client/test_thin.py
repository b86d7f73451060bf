"""The client alone, as `pip install '.[client]'` gives it: what it needs, what it does without JAX,
and what the other commands then say. And stubs that others make of the .proto files beside it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxserve.commands.cli import COMMANDS
from jaxserve.server.server import Server
from tests.server.batches.serving import serving
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]}
EXTRAS = PROJECT["optional-dependencies"]
CLIENT = ("complete", "chat", "embed", "batch")
LAB = ("compile-check",)
NO_LAB = (
    "needs the lab, which is not installed (no module jaxserve_lab): install jaxserve-llm with its "
    "extra lab"
)


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with the base dependencies and theirs, and no more."""
    site = tmp_path_factory.mktemp("thin")
    left, seen = [*BASE], set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                link = site / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(found.locate_file(file))
        for each in map(Requirement, found.requires or ()):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                left.append(canonicalize_name(each.name))
    return site


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("batches")
    with serving(FakeEngine().run(), folder, http=SETTINGS) as server:
        yield server


def python(*arguments: str, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """-S: without this interpreter's own site-packages."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def jaxserve(*arguments: str, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "jaxserve", *arguments, site=site, cwd=cwd)


def test_the_base_dependencies_are_what_the_client_imports(thin: Path, tmp_path: Path) -> None:
    script = (
        "import importlib, json, pkgutil, sys\n"
        "import jaxserve.client\n"
        "for each in pkgutil.iter_modules(jaxserve.client.__path__):\n"
        "    importlib.import_module(f'jaxserve.client.{each.name}')\n"
        "print(json.dumps([m.__file__ for m in sys.modules.values() if hasattr(m, '__file__')]))\n"
    )
    done = python("-c", script, site=thin, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = {Path(file) for file in json.loads(done.stdout) if file}
    used = {each for each in BASE if loaded & {*map(thin.joinpath, _files(each))}}
    assert used == BASE
    assert EXTRAS["client"] == []


def _files(name: str) -> list[str]:
    return [str(file) for file in importlib.metadata.distribution(name).files or ()]


def test_what_runs_models_brings_the_rest() -> None:
    """And nothing is in both."""
    server = {canonicalize_name(Requirement(each).name) for each in EXTRAS["server"]}
    assert {"jax", "jaxlib", "numpy", "fastapi"} <= server and not server & BASE
    for extra in (
        "cpu",
        "cuda12",
        "tpu",
        "gguf",
        "optimal",
        "fast",
        "otel",
        "ray",
        "lab",
        "notebook",
    ):
        assert "server" in _with_extras(extra), extra


def _with_extras(extra: str) -> set[str]:
    own = [Requirement(each) for each in EXTRAS[extra]]
    brought = {more for each in own if each.name == PROJECT["name"] for more in each.extras}
    return {extra}.union(*map(_with_extras, brought))


def test_it_calls_a_server(server: Server, thin: Path, tmp_path: Path) -> None:
    def call(*arguments: str) -> str:
        done = jaxserve(*arguments, site=thin, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    grpc, http = f"--address={server.address}", f"--address={server.http_address}"
    assert call("complete", "hello", grpc, "--max_tokens=2") == "hello w0 w1\n"
    assert call("chat", "hello", http, "--max_tokens=2") == " w0 w1\n"
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    call("batch", prompts.name, grpc, f"--out={results.name}", "--max_tokens=2")
    assert [_text(line) for line in results.read_text().splitlines()] == [" w0 w1"] * 2
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    prompts.write_text(json.dumps(line) + "\n")
    results.unlink()
    call("batch", prompts.name, http, f"--out={results.name}")
    (answer,) = map(json.loads, results.read_text().splitlines())
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == " w0 w1"


def _text(line: str) -> Any:
    return json.loads(line)["completions"][0]["text"]


def test_other_commands_say_in_a_line_what_to_install(thin: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom jaxserve.commands.cli import main\n"
        "print(*[main([name]) for name in sys.argv[1:]])\n"
    )
    others = [name for name in COMMANDS if name not in (*CLIENT, *LAB)]
    done = python("-c", script, *others, site=thin, cwd=tmp_path)
    assert done.stdout.split() == ["1"] * len(others), done.stderr
    for name, line in zip(others, done.stderr.splitlines(), strict=True):
        assert line.startswith(f"jaxserve {name} needs what runs models, and only the client is ")
        assert line.endswith("install jaxserve-llm with its extra cpu, cuda12 or tpu")
    for name in LAB:
        done = jaxserve(name, site=thin, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"jaxserve {name} {NO_LAB}\n"


def test_vectors_need_no_numpy_and_the_engine_says_what_to_install(
    server: Server, thin: Path, tmp_path: Path
) -> None:
    script = (
        "import sys\nfrom jaxserve.client import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    (found,) = client.embed('hello')\n"
        "print(type(found.embedding[0]).__name__)\n"
        "from jaxserve import SLO, SamplingParams\n"
        "try:\n    from jaxserve import LLM\n"
        "except ModuleNotFoundError:\n    raise\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = python("-c", script, server.address, site=thin, cwd=tmp_path)
    kind, problem = done.stdout.splitlines()
    assert kind == "float"
    assert problem.startswith("jaxserve.LLM needs what runs models, and only the client is ")


def test_a_module_that_is_missing_for_another_reason_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COMMANDS, "serve", ("jaxserve.nowhere", "main", ""))
    with pytest.raises(ModuleNotFoundError, match=r"jaxserve\.nowhere"):
        from jaxserve.commands.cli import main

        main(["serve"])


def test_stubs_made_of_the_proto_files_work_beside_the_package(
    server: Server, tmp_path: Path
) -> None:
    """By the documented command, in a clone."""
    page = (ROOT / "docs" / "api.md").read_text()
    (command,) = (line for line in page.splitlines() if "grpc_tools.protoc" in line)
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    program = command.strip().replace("python ", f"{sys.executable} ", 1)
    subprocess.run(["sh", "-c", program], cwd=tmp_path, check=True)
    script = (
        "import sys, grpc\n"
        "if sys.argv[2] == 'first': import jaxserve.client\n"
        "from jaxserve_v1 import batches_pb2_grpc, generation_pb2, generation_pb2_grpc\n"
        "import jaxserve.client\n"
        "with grpc.insecure_channel(sys.argv[1]) as channel:\n"
        "    stub = generation_pb2_grpc.GenerationStub(channel)\n"
        "    request = generation_pb2.GenerateRequest(text='hello', sampling={'max_tokens': 2})\n"
        "    print(''.join(each.text for each in stub.Generate(request)))\n"
        "with jaxserve.client.Client(sys.argv[1]) as client:\n"
        "    print(client.complete('hello', max_tokens=2)[0].text)\n"
    )
    for order in ("first", "last"):
        done = subprocess.run(
            [sys.executable, "-c", script, server.address, order],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.stdout == " w0 w1\n w0 w1\n", done.stderr
