"""The runs of the pages, shortened: compiled and in Python they come to the same, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest

from jaxserve.sched.registry import make_policy
from jaxserve.simulator import dispatch
from jaxserve_lab.experiments.aptserve import case as online
from jaxserve_lab.experiments.infermax import case as grid
from tests.simulator.compiled.test_compiled import assert_same

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
PROMPT, OUTPUT, COUNT = 300, 40, 14  # at most, of a shortened run
AZURE = "sharegpt"  # instead of a trace that is not here

C = TypeVar("C", grid.InferMaxCase, online.OnlineCase)


def cases(page: str, kind: type[C]) -> list[C]:
    """Those of its runs whose policies are compiled."""
    rows = [row["case"] for row in json.loads((FIGURES / page).read_text())]
    switched = [row | {"switches": tuple(row.get("switches", {}).items())} for row in rows]
    return [kind(**row) for row in switched if is_compiled(row["policy"])]


def is_compiled(policy: str) -> bool:
    return dispatch.has_form(make_policy(policy))


def one_each(found: Iterable[C], setting: Any, most: int) -> list[Any]:
    """Of every setting, up to `most` different cases."""
    groups: dict[Hashable, list[C]] = {}
    for case in found:
        group = groups.setdefault(setting(case), [])
        if case not in group:
            group.append(case)
    return [
        pytest.param(case, id="-".join(map(str, setting(case))))
        for group in groups.values()
        for case in group[:: -(-len(group) // most)]
    ]


def shortened(case: grid.InferMaxCase) -> grid.InferMaxCase:
    """Fewer, shorter requests, that still compete for memory where those of the page do."""
    if case.workload.endswith(".csv"):
        # More than `infermax` has to see before it expects anything.
        return replace(case, workload=AZURE, num_requests=60, kv_tokens=5000)
    if not case.workload.startswith("fixed:"):
        return replace(case, num_requests=8, kv_tokens=2500)
    asked = tuple(map(int, case.workload[6:].split("x")))
    prompt, output, count = map(min, asked, (PROMPT, OUTPUT, COUNT))
    memory = case.kv_tokens * count * (prompt + output) // (asked[2] * (asked[0] + asked[1]))
    memory = max(memory, 4 * prompt + 2 * output)
    return replace(case, workload=f"fixed:{prompt}x{output}x{count}", kv_tokens=memory)


OFFLINE = one_each(
    map(shortened, cases("infermax.json", grid.InferMaxCase)),
    lambda case: (case.policy, case.system, *dict(case.switches).values()),
    most=4,
)
ONLINE = one_each(
    cases("aptserve.json", online.OnlineCase),
    lambda case: (case.policy, case.system, case.longest, case.workload),
    most=1,
)


def assert_the_same(page: ModuleType, case: Any) -> None:
    quick, slow = (page.simulated(case, compiled=compiled) for compiled in (True, False))
    assert_same(quick, slow)


@pytest.mark.promise(24)
@pytest.mark.parametrize("case", OFFLINE)
def test_runs_of_the_infermax_page(case: grid.InferMaxCase) -> None:
    assert_the_same(grid, case)


@pytest.mark.promise(24)
@pytest.mark.parametrize("case", ONLINE)
def test_runs_of_the_aptserve_page(case: online.OnlineCase) -> None:
    # Nearly at once, so that they compete.
    assert_the_same(online, replace(case, requests=20, rate=10 * case.rate))


def test_the_pages_have_such_runs() -> None:
    assert len(OFFLINE) > 50 and len(ONLINE) > 20
