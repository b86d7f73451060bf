"""The runs that a page is made of: each once, on all cores, and kept as JSON as they come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tqdm import tqdm

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Policy, View
from jaxserve.simulator.dispatch import COMPILING
from jaxserve.simulator.simulate.spread import half_width, mean
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


class Case:
    """Base of the dataclasses of cases."""

    def named(self) -> dict[str, Any]:
        """Its fields, without those that have their default."""
        usual = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        values = asdict(self)  # type: ignore[call-overload]
        named = {name: value for name, value in values.items() if value != usual[name]}
        return named | ({"switches": dict(named["switches"])} if "switches" in named else {})


class Results(Generic[C, N]):
    """What runs came to, and which of those that were asked for are yet to be done.

    Args:
        run: does one, in any process.
        kind: the dataclass of a case's numbers.
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
        rows = [{"case": c.named(), "numbers": asdict(n)} for c, n in self._found.items()]  # type: ignore[call-overload]
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


def _unknown(kind: Callable[..., N]) -> N:
    numbers = [f for f in fields(kind) if f.default is MISSING]  # type: ignore[arg-type]
    return kind(**{f.name: float("nan") for f in numbers})


class Number(NamedTuple):
    """A mean over seeds, and half of its 95% interval; None for one seed."""

    mean: float
    half: float | None

    def text(self, form: str, factor: float = 1.0) -> str:
        """For a table: `0.12 ±0.01`."""
        half = "" if self.half is None else f" ±{format(factor * self.half, form)}"
        return format(factor * self.mean, form) + half


def over(results: Mapping[C, Any] | Results[C, Any], cases: Sequence[C], name: str) -> Number:
    """A number's mean over cases that differ by their seeds; nan if there are none."""
    values = [float(getattr(results[case], name)) for case in cases] or [float("nan")]
    return Number(mean(values), half_width(values))


class Timed(Policy):
    """A policy whose plans are timed: CPU seconds of each."""

    def __init__(self, policy: Policy) -> None:
        self.seconds: list[float] = []
        self._policy = policy
        for name, value in vars(Policy).items():
            if isinstance(value, bool):  # what it says of itself
                setattr(self, name, getattr(policy, name))

    def plan(self, view: View, now: float) -> BatchPlan:
        """The policy's plan."""
        begin = time.thread_time()
        plan = self._policy.plan(view, now)
        self.seconds.append(time.thread_time() - begin)
        return plan


def digits(value: float, count: int = 5) -> float:
    """Rounds to `count` significant digits."""
    return float(f"{float(value):.{count}g}")


def shortened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds the values with `digits`, all but integers."""
    return {name: v if isinstance(v, int) else digits(v) for name, v in values.items()}


def say_compiling() -> None:
    """Prints a line on stderr, beside the progress bar."""
    tqdm.write(COMPILING, file=sys.stderr)
