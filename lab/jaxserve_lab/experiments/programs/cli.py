"""Makes the league of docs/programs.md: policies on closed workloads of programs, simulated.

    jaxserve bench program-league
    jaxserve bench program-league --numbers=docs/figures/programs.json
    jaxserve bench program-league --policy=path/to/mine.py:mine --out=/some/file.md

The next call of a program comes after the answer that it contains, so a policy that is late delays
the rest. The numbers of the runs go to figures/programs.json beside the page as they come;
--numbers takes what an earlier run has found from there, and runs only what is missing. Without
--quick, it takes some twenty minutes of a core: such workloads are simulated in Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.command_line import Parser
from jaxserve.sched.registry import make_policy
from jaxserve_lab.experiments.common.page import write_between
from jaxserve_lab.experiments.common.runs import Results
from jaxserve_lab.experiments.programs.runs import ProgramCase, ProgramNumbers, run
from jaxserve_lab.experiments.programs.tables import ENTRANTS, QUICK, Entrant, League, Scale

COMMAND = "jaxserve bench program-league"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked; argparse exits by itself where they are wrong."""
    parser = Parser(prog=COMMAND, description=__doc__)
    parser.set_defaults(command="program-league")
    add = parser.add_argument
    add("--policy", default="", help="more rows: names or path/to/file.py:name, with commas")
    add(
        "--out",
        default="docs/programs.md",
        help="the page, which has the markers (docs/programs.md)",
    )
    add("--numbers", metavar="JSON", default="", help="programs.json of an earlier run")
    add("--quick", action="store_true", help="toy sizes, for the test")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    args = parser.parse_args(argv)
    args.policy = [name for name in args.policy.split(",") if name]
    try:
        for name in args.policy:
            make_policy(name)
    except ValueError as error:
        parser.error(str(error))
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    return args


def show(args: argparse.Namespace) -> int:
    """Runs what is missing, and writes the page; the exit code, 1 after a line on stderr where a
    run, or a file, cannot be had."""
    page, scale = Path(args.out), QUICK if args.quick else Scale()
    numbers = page.parent / "figures" / "programs.json"
    entrants = [*map(Entrant, args.policy), *ENTRANTS]
    try:
        earlier = Path(args.numbers) if args.numbers else None
        results = Results[ProgramCase, ProgramNumbers](run, lambda case: ProgramNumbers, earlier)
        league = League(scale, entrants, results)
        text = league.text()
        if not results.complete:
            results.run_missing(args.jobs, numbers)
            text = league.text()
        results.write(numbers)
        write_between(page, COMMAND, text)
    except (ValueError, OSError) as error:
        print(f"jaxserve bench: {error}", file=sys.stderr)
        return 1
    print(f"wrote {page} and {numbers}")
    return 0
