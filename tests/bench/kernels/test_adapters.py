"""What adapters cost a step, of a toy: whether it is measured, not how long it takes."""

from __future__ import annotations

import json

import pytest

from jaxserve.bench import cli

TOY = ("--model=tiny", "--rows=4", "--context=16", "--adapters=3", "--repeats=1")


@pytest.mark.slow
def test_a_toy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["adapters", *TOY, "--rank=9", "--max_rank=64", "--loras=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (base,), (adapted,) = found["results"]["base_s"], found["results"]["adapted_s"]
    assert found["results"]["ratio"] == adapted / base > 0
    assert found["workload"]["loras"] == 8


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model=opt-14b", "'opt-14b' is not known"),
        ("--adapters=9", "may not be more than --loras"),
        ("--rank=65", "may not be more than"),
        ("--rows=1", "--rows must be at least 2, got 1"),
    ],
)
def test_a_wrong_flag_is_explained(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["adapters", "--loras=8", "--max_rank=64", flag]) == 2
    assert said in capsys.readouterr().err
