"""A page on a paper: its claims, and what its template may say of runs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from jaxserve.command_line import Parser
from jaxserve.simulator.simulate.spread import half_width, mean
from jaxserve.simulator.systems.systems import system
from jaxserve_lab.experiments.claims import single
from jaxserve_lab.experiments.claims.cases import Numbers
from jaxserve_lab.experiments.claims.claim import Claim, Places, Point, titled
from jaxserve_lab.experiments.common.figures import Panel
from jaxserve_lab.experiments.common.page import Page, flags, write_page
from jaxserve_lab.experiments.common.runs import Results

AGAIN = """
    python -m jaxserve_lab.experiments.{0} --run='{{"policy": ...}}' --run='{{"policy": ...}}'

--run makes no page: it runs a case again, as a line of the numbers has it, and prints what it comes
to; several beside each other.
"""
SYSTEM = ("system", "tokens of K and V", "weights, ms per step", "K and V of a token, us")


class Shown(NamedTuple):
    """A number in charts.

    Attributes:
        number: Its name.
        label: What it is called there.
        factor: On what is shown.
        log_y: Whether the axis is logarithmic.
    """

    number: str
    label: str
    factor: float = 1.0
    log_y: bool = False


class Held:
    """A claim held against a page's runs."""

    def __init__(self, page: ClaimsPage, claim: Claim) -> None:
        self.paper, self._page, self._claim = claim.paper, page, claim
        self._text = claim.form.text

    @property
    def places(self) -> Places:
        """Where the policies are compared."""
        return self._page.where[self._claim.where]

    @property
    def pairs(self) -> dict[str, tuple[float, float]]:
        """Both numbers, ours first, by place."""
        claim, value = self._claim, self._page.value
        return {
            label: tuple(
                value(claim.number, policy, point) for policy in (claim.ours, self._rival(point))
            )
            for label, point in self.places.items()
        }

    def _rival(self, point: Point) -> str:
        theirs = point.get("theirs", self._claim.theirs)
        if isinstance(theirs, str):
            return theirs
        return max(theirs, key=lambda policy: self._page.value(self._claim.number, policy, point))

    @property
    def values(self) -> dict[str, float]:
        """The comparison by place; nothing where it would be a ratio to 0."""
        found = {}
        for label, both in self.pairs.items():
            with suppress(ZeroDivisionError):
                found[label] = self._claim.form.how(*both)
        return found

    def at(self, pick: Callable[..., str]) -> Point:
        """The point of the largest value, or of the smallest. pick: max or min."""
        return self.places[self._at(pick)]

    def _at(self, pick: Callable[..., str]) -> str:
        values = self.values
        return pick(values, key=lambda label: self._claim.form.size(values[label]))

    def _said(self, label: str) -> str:
        return f"{self._text(self.values[label])} ({label})"

    @property
    def most(self) -> str:
        """The largest value, and where: `1.91x (I = 24)`; of equals the first."""
        return self._said(self._at(max))

    @property
    def least(self) -> str:
        """The same of the smallest."""
        return self._said(self._at(min))

    @property
    def ends(self) -> str:
        """Both."""
        return f"{self.least} to {self.most}"

    @property
    def span(self) -> str:
        """Both, without places."""
        return " to ".join(self._text(pick(self.values.values())) for pick in (min, max))

    @property
    def mean(self) -> str:
        """Mean over the places."""
        return self._text(self._claim.form.mean(list(self.values.values()) or [0.0]))

    @property
    def each(self) -> str:
        """All values, with their places."""
        return ", ".join(map(self._said, self.values))

    @property
    def ahead(self) -> int:
        """Number of places where we have more."""
        return sum(ours > theirs for ours, theirs in self.pairs.values())

    def at_least(self, value: float) -> int:
        """Number of places where the comparison is at least that."""
        return sum(found >= value for found in self.values.values())

    def at_most(self, value: float) -> int:
        """Number of places where the comparison is at most that."""
        return sum(found <= value for found in self.values.values())

    @property
    def shares(self) -> str:
        """Means of both, as shares: `1.02x (88.6% for 86.9%)`."""
        return _shares(*map(fmean, zip(*self.pairs.values(), strict=True)))

    def shares_at(self, place: str) -> str:
        """The same of one place."""
        return _shares(*self.pairs[place])

    @property
    def command(self) -> str:
        """The command that gives the largest value."""
        return self._command(max)

    @property
    def least_command(self) -> str:
        """The command that gives the smallest value."""
        return self._command(min)

    def _command(self, pick: Callable[..., str]) -> str:
        point = self.at(pick)
        both = (
            self._page.cases_at(policy, point)[0]
            for policy in (self._claim.ours, self._rival(point))
        )
        return self._page.by_itself(self._claim.number, *both)


def _shares(ours: float, theirs: float) -> str:
    times = f"{ours / theirs:.2f}x" if theirs else "more"
    return f"{times} ({ours:.1%} for {theirs:.1%})"


class ClaimsPage(Page[Any, Numbers]):
    """A page whose template has `of`: its claims, held against its runs, by their names.

    Attributes:
        kind: The dataclass of its cases.
        run: Runs one.
        sizes: How much is run, and of toy sizes.
        claims: The table.
        called: What values of points are called in titles.
        also: Names of places, and policies that run there though the text says nothing of it.
        args: Of the command.
    """

    kind: ClassVar[type[Any]]
    run: ClassVar[Callable[[Any], Numbers]]
    sizes: ClassVar[tuple[type[Any], type[Any]]]
    claims: ClassVar[Sequence[Claim]]
    called: ClassVar[Mapping[Any, str]] = {}
    also: ClassVar[Mapping[str, Sequence[str]]] = {}
    cases: Callable[..., list[Any]]
    """The cases, one a seed, of a policy at a point."""

    def __init__(self, scale: Any, results: Results[Any, Numbers], args: Namespace | None = None):
        super().__init__(scale, results)
        self.args = args or Namespace()
        self.of = {claim.name: Held(self, claim) for claim in self.claims}

    @cached_property
    def where(self) -> Mapping[str, Places]:
        """The places of the claims, by name."""
        raise NotImplementedError

    def kept(self) -> Iterator[Any]:
        """Runs of policies at places whose numbers the page's file has, and its text has not."""
        for name, policies in self.also.items():
            for policy, at in product(policies, self.where[name].values()):
                yield from self.cases_at(policy, at)

    def cases_at(self, policy: str, point: Point) -> list[Any]:
        """The cases of the policy at a point of the page's places."""
        return self.cases(policy, **{name: v for name, v in point.items() if name != "theirs"})

    def value(self, number: str, policy: str, point: Point) -> Any:
        """The policy's number at the point: the mean over seeds; nan while there is none."""
        values = [self.number(number, case) for case in self.cases_at(policy, point)]
        return float(mean(values or [float("nan")]))

    def number(self, number: str, case: Any) -> Any:
        """A number of a run. ValueError if those of an earlier run lack it."""
        found = self.results[case]
        try:
            return found[number]
        except KeyError as error:
            raise ValueError(f"not the numbers of an earlier run: no {error} of {case}") from error

    def values(self, number: str, where: str, *policies: str) -> list[Any]:
        """The policies' numbers at all of the page's places of that name."""
        every = product(policies, self.where[where].values())
        return [self.value(number, policy, at) for policy, at in every]

    def cells(self, cases: Sequence[Any], shown: Iterable[tuple[str, str, float]]) -> list[str]:
        """Cells of a table: means over cases that differ by their seeds, with half of their 95%
        intervals. shown: number, format and factor."""
        cells = []
        for number, form, factor in shown:
            values = [self.number(number, case) for case in cases]
            half = half_width(values)
            cell = format(factor * mean(values), form)
            cells.append(cell if half is None else f"{cell} ±{format(factor * half, form)}")
        return cells

    def charts(
        self,
        file: str,
        caption: str,
        x: tuple[str, str],
        policies: Iterable[str] | Mapping[str, str],
        where: Sequence[str],
        title: str,
        numbers: Sequence[Shown],
        **how: Any,
    ) -> str:
        """A figure with a row for each kind of places and number, a column for each title.

        Args:
            file, caption: As `Page.chart` has them.
            x: Part of the places' points, and what it is called.
            policies: With a line each; with what the lines are called.
            where: Names of places.
            title: A format of a point; "" for one row, with a column for each number.
            numbers: What is shown. A number that is 0 everywhere has no chart.
            **how: Further arguments of `figures.chart`.
        """
        rows = []
        for name, shown in product(where, numbers):
            charts: dict[str, list[Point]] = {}
            for at in self.where[name].values():
                charts.setdefault(titled(title, at, self.called), []).append(at)
            rows.append(
                [
                    self._panel(called or shown.label, x[0], points, policies, shown)
                    for called, points in charts.items()
                ]
            )
        rows = rows if title else [[panel for row in rows for panel in row]]
        return self.chart(file, caption, rows, x[1], **how)

    def _panel(self, title: str, x: str, points: Any, policies: Any, shown: Shown) -> Panel | None:
        named = policies if isinstance(policies, Mapping) else {name: name for name in policies}
        xs = [at[x] for at in points]
        lines = {
            called: (xs, [shown.factor * self.value(shown.number, policy, at) for at in points])
            for policy, called in named.items()
        }
        if not any(any(y) for _, y in lines.values()):
            return None
        return Panel(title, shown.label, lines, log_y=shown.log_y)

    def by_itself(self, number: str, *cases: Any) -> str:
        """A point of the page: what a number of one or two runs comes to, and the command for
        it."""
        found = [self.number(number, case) for case in cases]
        said = " and ".join(
            f"{single.shown(value)} of `{single.label(case)}`"
            for case, value in zip(cases, found, strict=True)
        )
        if len(found) == 2 and found[1]:
            said += f", {single.shown(found[0] / found[1])} times as much"
        return f"One point by itself, `{number}` {said}:\n\n{single.command(self.name, cases)}"

    # The command.

    @classmethod
    def main(cls, argv: Sequence[str] | None = None) -> int:
        """Runs the page's command, as `write_page`."""
        parser = flags(cls.name, sys.modules[cls.__module__].__doc__, AGAIN.format(cls.name))
        add = parser.add_argument
        add("--run", action="append", metavar="CASE", help="run a line's `case` again, JSON")
        cls.add_flags(parser)
        return write_page(parser, argv, cls.made)

    @classmethod
    def add_flags(cls, parser: Parser) -> None:
        """Adds the page's own flags."""

    @classmethod
    def made(cls, args: Namespace, known: Path | None) -> ClaimsPage:
        """The page that the arguments ask for. known: the file of --numbers."""
        results: Results[Any, Numbers] = Results(cls.run, lambda _: dict, known)
        return cls(cls.sizes[args.quick](), results, args)

    def done(self, args: Namespace, out: Path) -> str:
        """As `Page`; with --run, runs those cases only."""
        if not args.run:
            return super().done(args, out)
        cases = [single.read_case(self.kind, text) for text in args.run]
        return single.table(cases, [self.results.run(case) for case in cases])


def system_cells(name: str) -> list[str]:
    """The columns of SYSTEM for the system of that name."""
    place = system(name)
    layers, prices = place.cost_model.num_layers, place.cost_model.coefficients
    weights, token = 1e3 * layers * prices.token_bias, 1e6 * layers * prices.decode_kv
    return [f"`{name}`", f"{place.kv_tokens:,}", f"{weights:.1f}", f"{token:.2f}"]
