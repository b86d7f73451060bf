"""The laboratory's notebook runs from top to bottom, and shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks.books import run

NOTEBOOK = "scheduling_lab"
PICTURES = 5
SHARES = "{name: result.summary()['slo_attainment'] for name, result in results.items()}"
CLAIMS = {
    "its share in the column SLO, of requests that met their targets, is the highest.": (
        f"max({SHARES}, key={SHARES}.get) == 'goodput'"
    ),
    # The solver may be out of time on a busy machine, but is never worse than where it started.
    "Preempting can pay": "min(played.latency for played in schedules.values()) == "
    "schedules[best.status].latency < schedules['vllm+ef'].latency",
}


@pytest.mark.slow
def test_it_runs_and_shows_what_it_says(elsewhere: Path) -> None:
    text, pictures = run(NOTEBOOK, elsewhere, CLAIMS)
    for policy in ("vllm", "sarathi", "edf", "goodput", "mine"):
        assert f"\n{policy} " in text
    assert pictures == PICTURES
