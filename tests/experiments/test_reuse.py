"""The tables of docs/reuse.md come out of their command, and a cache alone finds what there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.common.page import BEGIN, END, write_part
from jaxserve_lab.experiments.reuse.cli import main
from jaxserve_lab.experiments.reuse.replay import distinct_pages, replayed

BLOCK = 64


@pytest.fixture(scope="module")
def work() -> Workload:
    return WorkloadSpec("conversation", 300, rate=6.0).make_workload(0)


@pytest.mark.parametrize("retention", ["lru", "worth"])
def test_with_room_for_all_everything_is_found(work: Workload, retention: str) -> None:
    pages = distinct_pages(work, BLOCK)
    found = replayed(work, retention, pages, BLOCK)
    assert found.found == found.asked > 0
    assert replayed(work, retention, pages // 4, BLOCK).found < found.found


def test_worth_finds_more_where_room_is_short(work: Workload) -> None:
    pages = distinct_pages(work, BLOCK) // 20
    lru, worth = (replayed(work, name, pages, BLOCK).found for name in ("lru", "worth"))
    assert worth > lru


def test_what_is_saved_is_priced_by_depth(work: Workload) -> None:
    pages = distinct_pages(work, BLOCK)
    found = replayed(work, "lru", pages, BLOCK, lambda before: np.full(before.shape, 2.0))
    assert found.saved == 2.0 * found.found


@pytest.mark.slow
def test_parts_go_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "reuse.md"
    parts = (f"{BEGIN.format('reuse', name)}stale\n{END}" for name in ("figures", "retention"))
    page.write_text("before\n{}\nafter\n".format("\n".join(parts)))
    assert main(["--quick", "--jobs=1", f"--out={page}"]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- begin") and text.endswith("<!-- end -->\nafter\n")
    assert "stale" not in text and text.count("| conversation |") == 2
    assert "what any cache could find, drawn conversations | 100% | 99." in text
    assert text.count("a plan of 16 requests") == 4


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "reuse.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="lacks the line"):
        write_part(page, "reuse", "retention", "text")
