"""A start that fails leaves nothing behind, and what was there before stays."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.config import ConfigError, SchedulerConfig, ServerConfig
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.options import open_batches
from tests.server.batches.journals import ROOM, lines
from tests.server.processes import ROOT, refused

BATCHES = "--config.server.batch_dir=~/deep/batches"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty one."""
    path = tmp_path / "home"
    path.mkdir()
    return path


def left(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--model=/no/such/model"],
        ["--policy=nope"],
        ["--config.cache.memory_gib=100000"],
        ["--config.engine.record=/no/such/folder/x"],
    ],
    ids=lambda flags: flags[0].removeprefix("--"),
)
def test_a_flag_that_cannot_be_served_leaves_no_folder(home: Path, flags: list[str]) -> None:
    refused(BATCHES, *flags, HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    assert left(home) == []


def test_a_port_that_is_taken_leaves_no_folder(home: Path) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(BATCHES, f"--port={port}", HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    assert "Address already in use" in said
    assert left(home) == []


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in the box without its last tensor, which nobody notices before it loads."""
    folder = tmp_path_factory.mktemp("models") / "cut"
    shutil.copytree(ROOT / "jaxserve/assets/tiny-stories", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[max(tensors)]
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_weights_that_cannot_be_loaded_leave_no_folder(home: Path, cut: Path) -> None:
    flags = (BATCHES, "--policy=sarathi", f"--model={cut}")
    said = refused(*flags, HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    assert "the checkpoint has no tensor" in said
    assert left(home) == []


def test_adapters_are_looked_at_before_weights_are_loaded(home: Path, cut: Path) -> None:
    flags = (BATCHES, "--policy=sarathi", f"--model={cut}", f"--lora=law={home}")
    said = refused(*flags, HOME=str(home), PYTHONDONTWRITEBYTECODE="1")
    assert f"lora.adapters: law: '{home}' has no adapter_config.json" in said
    assert left(home) == []


@pytest.mark.parametrize(
    "field",
    ["server.score_template", "server.api_keys", "server.tls_cert", "model.path"],
)
def test_files_are_looked_at_before_the_engine_is_built(tmp_path: Path, field: str) -> None:
    """Which would complain of the pool."""
    file, flags = tmp_path / "nonsense", list[str]()
    file.write_text("nonsense {")
    if field == "model.path":
        flags = [f"--model={tmp_path}"]
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "chat_template.jinja").write_text("{{ nonsense")
    elif field == "server.tls_cert":
        flags = [f"--config.server.tls_key={file}"]
    given = [] if field == "model.path" else [f"--config.{field}={file}"]
    said = refused("--config.cache.memory_gib=100000", *flags, *given)
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
