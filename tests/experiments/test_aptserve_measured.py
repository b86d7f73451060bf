"""What is measured for docs/aptserve.md: it runs, is kept, and is rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.config import Config
from jaxserve_lab.experiments.aptserve import load as apt_load
from jaxserve_lab.experiments.aptserve import measured
from jaxserve_lab.experiments.aptserve import steps as apt_steps
from jaxserve_lab.experiments.aptserve.case import OnlineNumbers, run
from jaxserve_lab.experiments.aptserve.page import AptServe, Scale
from jaxserve_lab.experiments.common.runs import Results
from tests.engine.harness import write_shape


def write_steps(found: Sequence[apt_steps.StepTimes], path: Path) -> None:
    measured.write(path, apt_steps.COMMAND, "steps", found)


def write_loads(found: Sequence[apt_load.Load], path: Path) -> None:
    measured.write(path, apt_load.COMMAND, "loads", found, slo={"ttft": 2.0, "tbt": 1.0})


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
    write_steps([*found, *(replace(one, read="projected") for one in found)], path)
    assert apt_steps.said(path)["shapes"] == 2


def test_the_page_says_what_the_steps_took(tmp_path: Path) -> None:
    path = tmp_path / apt_steps.FILE_NAME
    write_steps(STEPS, path)
    said = apt_steps.said(path)
    assert (said["median"], said["worst"]) == pytest.approx((1.3, 1.4))
    assert (said["met"], said["shapes"]) == (1, 2)
    assert said["projected"] == pytest.approx((5.0, 6.0))


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
    write_loads(found, path)
    assert apt_load.said(path)["verdict"] == f"`aptserve` {one.attainment:.0%} at 200/s"


def test_the_middle_of_several_runs_counts(tmp_path: Path) -> None:
    shares = {"vllm": (0.1, 0.3, 0.2), "aptserve": (0.9, 0.7, 0.8)}
    found = [
        apt_load.Load(policy, rate, i, share / rate, 1.0, 0.5, 0.4, i, 9.0)
        for policy, runs in shares.items()
        for rate in (1.0, 2.0)
        for i, share in enumerate(runs)
    ]
    path = tmp_path / apt_load.FILE_NAME
    write_loads(found, path)
    said = apt_load.said(path)
    assert said["verdict"] == "`vllm` 10% at 2/s, `aptserve` 40% at 2/s"
    page = AptServe(Scale(), Results(run, lambda _: OnlineNumbers), tmp_path)
    page.load()
    page._drawn["aptserve_load.png"](tmp_path / "aptserve_load.png")
    assert (tmp_path / "aptserve_load.png").stat().st_size > 1000


def test_it_is_said_when_nothing_was_measured(tmp_path: Path) -> None:
    text = AptServe(Scale(), Results(run, lambda _: OnlineNumbers), tmp_path).rendered()
    assert text.count("Not measured here") == 2


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"steps": [{"read": 1}], "loads": []}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json: not measured steps"):
        apt_steps.said(path)
    with pytest.raises(ValueError, match=r"other\.json: not measured loads"):
        apt_load.said(path)
