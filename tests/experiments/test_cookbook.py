"""The pages of docs/cookbook are what their command writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxserve.models.presets import preset_names
from jaxserve_lab.experiments.cookbook import cli, speed
from jaxserve_lab.experiments.cookbook.recipes import RECIPES

DOCS = Path(__file__).parents[2] / "docs"


def test_pages_are_as_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    shutil.copy(DOCS / "figures" / "cookbook.csv", tmp_path / "figures")
    assert cli.main([f"--out={tmp_path}"]) == 0
    made = {page.name: page.read_text() for page in (tmp_path / "cookbook").iterdir()}
    assert made == {page.name: page.read_text() for page in (DOCS / "cookbook").iterdir()}


def test_every_preset_is_on_a_page() -> None:
    assert {name for recipe in RECIPES.values() for name in recipe.presets} == {*preset_names()}


def test_what_is_measured_is_on_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what was measured before."""
    (tmp_path / "figures").mkdir()
    shutil.copy(DOCS / "figures" / "cookbook.csv", tmp_path / "figures")

    def measure(preset: str, quantization: str) -> speed.Speed:
        weights = quantization or "bfloat16"
        return speed.Speed(preset, weights, 1234, 5.5, 67.8, "an abacus, 2 cores, jax 0")

    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main([f"--out={tmp_path}", "--measure", "--pages=opt"]) == 0
    page = (tmp_path / "cookbook" / "opt.md").read_text()
    assert page.count("| 1,234 | 5.5 | 67.8 |") == 3 * len(RECIPES["opt"].measured)
    assert "an abacus" in page
    assert "abacus" not in (tmp_path / "cookbook" / "qwen.md").read_text()


def test_a_page_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([f"--out={tmp_path}", "--pages=opt,nobody"])
    assert "there is no 'nobody'; known: llama, qwen" in capsys.readouterr().err


@pytest.mark.slow
def test_the_measurement_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Briefly."""
    for name, value in (("PROMPT", 20), ("OUTPUT", 4), ("STREAMS", 2), ("TIMES", 1)):
        monkeypatch.setattr(speed, name, value)
    found = speed.measure("opt-125m", "int8")
    assert found.preset == "opt-125m" and found.weights == "int8"
    assert found.ttft_ms > 0 and found.one > 0 and found.streams > 0
