"""What a league has found so far, on disk as it comes: a run that ends early is not lost."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jaxserve_lab.experiments.league.code import code_of
from jaxserve_lab.experiments.league.runs import LeagueCase, LeagueNumbers

_CASE = [field.name for field in fields(LeagueCase)]
_FIELDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(_CASE, str),
    "seed": int,
    "rate": float,
    "count": int,
}
_NUMBERS = [field.name for field in fields(LeagueNumbers)]
_HEADER = [*_CASE, "code", *_NUMBERS]


class Store:
    """What a league has found so far, in two files: a CSV row for each run, and JSON for facts,
    which are found once.

    Args:
        runs: Path of the CSV.
        facts: Path of the JSON.
        any_code: Take numbers of any version of the code, as for a new wording of the page.
            Otherwise numbers of other versions are dropped.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: A file holds something else.
    """

    def __init__(self, runs: Path, facts: Path, *, any_code: bool = False) -> None:
        self._runs, self._facts, self._any = runs, facts, any_code
        self._rows = _read_rows(runs, any_code=any_code)
        self._known = _read_facts(facts)
        if not any_code:
            self._rows = {k: r for k, r in self._rows.items() if r["code"] == _now(r["policy"])}
            known = self._known.items()
            self._known = {k: f for k, f in known if f["code"] == _now(f["policy"])}

    def numbers(self, case: LeagueCase) -> LeagueNumbers | None:
        """The run's numbers; None if it is not known."""
        row = self._rows.get(_key(case))
        if row is None:
            return None
        values: dict[str, Any] = {name: _number(row[name]) for name in _NUMBERS}
        return LeagueNumbers(**values)

    def add(self, case: LeagueCase, numbers: LeagueNumbers) -> None:
        """Appends a run to the file."""
        row = _row(case, numbers)
        new = not self._rows
        self._rows[_key(case)] = row
        with open(self._runs, "w" if new else "a", newline="", encoding="utf-8") as file:
            file.write(_csv([row], header=new))

    def fact(self, *name: str) -> Any:
        """The value stored under that name, ready for JSON; None if there is none."""
        found = self._known.get("/".join(name))
        return None if found is None else found["value"]

    def learn(self, value: Any, *name: str, policy: str = "") -> None:
        """Stores a fact. policy: the policy that it depends on."""
        self._known["/".join(name)] = {"policy": policy, "code": _now(policy), "value": value}
        self._write_facts()

    def merge(self, other: Store) -> None:
        """Takes over what the other store knows and this one does not."""
        self._rows = other._rows | self._rows
        self._known = other._known | self._known

    def cases(self) -> list[LeagueCase]:
        """The known runs that need no trace."""
        return [
            LeagueCase(**{name: _FIELDS[name](row[name]) for name in _CASE})
            for row in self._rows.values()
            if not row["trace"]
        ]

    def restamp(self) -> None:
        """Marks everything as found by the present code."""
        for row in self._rows.values():
            row["code"] = _now(row["policy"])
        for fact in self._known.values():
            fact["code"] = _now(fact["policy"])

    def traces(self) -> dict[str, str]:
        """Names of the traces of known runs, by workload."""
        return {row["workload"]: row["trace"] for row in self._rows.values() if row["trace"]}

    def policies(self) -> set[str]:
        """Names of the policies of known runs."""
        return {row["policy"] for row in self._rows.values()}

    def begin(self) -> None:
        """Rewrites the files without truncated rows and rows of other code."""
        self._runs.parent.mkdir(parents=True, exist_ok=True)
        _replace(self._runs, _csv(self._rows.values()))
        self._write_facts()

    def end(self, cases: Iterable[LeagueCase]) -> None:
        """Writes the runs in the league's order, so that the same numbers give the same file."""
        _replace(self._runs, _csv([self._rows[_key(case)] for case in cases]))
        self._write_facts()

    def _write_facts(self) -> None:
        lines = [f"{json.dumps(name)}: {json.dumps(f)}" for name, f in sorted(self._known.items())]
        _replace(self._facts, "{\n" + ",\n".join(lines) + "\n}\n")


def _now(policy: str) -> str:
    """Version of the present code; "" for an unknown policy."""
    try:
        return code_of(policy)
    except (ValueError, OSError):
        return ""


def _row(case: LeagueCase, numbers: LeagueNumbers) -> dict[str, str]:
    values = case.named() | {"code": code_of(case.policy)} | asdict(numbers)
    return {name: "" if value is None else _text(value) for name, value in values.items()}


def _key(case: LeagueCase) -> tuple[str, ...]:
    named = case.named()
    return tuple(_text(named[name]) for name in _CASE)


def _text(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _csv(rows: Collection[dict[str, str]], *, header: bool = True) -> str:
    """Nothing of no rows."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _HEADER, lineterminator="\n")
    if rows and header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _read_rows(path: Path, *, any_code: bool) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows by their cases. A truncated last line does not count, nor does a file of other
    columns, which a league of other rules wrote, unless any code will do: then it is an error."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
    header = lines[0] if lines else _HEADER
    known = {*_CASE, "code"} <= set(header)
    if known and set(header) != set(_HEADER) and not any_code:
        return {}
    if set(header) != set(_HEADER):
        raise ValueError(f"{path}: not the runs of {'this' if known else 'a'} league")
    rows = {}
    for line in lines[1:]:
        if len(line) != len(header):
            raise ValueError(f"{path}: {len(header)} columns expected, got {len(line)}")
        row = dict(zip(header, line, strict=True))
        rows[tuple(row[name] for name in _CASE)] = row
    return rows


def _read_facts(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all({"policy", "code", "value"} <= fact.keys() for fact in found.values()):
            raise ValueError("a fact has no value")
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the facts of a league ({error})") from error
    return dict(found)


def _replace(path: Path, text: str) -> None:
    """Replaces the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
