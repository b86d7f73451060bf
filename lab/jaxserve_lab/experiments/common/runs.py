"""The runs that a page is made of: each once, on all cores, and kept as JSON as they come."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tqdm import tqdm

from jaxserve.simulator.dispatch import COMPILING
from jaxserve_lab.experiments.common.processes import worked

KEEP = 20.0  # seconds


class AnyCase(Protocol):
    """A run that can be done in another process; hashable."""

    @property
    def cost(self) -> float:
        """A guess of how long it takes, in any unit: the longest start first."""

    def named(self) -> dict[str, Any]:
        """What identifies it in a file, ready for JSON."""


C = TypeVar("C", bound=AnyCase)
N = TypeVar("N")


class Results(Generic[C, N]):
    """What runs came to, and which of those that were asked for are yet to be done.

    Args:
        run: does one, in any process.
        kind: the dataclass of a case's numbers, or dict.
        earlier: the file that `write` made of an earlier run. ValueError if it is something else.
    """

    def __init__(
        self, run: Callable[[C], N], kind: Callable[[C], type[N]], earlier: Path | None = None
    ) -> None:
        self._run, self._kind, self._earlier = run, kind, earlier
        self._known = _read(earlier) if earlier else {}
        self._found: dict[C, N] = {}
        self._missing: set[C] = set()

    def __getitem__(self, case: C) -> N:
        """The numbers of the case; while there are none all of them are nan."""
        found = self.get(case)
        return _unknown(self._kind(case)) if found is None else found

    def get(self, case: C) -> N | None:
        """The numbers of the case; None while there are none."""
        if case not in self._found:
            values = self._known.get(_key(case))
            if values is None:
                self._missing.add(case)
                return None
            try:
                self._found[case] = self._kind(case)(**values)
            except TypeError as error:
                raise _refused(self._earlier, error) from error
        return self._found[case]

    def run(self, case: C) -> N:
        """Runs the case in this process, whether its numbers are known or not."""
        return self._run(case)

    @property
    def complete(self) -> bool:
        """Whether all numbers that were asked for are there."""
        return not self._missing

    def run_missing(self, jobs: int, path: Path) -> None:
        """Runs what is missing, with a progress bar on stderr. All numbers are written to the file
        about every KEEP seconds, so that a run that ends early is not lost."""
        kept = time.monotonic()
        todo = sorted(self._missing, key=lambda case: (-case.cost, str(case)))
        with tqdm(total=len(todo), desc="simulations", unit="run", file=sys.stderr) as bar:
            for case, numbers in worked(todo, jobs, self._run):
                self._found[case] = numbers
                bar.update()
                if time.monotonic() > kept + KEEP:
                    self.write(path)
                    kept = time.monotonic()
        self._missing.clear()
        self.write(path)

    def write(self, path: Path) -> None:
        """The numbers of all cases that were asked for as JSON, one line per run, in a fixed
        order."""
        rows = [{"case": c.named(), "numbers": as_dict(n)} for c, n in self._found.items()]
        lines = sorted(json.dumps(row) for row in rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Numbers by the keys of their cases."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {
            json.dumps(row["case"], sort_keys=True): {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in row["numbers"].items()
            }
            for row in rows
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refused(path, error) from error


def _refused(path: Path | None, error: Exception) -> ValueError:
    return ValueError(f"{path}: not the numbers of an earlier run ({error})")


def _key(case: AnyCase) -> str:
    return json.dumps(case.named(), sort_keys=True)


def as_dict(numbers: Any) -> dict[str, Any]:
    """Numbers by name, of a dataclass or as they are."""
    return numbers if isinstance(numbers, dict) else asdict(numbers)


def _unknown(kind: Callable[..., N]) -> N:
    if kind is dict:
        return defaultdict(lambda: float("nan"))  # type: ignore[return-value]
    numbers = [f for f in fields(kind) if f.default is MISSING]  # type: ignore[arg-type]
    return kind(**{f.name: float("nan") for f in numbers})


def digits(value: float, count: int = 5) -> float:
    """Rounds to `count` significant digits."""
    return float(f"{float(value):.{count}g}")


def say_compiling() -> None:
    """Prints a line on stderr, beside the progress bar."""
    tqdm.write(COMPILING, file=sys.stderr)
