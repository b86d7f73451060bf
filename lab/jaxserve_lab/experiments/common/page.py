"""A page of docs/ as a command: words from a template, numbers and figures from runs."""

from __future__ import annotations

import csv
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic

import jinja2

from jaxserve.command_line import Parser, exit_code
from jaxserve.writable import check_folder
from jaxserve_lab.experiments.common.figures import Panel, bars, chart
from jaxserve_lab.experiments.common.runs import C, N, Results

TEMPLATE = "page.md.j2"
PART = "python -m jaxserve_lab.experiments.{} --parts={}"
BEGIN, END = f"<!-- begin: {PART} -->\n", "<!-- end -->"
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
        held: Small runs beside those that the page is made of. A test does them again, so that a
            change of the simulator or of a policy, which the page would have to follow, is noticed.
    """

    name: ClassVar[str]
    rules: ClassVar[str] = "the rules `jaxserve`, without prefix caching"
    held: ClassVar[Sequence[Any]] = ()

    def __init__(self, scale: Any, results: Results[C, N]) -> None:
        self.scale, self.results = scale, results
        self._drawn: dict[str, Callable[[Path], None]] = {}

    def done(self, args: Namespace, out: Path) -> str:
        """Does what the command asks for, and returns what it says of it."""
        count = self.write(out, args.jobs, quick=args.quick)
        return f"wrote {out / self.name}.md, its numbers and {count} figures"

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


def flags(name: str, description: str | None, more: str = "") -> Parser:
    """The parser with the flags that every page has. description: the docstring of the page's
    module, printed before USAGE. more: printed after it."""
    about = f"{description}\n{USAGE.format(name=name)}{more}"
    parser = Parser(prog=f"python -m jaxserve_lab.experiments.{name}", description=about)
    add = parser.add_argument
    add("--out", default="docs", help="folder of the page; figures go into figures/ (docs)")
    add("--numbers", metavar="PATH", default="", help=f"{name}.json of an earlier run")
    add("--quick", action="store_true", help="toy sizes, for the test")
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
        check_folder("out", out)
        print(make(args, Path(args.numbers) if args.numbers else None).done(args, out))
    except (ValueError, OSError) as error:
        print(f"{parser.prog.removeprefix('python -m ')}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    return 0


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
    write_between(page, PART.format(experiment, name), part)


def write_between(page: Path, command: str, part: str) -> None:
    """Puts a part between the markers of the command that makes it. ValueError if the page has no
    such markers."""
    text, mark = page.read_text(encoding="utf-8"), f"<!-- begin: {command} -->\n"
    before, begin, rest = text.partition(mark)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the line {mark.strip()} or its {END}")
    page.write_text(f"{before}{begin}{part.rstrip()}\n{end}{after}", encoding="utf-8")
