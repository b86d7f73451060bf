"""A page's numbers, each by a command: --run, and the points that the pages of papers show."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from jaxserve.commands import cli
from jaxserve_lab.experiments.accelgen.claims import AccelGen
from jaxserve_lab.experiments.aptserve.claims import AptServe
from jaxserve_lab.experiments.bros.claims import Bros
from jaxserve_lab.experiments.claims.single import read_case, shown
from jaxserve_lab.experiments.infermax.claims import InferMax

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.name: page for page in (AptServe, Bros, AccelGen, InferMax)}
POINT = re.compile(
    r"^One point by itself,.*? `(\w+)` ([^\n]*):\n\n((?:    [^\n]*\n)+)", re.MULTILINE
)
POINTS = [
    pytest.param(name, *found, id=f"{name}-{number}")
    for name in PAGES
    for number, found in enumerate(POINT.findall((DOCS / f"{name}.md").read_text()))
]
NEEDS = "AzureLLMInferenceTrace_conv.csv"  # whose trace is no part of this repository


def kept(name: str) -> dict[Any, Any]:
    """The numbers of a page, by their cases."""
    lines = json.loads((DOCS / "figures" / f"{name}.json").read_text())
    kind = PAGES[name].kind
    return {read_case(kind, json.dumps(one["case"])): one["numbers"] for one in lines}


def given(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))


def said(text: str) -> list[float]:
    """The numbers of a sentence or of a line of the table."""
    return [float(one) for one in re.findall(r"(?<![\w:=.])[\d.]+(?=\s|$)", text)]


def test_every_headline_has_a_point() -> None:
    """But the sections that say how a page was made."""
    for name in PAGES:
        sections = re.split(r"^## ", (DOCS / f"{name}.md").read_text(), flags=re.MULTILINE)[1:]
        for section in sections:
            made = re.match(r"(?:\d\. )?(?:How it is run|All numbers)", section)
            assert made or POINT.search(section), f"{name}: {section.splitlines()[0]}"


@pytest.mark.parametrize(("name", "number", "text", "command"), POINTS)
def test_points_are_those_of_the_page(name: str, number: str, text: str, command: str) -> None:
    if "experiments" not in command:
        return  # the optimum, which is not among the page's numbers
    numbers, kind = kept(name), PAGES[name].kind
    cases = [one.removeprefix("--run=") for one in given(command)[3:]]
    values = [numbers[read_case(kind, case)][number] for case in cases]
    assert said(text)[: len(values)] == [float(shown(value)) for value in values]


@pytest.mark.parametrize("name", ["infermax", "accelgen"])
def test_a_run_alone_prints_the_numbers_of_the_page(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES[name]
    cases = page.held[:2]
    argv = [f"--run={json.dumps(case.named())}" for case in cases]
    assert page.main(argv) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == [case.policy for case in cases]
    printed = {line.split()[0]: line.split()[1:] for line in lines}
    numbers = kept(name)
    for number, value in numbers[cases[0]].items():
        if not isinstance(value, list):
            values = [numbers[case][number] for case in cases]
            found = [float(one) for one in printed[number][:2]]
            assert found == pytest.approx(values, rel=1e-3), number


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *zip(
            PAGES,
            ["{", "[1]", '{"policy": "vllm"}', '{"policy": "vllm", "colour": 1}'],
            strict=True,
        ),
        ("aptserve", '{"policy": "vllm", "colour": 1}'),
    ],
)
def test_what_is_no_case_is_refused(
    name: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PAGES[name].main([f"--run={wrong}"]) == 2
    assert "--run: not the case of a run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number", "text", "command"), POINTS)
def test_commands_print_what_the_page_says(
    name: str, number: str, text: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if NEEDS in command:
        pytest.skip(f"needs {NEEDS}")
    if "experiments" not in command:
        assert cli.main(given(command)[1:]) == 0
        assert f"{number} {text.partition(' ms')[0]}" in capsys.readouterr().out
        return
    assert PAGES[name].main(given(command)[3:]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (one for one in lines if one.startswith(f"{number} "))
    assert said(line) == pytest.approx(said(text), rel=1e-3)
