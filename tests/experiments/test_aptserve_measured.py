"""What is measured for docs/aptserve.md: it runs, is kept, and is rendered."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import Config
from jaxserve_lab.experiments.aptserve import measured
from jaxserve_lab.experiments.aptserve.claims import AptServe, Scale
from jaxserve_lab.experiments.common.runs import Results
from tests.engine.harness import write_shape


def step(read: str, rows: int, kv: float, hidden: float) -> dict[str, Any]:
    return {"read": read, "rows": rows, "tokens": 512, "kv": kv, "hidden": hidden}


def page_at(folder: Path) -> AptServe:
    return AptServe(Scale(), Results(AptServe.run, lambda _: dict), Namespace(out=str(folder)))


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
    found = measured.measure_steps((2,), (8, 30), ("absorbed",), few_shapes)
    assert [(one["read"], one["rows"], one["tokens"]) for one in found] == [
        ("absorbed", 2, 8),
        ("absorbed", 2, 30),
    ]
    assert all(0 < one["kv"] < 10 and 0 < one["hidden"] < 10 for one in found)
    path = tmp_path / measured.STEPS_FILE
    measured.write_steps([*found, *(one | {"read": "projected"} for one in found)], path)
    assert measured.steps_said(path)["shapes"] == 2


def test_the_page_says_what_the_steps_took(tmp_path: Path) -> None:
    path = tmp_path / measured.STEPS_FILE
    found = [step("absorbed", 1, 0.010, 0.012), step("absorbed", 8, 0.050, 0.070)]
    found += [step("projected", 1, 0.010, 0.050), step("projected", 8, 0.050, 0.300)]
    measured.write_steps(found, path)
    said = measured.steps_said(path)
    assert (said["median"], said["worst"]) == pytest.approx((1.3, 1.4))
    assert said["shapes"] == 2
    assert said["projected"] == pytest.approx((5.0, 6.0))


@pytest.mark.slow
def test_loads_are_served_and_rendered(
    tmp_path: Path, few_shapes: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "LONGEST", 63)  # what the small model takes
    found = measured.measure_loads((200.0,), 40, 1, ("aptserve",), few_shapes)
    (one,) = found
    assert one["policy"] == "aptserve" and one["ttft"] > 0
    assert 0 <= one["attainment"] <= 1 and 0 <= one["hidden_share"] <= 1
    path = tmp_path / measured.LOADS_FILE
    measured.write_loads(found, path)
    assert measured.loads_said(path)["verdict"] == f"`aptserve` {one['attainment']:.0%} at 200/s"


def test_the_middle_of_several_runs_counts(tmp_path: Path) -> None:
    shares = {"vllm": (0.1, 0.3, 0.2), "aptserve": (0.9, 0.7, 0.8)}
    found = [
        {
            "policy": policy,
            "rate": rate,
            "repeat": i,
            "attainment": share / rate,
            "hidden_share": 0.4,
        }
        for policy, runs in shares.items()
        for rate in (1.0, 2.0)
        for i, share in enumerate(runs)
    ]
    figures = tmp_path / "figures"
    measured.write_loads(found, figures / measured.LOADS_FILE)
    page = page_at(tmp_path)
    assert page.load()["verdict"] == "`vllm` 10% at 2/s, `aptserve` 40% at 2/s"
    page._drawn["aptserve_load.png"](figures / "aptserve_load.png")
    assert (figures / "aptserve_load.png").stat().st_size > 1000


def test_it_is_said_when_nothing_was_measured(tmp_path: Path) -> None:
    text = page_at(tmp_path).rendered()
    assert text.count("Not measured here") == 2


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"steps": [{"read": 1}], "loads": []}'])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json: not measured steps"):
        measured.steps_said(path)
    with pytest.raises(ValueError, match=r"other\.json: not measured loads"):
        measured.loads_said(path)
