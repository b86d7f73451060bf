"""The engine of the papers' pages: a claim is held against runs by place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from jaxserve_lab.experiments.claims.cases import Case
from jaxserve_lab.experiments.claims.claim import CHANGE, POINTS, TIMES, Claim, places
from jaxserve_lab.experiments.claims.page import ClaimsPage, Shown
from jaxserve_lab.experiments.common.runs import Results


@dataclass(frozen=True)
class Run(Case):
    policy: str
    load: int
    seed: int = 0


FOUND = {"slow": (1.0, 0.0), "fast": (2.0, 8.0), "other": (3.0, 1.0)}  # at loads of 1 and 2


class Speeds(ClaimsPage):
    name, kind, sizes = "speeds", Run, (object, object)
    claims = (
        Claim("faster", "2x", "speed", "fast", "slow", "loads", TIMES),
        Claim("change", "", "speed", "fast", "other", "loads", CHANGE),
        Claim("best", "", "speed", "fast", ("slow", "other"), "loads", POINTS),
        Claim("each", "", "speed", "fast", "", "against each", POINTS),
    )
    where = {  # noqa: RUF012
        "loads": places("load {load}", {1: "one"}, load=(1, 2)),
        "against each": places("`{theirs}`", theirs=("slow", "other"), load=[2]),
    }

    def cases(self, policy: str, load: int) -> list[Run]:
        return [Run(policy, load, seed) for seed in range(2)]


@pytest.fixture
def page() -> Speeds:
    page = Speeds(object(), Results(lambda case: {}, lambda _: dict))
    for policy, speeds in FOUND.items():
        for load, speed in zip((1, 2), speeds, strict=True):
            for seed, case in enumerate(page.cases(policy, load)):
                page.results._found[case] = {"speed": speed + seed - 0.5}
    return page


def test_places_are_all_combinations_of_their_axes() -> None:
    found = places("{a}{b}", {2: "two "}, a=(1, 2), b=lambda at: range(at["a"]))
    assert found == {
        "10": {"a": 1, "b": 0},
        "two 0": {"a": 2, "b": 0},
        "two 1": {"a": 2, "b": 1},
    }


def test_policies_are_compared_by_place(page: Speeds) -> None:
    faster, change, best, each = page.of.values()
    assert (faster.paper, faster.values) == ("2x", {"load one": 2.0})  # no ratio to 0
    assert faster.most == faster.least == faster.each == "2x (load one)"
    assert change.ends == "-33% (load one) to +700% (load 2)"
    assert (change.span, change.mean) == ("-33% to +700%", "+333%")
    assert change.shares == "2.50x (500.0% for 200.0%)"
    # Of several policies the best one at each place counts.
    assert (best.values, best.ahead) == ({"load one": -100.0, "load 2": 700.0}, 1)
    assert (best.at_least(700), best.at_most(700)) == (1, 2)
    # A place may say with whom we are compared.
    assert each.values == {"`slow`": 800.0, "`other`": 700.0}


def test_a_claim_has_its_command(page: Speeds) -> None:
    said = page.of["best"].command
    assert said.startswith(
        "One point by itself, `speed` 7.5 of `fast` and 0.5 of `other`, 15 times"
    )
    assert '--run=\'{"policy": "other", "load": 2}\'' in said
    assert '"load": 1' in page.of["best"].least_command


def test_charts_have_a_line_a_policy_and_leave_out_what_is_nothing(page: Speeds) -> None:
    def panel(policy: str) -> Any:
        shown = Shown("speed", "tokens/s", factor=2)
        return page._panel("title", "load", page.where["loads"].values(), {policy: "it"}, shown)

    assert panel("fast").lines == {"it": ([1, 2], [4.0, 16.0])}
    for case in page.cases("slow", 1):
        page.results._found[case] = {"speed": 0.0}
    assert panel("slow") is None


def test_numbers_that_a_file_lacks_are_one_line(page: Speeds) -> None:
    page.results._found[Run("fast", 1)] = {"pace": 1.0}
    with pytest.raises(ValueError, match="not the numbers of an earlier run: no 'speed' of Run"):
        _ = page.of["best"].most
