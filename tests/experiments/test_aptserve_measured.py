"""What is measured for docs/aptserve.md: it runs, is kept, and is rendered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.config import Config
from jaxserve.experiments.aptserve import load as apt_load
from jaxserve.experiments.aptserve import steps as apt_steps
from tests.engine.harness import write_shape

STEPS = [
    apt_steps.StepTimes("absorbed", 1, 512, 0.010, 0.012),
    apt_steps.StepTimes("absorbed", 8, 512, 0.050, 0.070),
    apt_steps.StepTimes("projected", 1, 512, 0.010, 0.050),
    apt_steps.StepTimes("projected", 8, 512, 0.050, 0.300),
]


@pytest.fixture
def few_shapes(tmp_path: Path) -> Config:
    """A small model with random weights, with little to compile."""
    return Config().with_fields(
        model__path=str(write_shape(tmp_path, "opt")),
        model__load_format="random",
        scheduler__max_rows=8,
        engine__row_buckets=(8,),
        engine__token_buckets=(64,),
        engine__compilation_cache_dir="",
    )


@pytest.mark.slow
def test_steps_are_measured_and_rendered(tmp_path: Path, few_shapes: Config) -> None:
    found = apt_steps.measure((2,), (8, 30), ("absorbed",), few_shapes)
    assert [(one.read, one.rows, one.tokens) for one in found] == [
        ("absorbed", 2, 8),
        ("absorbed", 2, 30),
    ]
    assert all(0 < one.kv < 10 and 0 < one.hidden < 10 for one in found)
    path = tmp_path / apt_steps.FILE_NAME
    apt_steps.dump([*found, *(replace(one, read="projected") for one in found)], path)
    assert "| 2 | 30 |" in "\n".join(apt_steps.section(path, 8).lines())


def test_the_page_says_what_the_steps_took(tmp_path: Path) -> None:
    path = tmp_path / apt_steps.FILE_NAME
    apt_steps.dump(STEPS, path)
    text = "\n".join(apt_steps.section(path, 8).lines())
    assert "| 1 | 512 | 10.0 | 1.20 | 5.0 |" in text and "| 8 | 512 | 50.0 | 1.40 | 6.0 |" in text
    assert "1.30 times in the median, 1.40 at worst; 1 of 2 shapes reach it" in text
    assert "5.0 to 6.0 times the KV step" in text


@pytest.mark.slow
def test_loads_are_served_and_rendered(
    tmp_path: Path, few_shapes: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apt_load, "LONGEST", 63)  # what the small model takes
    found = apt_load.measure((200.0,), 40, 1, ("aptserve",), few_shapes)
    (one,) = found
    assert one.policy == "aptserve" and one.ttft > 0
    assert 0 <= one.attainment <= 1 and 0 <= one.hidden_share <= 1
    path = tmp_path / apt_load.FILE_NAME
    apt_load.dump(found, path)
    text = "\n".join(apt_load.section(path, tmp_path, 9).lines())
    assert "| `aptserve` | 200 |" in text
    assert (tmp_path / "aptserve_load.png").stat().st_size > 1000


def test_the_middle_of_several_runs_counts(tmp_path: Path) -> None:
    shares = {"vllm": (0.1, 0.3, 0.2), "aptserve": (0.9, 0.7, 0.8)}
    found = [
        apt_load.Load(policy, rate, i, share / rate, 1.0, 0.5, 0.4, i, 9.0)
        for policy, runs in shares.items()
        for rate in (1.0, 2.0)
        for i, share in enumerate(runs)
    ]
    path = tmp_path / apt_load.FILE_NAME
    apt_load.dump(found, path)
    text = "\n".join(apt_load.section(path, tmp_path, 9).lines())
    assert "| `vllm` | 1 | 20% (10% to 30%) | 1.00 | 0.50 | 1 |" in text
    assert "`vllm` 10% at 2/s, `aptserve` 40% at 2/s" in text


def test_it_is_said_when_nothing_was_measured(tmp_path: Path) -> None:
    assert "Not measured" in apt_steps.section(tmp_path / "none.json", 8).setting
    assert "Not measured" in apt_load.section(tmp_path / "none.json", tmp_path, 9).setting


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"steps": [{"read": 1}], "loads": []}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json: not measured steps"):
        apt_steps.section(path, 8)
    with pytest.raises(ValueError, match=r"other\.json: not measured loads"):
        apt_load.section(path, tmp_path, 9)
