"""The parts of tools/llama_cpp that do not need llama.cpp."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.models.dense import sequence_logits
from jaxserve.models.presets import preset
from jaxserve.weights import load_config, load_params
from tests.models.fixtures import hf_config, load_reference
from tests.models.gguf_files import write_reference

FOLDER = Path(__file__).parents[2] / "tools" / "llama_cpp"

sys.path.append(str(FOLDER))  # a folder of scripts, not a package
make_files, side_by_side = map(importlib.import_module, ("make_files", "side_by_side"))


def compared(type_: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    rates = {"jaxserve": ours, "llama.cpp": theirs}
    return {"model": "smollm2", "type": type_, "rates": {"decode": rates}}


def verdict(rows: str) -> list[str]:
    return [line.split("|")[-2].strip() for line in rows.splitlines()[2:]]


def test_the_median_of_the_rounds_ratios_decides() -> None:
    rows = side_by_side.table([compared("float32", [90, 10, 91], [100, 10, 100])])
    assert "| 90.0 | 100.0 | 0.91 | 0.9 | met |" in rows


def test_each_type_is_to_be_faster_than_the_wider_one() -> None:
    rates = {"float32": 40.0, "bfloat16": 50.0, "int8": 50.0, "int4": 60.0, "int4-zero": 55.0}
    rows = side_by_side.table([compared(t, [rate], [55.0]) for t, rate in rates.items()])
    slow = "no faster than the wider one"
    assert verdict(rows) == ["missed", "met", f"met, {slow}", "met", "met"]


def test_both_sides_have_their_turn_in_each_round() -> None:
    turns = list(side_by_side.in_turns(["a", "b"], ["x", "y"], 2))
    first = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    assert turns == [*first, ("a", "y"), ("a", "x"), ("b", "y"), ("b", "x")]


def test_what_there_is_not_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_by_side.parse(["--models=opt-125m"])
    assert "some of smollm2,qwen2.5-0.5b" in capsys.readouterr().err


def test_a_shuffled_model_computes_what_it_did(tmp_path: Path) -> None:
    """But its groups of weights are others."""
    file = tmp_path / "model.gguf"
    write_reference(file, hf_config("llama3") | {"rope_scaling": None})
    tokens = load_reference("llama3").tokens[0]

    def read() -> tuple[np.ndarray, np.ndarray]:
        family, config, _ = load_config(file)
        params = load_params(file, family, config, dtype="float32")
        logits = sequence_logits(family, params, config, tokens, dtype="float32")
        return np.asarray(logits), np.asarray(params.layers[0].attn.v.kernel)

    logits, v = read()
    make_files.shuffle(file)
    now, shuffled = read()
    np.testing.assert_allclose(now, logits, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(v, shuffled)
    assert np.array_equal(np.sort(v, axis=None), np.sort(shuffled, axis=None))


def test_random_files_have_the_presets_weights(tmp_path: Path) -> None:
    hf = preset("qwen2.5-0.5b") | {"num_hidden_layers": 1, "vocab_size": 64}
    make_files.write_random(tmp_path / "model.gguf", hf)
    shapes = dict(make_files.shapes(hf))
    assert sum(np.prod(shape) for name, shape in shapes.items() if ".0." in name) == 14_912_384
    assert (tmp_path / "model.gguf").stat().st_size > 4 * 14_912_384
