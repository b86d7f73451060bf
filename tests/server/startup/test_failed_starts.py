"""A start that fails leaves nothing behind, and what was there before stays."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import pytest
from absl import flags
from safetensors.numpy import load_file, save_file

from jaxserve.commands import serve
from jaxserve.config import ConfigError, SchedulerConfig, ServerConfig
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.options import open_batches
from jaxserve.server.startup import launch
from tests.server.batches.serving import ROOM, lines
from tests.server.logging_kept import logging_kept
from tests.server.processes import ROOT, serve_command

BATCHES = "--config.server.batch_dir=~/deep/batches"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    return path


Refused = Callable[..., str]


@pytest.fixture
def refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Refused]:
    """What `jaxserve serve` says of flags that it cannot serve: all that it prints, and one line.
    It leaves no folder."""
    cache = jax.config.jax_compilation_cache_dir
    answer, read_config = launch.answer, launch.read_config

    def start(*given: str) -> str:
        values = flags.FlagValues()
        monkeypatch.setattr(launch, "answer", partial(answer, values=values))
        monkeypatch.setattr(launch, "read_config", partial(read_config, values))
        with logging_kept():
            code = serve.main(serve_command(BATCHES, *given, program=()), "serve.py")
        out, said = capsys.readouterr()
        assert (code, out) == (2, "") and re.fullmatch(r"serve\.py: .+\n", said), said
        assert list(home.rglob("*")) == []
        return said

    yield start
    jax.config.update("jax_compilation_cache_dir", cache)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in the box without its last tensor, which nobody notices before it loads."""
    folder = tmp_path_factory.mktemp("models") / "cut"
    shutil.copytree(ROOT / "jaxserve/assets/tiny-stories", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[max(tensors)]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_start_that_fails_leaves_no_folder(refused: Refused, home: Path, cut: Path) -> None:
    for flag, problem in (
        ("--model=/no/such/model", "model.path: no such"),
        ("--policy=nope", "there is no policy 'nope'"),
        ("--config.cache.memory_gib=100000", "cache.memory_gib"),
        ("--config.engine.record=/no/such/folder/x", "engine.record"),
    ):
        assert problem in refused(flag)
    with socket.create_server(("localhost", 0)) as taken:
        assert "Address already in use" in refused(f"--port={taken.getsockname()[1]}")
    model = ("--policy=sarathi", f"--model={cut}")
    assert "the checkpoint has no tensor" in refused(*model)
    said = refused(*model, f"--lora=law={home}")  # looked at before weights are loaded
    assert f"lora.adapters: law: '{home}' has no adapter_config.json" in said


def test_files_are_looked_at_before_the_engine_is_built(refused: Refused, tmp_path: Path) -> None:
    """Which would complain of the pool."""
    file = tmp_path / "nonsense"
    file.write_text("nonsense {")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ nonsense")
    for field, given in (
        ("server.score_template", [f"--config.server.score_template={file}"]),
        ("server.api_keys", [f"--config.server.api_keys={file}"]),
        ("server.tls_cert", [f"--config.server.{name}={file}" for name in ("tls_key", "tls_cert")]),
        ("model.path", [f"--model={tmp_path}"]),
    ):
        said = refused("--config.cache.memory_gib=100000", *given)
        assert said.startswith(f"serve.py: {field}")


def test_what_was_there_stays(tmp_path: Path) -> None:
    """A folder, and batches in a new one."""
    for there, batch in ((True, False), (False, True), (False, False)):
        folder = tmp_path / f"{there} {batch}" / "batches"
        if there:
            folder.mkdir(parents=True)
        config = ServerConfig(batch_dir=str(folder))
        with (
            pytest.raises(ConfigError, match="wrong"),
            open_batches(config, SchedulerConfig()) as found,
        ):
            assert found is not None
            if batch:
                found.journal.append("mine", "model", 0, lines(1), commit=True)
            raise ConfigError("wrong")
        assert folder.exists() == (there or batch)
        assert folder.parent.exists() == (there or batch)
        if batch:
            journal = Journal(folder, ROOM)
            assert journal.status("mine").num_lines == 1
            journal.close()
