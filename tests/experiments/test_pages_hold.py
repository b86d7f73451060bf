"""The numbers of the generated pages are those of the simulator and the policies of today: small
runs that each page keeps beside its own come out as they did when it was made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxserve.experiments.accelgen import page as accelgen
from jaxserve.experiments.aptserve import page as aptserve
from jaxserve.experiments.bros import page as bros
from jaxserve.experiments.common.page import Page
from jaxserve.experiments.common.runs import Results
from jaxserve.experiments.infermax import page as infermax
from jaxserve.experiments.scale import page as scale
from jaxserve.experiments.scale.cell import KINDS_OF

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = ("plan", "plan_p99", "per_s")  # by a clock
PAGES: list[tuple[type[Page[Any, Any]], Any, Any]] = [
    (infermax.InferMax, infermax.run, lambda _: infermax.Numbers),
    (aptserve.AptServe, aptserve.run, lambda _: aptserve.OnlineNumbers),
    (accelgen.AccelGen, accelgen.run, lambda _: accelgen.SloNumbers),
    (bros.Bros, bros.run, lambda _: bros.MixedNumbers),
    (scale.Fleets, scale.run, lambda case: KINDS_OF[type(case)]),
]


@pytest.mark.parametrize(("page", "run", "kind"), PAGES, ids=lambda one: getattr(one, "name", ""))
def test_runs_come_out_as_on_the_page(page: type[Page[Any, Any]], run: Any, kind: Any) -> None:
    kept = Results(run, kind, DOCS / "figures" / f"{page.name}.json")
    assert len(page.held) >= 5
    for case in page.held:
        check(run(case), kept[case], case)


def check(found: Any, kept: Any, case: object) -> None:
    for name, value in dataclasses.asdict(kept).items():
        if name not in MEASURED:
            # Four digits or more; and machines round sums differently.
            assert getattr(found, name) == pytest.approx(value, rel=1e-4), f"{case}: {name}"


@pytest.mark.parametrize(("page", "run", "kind"), PAGES, ids=lambda one: getattr(one, "name", ""))
def test_pages_say_whose_rules_made_them(page: type[Page[Any, Any]], run: Any, kind: Any) -> None:
    text = (DOCS / f"{page.name}.md").read_text(encoding="utf-8")
    assert f"has the numbers of every run, under {page.rules}" in text
