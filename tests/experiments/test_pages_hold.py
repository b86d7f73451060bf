"""The numbers of the generated pages are those of the simulator and the policies of today: small
runs that each page keeps beside its own come out as they did when it was made."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from jaxserve_lab.experiments.accelgen.claims import AccelGen
from jaxserve_lab.experiments.aptserve.claims import AptServe
from jaxserve_lab.experiments.bros.claims import Bros
from jaxserve_lab.experiments.common.page import Page
from jaxserve_lab.experiments.common.runs import Results, as_dict
from jaxserve_lab.experiments.infermax.claims import InferMax
from jaxserve_lab.experiments.league import runs as league
from jaxserve_lab.experiments.league.workloads import OPT
from jaxserve_lab.experiments.reuse import retention
from jaxserve_lab.experiments.reuse.setting import Setting
from jaxserve_lab.experiments.scale import page as scale
from jaxserve_lab.experiments.scale.cell import KINDS_OF
from jaxserve_lab.experiments.speculation import simulated as speculation

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = ("plan", "plan_p99", "per_s")  # by a clock
PAGES: list[tuple[type[Page[Any, Any]], Any, Any]] = [
    *((page, page.run, lambda _: dict) for page in (InferMax, AptServe, AccelGen, Bros)),
    (scale.Fleets, scale.run, lambda case: KINDS_OF[type(case)]),
]


@pytest.mark.promise(28)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("page", "run", "kind"), PAGES, ids=lambda one: getattr(one, "name", ""))
def test_runs_come_out_as_on_the_page(
    page: type[Page[Any, Any]], run: Any, kind: Any, part: int
) -> None:
    kept = Results(run, kind, DOCS / "figures" / f"{page.name}.json")
    assert len(page.held) >= 5
    for case in page.held[part::2]:
        check(run(case), kept[case], case)


def check(found: Any, kept: Any, case: object) -> None:
    for name, value in as_dict(kept).items():
        if name not in MEASURED:
            # Four digits or more; and machines round sums differently.
            assert as_dict(found)[name] == pytest.approx(value, rel=1e-4), f"{case}: {name}"


@pytest.mark.parametrize(("page", "run", "kind"), PAGES, ids=lambda one: getattr(one, "name", ""))
def test_pages_say_whose_rules_made_them(page: type[Page[Any, Any]], run: Any, kind: Any) -> None:
    text = (DOCS / f"{page.name}.md").read_text(encoding="utf-8")
    assert f"has the numbers of every run, under {page.rules}" in text


@pytest.mark.promise(28)
@pytest.mark.parametrize("policy", ["goodput", "sarathi", "vllm", "priority"])
def test_runs_of_the_league_come_out_as_on_its_page(policy: str) -> None:
    with (DOCS / "figures" / "league.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["system"], r["policy"]) == (OPT, policy)]
    (row,) = (r for r in rows if (r["workload"], r["load"], r["seed"]) == ("liso+silo", "at", "0"))
    rate, count = float(row["rate"]), int(row["count"])
    found = league.run(league.LeagueCase(OPT, "liso+silo", "at", policy, 0, rate, count))
    for name, value in dataclasses.asdict(found).items():
        kept = pytest.approx(float(row[name]), rel=1e-4) if row[name] else None
        assert value == kept, name


@pytest.mark.promise(28)
def test_a_place_of_the_page_on_reuse_comes_out_as_there() -> None:
    cells = line_of("reuse", "| two tiers | 5% |")
    cases = [
        retention.RetentionCase("two tiers", "sarathi", "lru", 0.05, seed, Setting())
        for seed in retention.SEEDS
    ]
    assert cells[6] == f"{fmean(retention.run(case).met for case in cases):.1%}"


@pytest.mark.promise(28)
def test_a_place_of_the_page_on_drafts_comes_out_as_there() -> None:
    cells = line_of("speculation", "| `humaneval` | `sarathi` | at, 45/s |")
    plain, drafting = (
        [
            speculation.run(
                speculation.SpeculationCase("humaneval", "at", policy, seed, speculation.REQUESTS)
            )
            for seed in speculation.SEEDS
        ]
        for policy in ("sarathi", "sarathi+spec")
    )
    assert cells[3:5] == [f"{fmean(one.met for one in runs):.1%}" for runs in (plain, drafting)]
    times = fmean(two.token / one.token for one, two in zip(plain, drafting, strict=True))
    drafted, right = (fmean(getattr(one, n) for one in drafting) for n in ("drafted", "accepted"))
    assert cells[7:] == [f"{times:.3f}", f"{drafted:.2f}", f"{right:.2f}"]


def line_of(page: str, begin: str) -> list[str]:
    """The cells of the only line of a table that begins so."""
    (line,) = (
        one
        for one in (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()
        if one.startswith(begin)
    )
    return line.strip("| ").split(" | ")
