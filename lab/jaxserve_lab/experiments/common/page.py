"""A page of docs/ as a command: words from a template, numbers and figures from runs."""

from __future__ import annotations

import csv
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic

import jinja2

from jaxserve.command_line import Parser, exit_code
from jaxserve.simulator.systems.systems import system
from jaxserve.writable import check_folder
from jaxserve_lab.experiments.common import single
from jaxserve_lab.experiments.common.figures import Panel, bars, chart
from jaxserve_lab.experiments.common.runs import C, N, Results, over

TEMPLATE = "page.md.j2"
BEGIN, END = "<!-- begin: python -m jaxserve_lab.experiments.{} --parts={} -->\n", "<!-- end -->"
Column = tuple[str, str, str, float]  # title, number, format, factor
Rows = Iterable[tuple[Sequence[str], Sequence[C]]]  # first cells, and the cases of the others
NUMBERS = "[{name}.json](figures/{name}.json) has the numbers of every run, under {rules}"


class Page(Generic[C, N]):
    """A page: its public attributes and methods are what its template may use.

    The template lies beside the module of the class. It is rendered with the numbers that there
    are. Those that it asks for and that are missing are run, and it is rendered again, until
    nothing is missing. So a page need not list its runs.

    Args:
        scale: How much is run.
        results: Of the runs.

    Attributes:
        name: Of the page, of its folder in experiments/, and of its numbers in figures/.
        rules: What the page says of the rules of its runs.
        kind: The dataclass of its cases.
        held: Small runs beside those that the page is made of. A test does them again, so that a
            change of the simulator or of a policy, which the page would have to follow, is noticed.
    """

    name: ClassVar[str]
    rules: ClassVar[str] = "the rules `jaxserve`, without prefix caching"
    kind: ClassVar[type[Any]]
    held: ClassVar[Sequence[Any]] = ()

    def __init__(self, scale: Any, results: Results[C, N]) -> None:
        self.scale, self.results = scale, results
        self._drawn: dict[str, Callable[[Path], None]] = {}

    def write(self, out: Path, jobs: int, *, quick: bool = False) -> int:
        """Runs what is missing, writes the page and its figures, and returns the number of figures.
        quick: whether the sizes are toy sizes, which the page then says."""
        numbers = out / "figures" / f"{self.name}.json"
        for case in () if quick else self.held:
            self.results.get(case)
        text = self._rendered(quick)
        while text is None:
            self.results.run_missing(jobs, numbers)
            text = self._rendered(quick)
        self.results.write(numbers)
        for file, draw in self._drawn.items():
            draw(out / "figures" / file)
        (out / f"{self.name}.md").write_text(text, encoding="utf-8")
        return len(self._drawn)

    def _rendered(self, quick: bool) -> str | None:
        """The page; None while numbers are missing."""
        for case in self.kept():
            self.results.get(case)
        try:
            text = self.rendered(quick)
        except Exception:
            if self.results.complete:
                raise
            return None
        return text if self.results.complete else None

    def kept(self) -> Iterable[C]:
        """Runs whose numbers are kept in the page's file though its text does not have them."""
        return ()

    def rendered(self, quick: bool = False) -> str:
        """The page in Markdown, with the numbers so far."""
        return rendered(
            Path(str(sys.modules[type(self).__module__].__file__)).parent,
            **{name: getattr(self, name) for name in dir(self) if not name.startswith("_")},
            quick=quick,
            numbers=NUMBERS.format(name=self.name, rules=self.rules),
        )

    def chart(
        self,
        file: str,
        caption: str,
        panels: Sequence[Sequence[Panel | None]],
        x_label: str,
        **how: Any,
    ) -> str:
        """A figure for the page, drawn once all numbers are there.

        Args:
            file: Its name in figures/.
            caption: Its text on the page.
            panels, x_label, **how: As `figures.chart` has them.

        Returns:
            The page's line of Markdown.
        """
        return self.figure(file, caption, lambda path: chart(path, panels, x_label, **how))

    def bars(self, file: str, caption: str, values: dict[str, float], *how: str) -> str:
        """Like `chart`, with `figures.bars`."""
        return self.figure(file, caption, lambda path: bars(path, values, *how))

    def figure(self, file: str, caption: str, draw: Callable[[Path], None]) -> str:
        """Like `chart`, with `draw`, which gets the path."""
        self._drawn[file] = draw
        return f"![{caption}.](figures/{file})"

    def data(self, file: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        """A link to a table in figures/, as CSV, that the page itself has no room for."""

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as out:
                csv.writer(out, lineterminator="\n").writerows([header, *rows])

        self._drawn[file] = write
        return f"[{file}](figures/{file})"

    def by_itself(self, number: str, *cases: C) -> str:
        """A point of the page: what a number of one or two runs comes to, and the command for it.
        number: a field of the numbers."""
        found = [getattr(self.results[case], number) for case in cases]
        said = " and ".join(
            f"{single.shown(value)} of `{single.label(case)}`"
            for case, value in zip(cases, found, strict=True)
        )
        if len(found) == 2 and found[1]:
            said += f", {single.shown(found[0] / found[1])} times as much"
        return f"One point by itself, `{number}` {said}:\n\n{single.command(self.name, cases)}"

    def mean(self, number: str, cases: Sequence[C]) -> float:
        """Mean of a number over cases that differ by their seeds."""
        return over(self.results, cases, number).mean

    def lines(self, names: Sequence[str], rows: Rows[C], columns: Sequence[Column]) -> str:
        """A table of means over seeds. names: titles of the first columns."""
        header = [*names, *(title for title, *_ in columns)]
        return table(header, [[*first, *self.cells(cases, columns)] for first, cases in rows])

    def cells(self, cases: Sequence[C], columns: Sequence[Column]) -> list[str]:
        """Cells of one line of such a table: means with half of their intervals."""
        return [over(self.results, cases, n).text(form, by) for _, n, form, by in columns]


def rendered(folder: Path, **known: Any) -> str:
    """Renders the template of that folder, or the common one, with these names known to it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template(TEMPLATE)
    return template.render(known, fmean=fmean, listed=listed).rstrip() + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


SYSTEM = ("system", "tokens of K and V", "weights, ms per step", "K and V of a token, us")


def system_cells(name: str) -> list[str]:
    """The columns of SYSTEM for the system of that name."""
    place = system(name)
    layers, prices = place.cost_model.num_layers, place.cost_model.coefficients
    weights, token = 1e3 * layers * prices.token_bias, 1e6 * layers * prices.decode_kv
    return [f"`{name}`", f"{place.kv_tokens:,}", f"{weights:.1f}", f"{token:.2f}"]


def ends(values: Mapping[str, float]) -> list[str]:
    """Names of the smallest and the largest value; the first of equals."""
    return [pick(values, key=values.__getitem__) for pick in (min, max)]


def span(values: Collection[float], form: str) -> str:
    """The smallest and the largest value, each formatted: `1.00x to 2.50x`."""
    return " to ".join(form.format(pick(values)) for pick in (min, max))


@dataclass(frozen=True)
class Extreme:
    """The largest of some values, and where it was."""

    value: float
    where: str

    @classmethod
    def of_values(cls, values: dict[str, float]) -> Extreme:
        """The largest value by place, the first of equals. ValueError if there are none."""
        where = ends(values)[1]
        return cls(values[where], where)

    def times(self) -> str:
        """A value that is a factor: `1.91x (I = 24)`; three digits, or whole from 1,000 on."""
        value = f"{self.value:.3g}" if self.value < 1000 else f"{self.value:,.0f}"
        return f"{value}x ({self.where})"

    def percent(self) -> str:
        """A value that is a factor, as what it adds: `+13.5% (I = 128)`."""
        return f"{self.value - 1:+.1%} ({self.where})"


def percent(share: float) -> str:
    """A share in percent with one decimal, without the sign."""
    return f"{100 * share:.1f}"


def listed(values: Sequence[int | str]) -> str:
    """As in a sentence: `1, 32 and 1024`; nothing of none."""
    *first, last = map(str, values or [""])
    return f"{', '.join(first)} and {last}" if first else last


USAGE = """
    python -m jaxserve_lab.experiments.{name}
    python -m jaxserve_lab.experiments.{name} --numbers=docs/figures/{name}.json
    python -m jaxserve_lab.experiments.{name} --quick --out=/some/folder

Every number and figure on the page comes from the runs of this command, on all cores. --numbers
takes what an earlier run has simulated and measured from there and runs only what is missing: after
a change of a text, say, or when a run was interrupted. --quick runs toy sizes that say nothing
about the claims.
"""
AGAIN = """
    python -m jaxserve_lab.experiments.{name} --run='{{"policy": ...}}' --run='{{"policy": ...}}'

--run makes no page: it runs a case again, as a line of the numbers has it, and prints what it comes
to; several beside each other.
"""


def flags(name: str, description: str | None, *, kind: bool = True) -> Parser:
    """The parser with the flags that every page has.

    Args:
        name: Of the page.
        description: The docstring of the page's module, printed before USAGE.
        kind: Whether the page has a `kind` of cases, and so --run.
    """
    usage = USAGE + AGAIN if kind else USAGE
    about = f"{description}\n{usage.format(name=name)}"
    parser = Parser(prog=f"python -m jaxserve_lab.experiments.{name}", description=about)
    add = parser.add_argument
    add("--out", default="docs", help="folder of the page; figures go into figures/ (docs)")
    add("--numbers", metavar="PATH", default="", help=f"{name}.json of an earlier run")
    add("--quick", action="store_true", help="toy sizes, for the test")
    if kind:
        add("--run", action="append", metavar="CASE", help="run a line's `case` again, JSON")
    else:
        parser.set_defaults(run=None)
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    return parser


def write_page(
    parser: Parser,
    argv: Sequence[str] | None,
    make: Callable[[Namespace, Path | None], Page[Any, Any]],
) -> int:
    """Runs a page's command.

    Args:
        parser: Knows the page's flags.
        argv: Arguments without the program's name.
        make: Makes the page from the arguments and the file of --numbers, if given.

    Returns:
        Exit status: 0 if the page is written, 1 or 2 after a line on stderr,
        130 if interrupted.

    Raises:
        SystemExit: A flag is wrong.
    """
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    out = Path(args.out)
    try:
        if args.run:
            print(_again(args.run, make(args, None)))
            return 0
        check_folder("out", out)
        page = make(args, Path(args.numbers) if args.numbers else None)
        count = page.write(out, args.jobs, quick=args.quick)
    except (ValueError, OSError) as error:
        print(f"{parser.prog.removeprefix('python -m ')}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    print(f"wrote {out / page.name}.md, its numbers and {count} figures")
    return 0


def _again(cases: Sequence[str], page: Page[Any, Any]) -> str:
    """What these cases come to. ValueError for one that is none of the page."""
    read = [single.read_case(page.kind, text) for text in cases]
    return single.table(read, [page.results.run(case) for case in read])


def write_part(page: Path, experiment: str, name: str, part: str) -> None:
    """Puts a part between its markers in a page that is otherwise written by hand.

    Args:
        page: The file.
        experiment: Name of the folder of the command that makes the part.
        name: Of the part, which that command calls it by.
        part: Its Markdown.

    Raises:
        ValueError: The page has no such markers.
    """
    text, mark = page.read_text(encoding="utf-8"), BEGIN.format(experiment, name)
    before, begin, rest = text.partition(mark)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the line {mark.strip()} or its {END}")
    page.write_text(f"{before}{begin}{part.rstrip()}\n{end}{after}", encoding="utf-8")
