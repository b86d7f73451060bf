"""Checkpoints that are damaged, or are not what they say: one line that names the file."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.commands import convert
from jaxserve.weights import CheckpointError, load_config, load_params
from tests.models.fixtures import ROOT, hf_config, hf_tensors, write_checkpoint

INDEX = "model.safetensors.index.json"


def load(folder: Path) -> Any:
    family, config, _ = load_config(folder)
    return load_params(folder, family, config, dtype="float32")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def orbax(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    write_checkpoint(tmp_path / "hf", hf_config("opt"))
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    return tmp_path / "orbax"


@pytest.mark.parametrize("value", [5, None, ["a.safetensors"], {"a": 1}, "../a.safetensors", ""])
def test_a_weight_map_of_something_else(tmp_path: Path, value: object) -> None:
    write_checkpoint(tmp_path, hf_config("opt"))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x.weight": value}}))
    assert f"{INDEX}: weight_map: 'x.weight' is in no file" in refusal(tmp_path)


@pytest.mark.parametrize("value", [{}, [], "x", 3])
def test_no_weight_map(tmp_path: Path, value: object) -> None:
    write_checkpoint(tmp_path, hf_config("opt"))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": value}))
    assert f"{INDEX} has no weight_map" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["opt", "llama3"])
def test_fewer_layers_than_the_file_has(tmp_path: Path, name: str) -> None:
    hf = hf_config(name)
    layers = hf["num_hidden_layers"]
    write_checkpoint(tmp_path, {**hf, "num_hidden_layers": layers - 1}, hf_tensors(hf))
    said = refusal(tmp_path)
    assert f"config.json: num_hidden_layers is {layers - 1}, but the checkpoint has" in said
    assert f".layers.{layers - 1}." in said


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    tensors = hf_tensors(hf_config("opt"))
    broken = tensors["model.decoder.layers.1.fc1.weight"] = tensors[
        "model.decoder.layers.1.fc1.weight"
    ].copy()
    broken[3, 5] = value
    write_checkpoint(tmp_path, hf_config("opt"), tensors)
    said = refusal(tmp_path)
    assert said == f"{tmp_path}: parameter 'layers.1.up.kernel' is NaN or infinite in float32"


@pytest.mark.parametrize(("given", "shown"), [("gptq", "'gptq'"), ([1], r"[1]")])
def test_a_quantization_config_that_is_no_object(tmp_path: Path, given: Any, shown: str) -> None:
    write_checkpoint(
        tmp_path, {**hf_config("opt"), "quantization_config": given}, hf_tensors(hf_config("opt"))
    )
    said = refusal(tmp_path)
    assert f"config.json: quantization_config must be an object, got {shown}" in said


def test_a_damaged_orbax_checkpoint_is_one_line(orbax: Path) -> None:
    """In a process of its own: threads of the library's write to its stderr."""
    for path in (orbax / "params").rglob("d/*"):
        os.truncate(path, min(100, path.stat().st_size))
    script = (
        "import sys\n"
        "from tests.models.test_broken_checkpoints import Path, CheckpointError, load\n"
        "try:\n"
        "    load(Path(sys.argv[1]))\n"
        "except CheckpointError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(orbax)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"cannot read {orbax / 'params'}: ")
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_a_healthy_one_is_loaded_without_a_word(
    orbax: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absl = logging.getLogger("absl")
    before = absl.level
    absl.setLevel(logging.INFO)
    try:
        load(orbax)
        assert absl.level == logging.INFO
    finally:
        absl.setLevel(before)
    assert [record for record in caplog.records if record.name == "absl"] == []


def test_a_place_that_cannot_be_written_is_found_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reading(*_: object, **__: object) -> None:
        raise AssertionError("read before it was known where to write")

    write_checkpoint(tmp_path, hf_config("opt"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(convert, "load_params", reading)
    assert convert.main([str(tmp_path), str(tmp_path / "file" / "out")]) == 2
    assert (
        capsys.readouterr().err == f"jaxserve convert: DST: {tmp_path / 'file'} is not a folder\n"
    )
