"""Single runs of a page: a line of its numbers is simulated again by the flag --run."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from jaxserve.simulator.group_table import aligned
from jaxserve_lab.experiments.claims.cases import Numbers

C = TypeVar("C")


def read_case(kind: type[C], text: str) -> C:
    """The case whose `named` is given as JSON. kind: its dataclass. ValueError if it is none."""
    try:
        named = dict(json.loads(text))
        if "switches" in named:
            named["switches"] = tuple(named["switches"].items())
        if named.get("rate") == "inf":  # JSON has no other
            named["rate"] = math.inf
        return kind(**named)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--run: not the case of a run ({error}): {text:.80}") from error


def command(name: str, cases: Sequence[Any]) -> str:
    """The command that runs the cases of a page, a block of Markdown. name: of the page."""
    lines = [f"python -m jaxserve_lab.experiments.{name}"]
    lines += [f"    --run={shlex.quote(json.dumps(_unusual(case)))}" for case in cases]
    return "\n".join(f"    {line}" for line in " \\\n".join(lines).split("\n"))


def _unusual(case: Any) -> dict[str, Any]:
    """As `named`, without what is as usual."""
    usual = {field.name: field.default for field in fields(case)}
    return {
        name: value for name, value in case.named().items() if getattr(case, name) != usual[name]
    }


def table(cases: Sequence[Any], numbers: Sequence[Numbers]) -> str:
    """A line per number, a column per run, and of two the first over the second. No lists."""
    pair = len(numbers) == 2
    head = ["", *map(label, cases), *(["first over second"] if pair else [])]
    rows = []
    for name, value in numbers[0].items():
        if isinstance(value, tuple):
            continue
        values = [each[name] for each in numbers]
        cells = [shown(each) for each in values]
        if pair:
            cells.append(shown(values[0] / values[1]) if values[1] else "-")
        rows.append([name, *cells])
    return aligned([head, *rows])


def label(case: Any) -> str:
    """The policy, with the parameters that the case sets."""
    values = dict(getattr(case, "switches", ())).items()
    return case.policy + "".join(f":{name}={str(value).lower()}" for name, value in values)


def shown(value: float) -> str:
    """Four digits; integers whole."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"
