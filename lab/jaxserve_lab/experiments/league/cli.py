"""Makes docs/league.md: every policy on every workload of the four papers, simulated.

    jaxserve bench league
    jaxserve bench league --azure=DIR
    jaxserve bench league --policy=path/to/mine.py:mine

Runs are written to figures/league.csv in the folder of the page as they end: after ^C, or worse,
the same command goes on where it was. It goes on only with numbers that the code of now would give:
a change of a policy has its runs done again, one of the scheduler or the simulator all of them.
Code that was only moved or renamed counts as changed, too: --reproduce=N does N of the runs again,
drawn at random, and keeps all of them if those come out the same to the last digit.

--policy adds one's own, or one with parameters, or one that knows the future, as a row, measured by
the others; the page goes to the folder league, not to docs, and runs of docs/figures are taken from
there. --azure: the folder of the two hours of the Azure public dataset; without it, they are drawn
with the hours' moments. The sessions, conversation and agent, which find what was computed before,
are run by name only (--workloads=conversation,agent): half an hour of a core, where all others take
an hour and a half, since with host memory they run in Python. Needs numba and OR-Tools.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxserve.command_line import Parser
from jaxserve.sched.registry import make_policy
from jaxserve.writable import check_folder
from jaxserve_lab.experiments.league import collect
from jaxserve_lab.experiments.league.collect import QUICK, Scale, reproduce
from jaxserve_lab.experiments.league.page import write_page
from jaxserve_lab.experiments.league.reading import advice
from jaxserve_lab.experiments.league.standings import Standings
from jaxserve_lab.experiments.league.store import Store
from jaxserve_lab.experiments.league.workloads import WORKLOADS, trace_of

DOCS, OWN = "docs", "league"  # folders of pages
QUICK_POLICIES = ("sarathi", "aptserve")
NEEDS = ("numba", "ortools", "matplotlib")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked; argparse exits by itself where they are wrong."""
    parser = Parser(prog="jaxserve bench league", description=__doc__)
    parser.set_defaults(command="league")
    add = parser.add_argument
    add("--policy", default="", help="more rows: names or path/to/file.py:name, with commas")
    add(
        "--workloads",
        default="",
        help=f"instead of all that are not held out: {', '.join(WORKLOADS)}",
    )
    add("--azure", metavar="DIR", default="", help="folder of the Azure traces")
    add("--out", help=f"folder of the page ({DOCS}; {OWN} with --policy, --workloads or --quick)")
    add(
        "--numbers",
        metavar="CSV",
        help="an earlier league's runs, whatever code made them; of its policies alone",
    )
    add("--reproduce", metavar="N", type=int, default=0, help="runs that may vouch for all others")
    add("--quick", action="store_true", help="toy sizes, for the test")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    args = parser.parse_args(argv)
    args.policy = [name for name in args.policy.split(",") if name]
    args.whole = not (args.policy or args.workloads or args.quick)
    args.out = Path(args.out or (DOCS if args.whole else OWN))
    try:
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check(args: argparse.Namespace) -> None:
    """ValueError says which flag is wrong."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}: pip install {' '.join(missing)}")
    for name in args.policy:
        make_policy(name)
    scale = QUICK if args.quick else Scale()
    if args.workloads:
        names = tuple(args.workloads.split(","))
        if unknown := [name for name in names if name not in WORKLOADS]:
            known = ", ".join(WORKLOADS)
            raise ValueError(f"--workloads: there is no {unknown[0]!r}; known: {known}")
        scale = dataclasses.replace(scale, workloads=names)
        if not list(scale.places()):
            raise ValueError("--workloads: none of them runs on a system of --quick")
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    if args.reproduce < 0:
        raise ValueError(f"--reproduce must be at least 0, got {args.reproduce}")
    if args.numbers is not None and not Path(args.numbers).is_file():
        raise ValueError(f"--numbers: there is no {args.numbers}")
    check_folder("out", args.out)
    args.scale = scale
    args.traces = {name: path for name in scale.workloads if (path := trace_of(name, args.azure))}


def show(args: argparse.Namespace) -> int:
    """Runs what is missing, and writes the page; the exit code, 1 after a line on stderr where
    something cannot be simulated, read or written, or the page's words are wrong."""
    entrants = list(QUICK_POLICIES) if args.quick else collect.entrants()
    own = [name for name in dict.fromkeys(args.policy) if name not in entrants]
    try:
        store = _store(args)
        if args.numbers is not None:  # a policy that is newer than they are has none
            entrants = [name for name in entrants if name in store.policies()]
        traces = args.traces or (store.traces() if args.numbers is not None else {})
        found = collect.collect(args.scale, [*own, *entrants], traces, store, args.jobs)
        standings = Standings(found, entrants, own)
        page = write_page(standings, args.scale, list(traces), args.out, whole=args.whole)
    except (ValueError, OSError) as error:
        print(f"jaxserve bench: {error}", file=sys.stderr)
        return 1
    print(f"wrote {page}, its numbers and figures")
    if args.whole:
        print(advice(standings))
    return 0


def _store(args: argparse.Namespace) -> Store:
    """Of the page's folder, with what --numbers, or else docs, has beside."""
    files = _files(args.out / "figures" / "league.csv")
    store = Store(*files, any_code=args.reproduce > 0)
    if args.reproduce:
        reproduce(store, args.reproduce, args.jobs)
    if args.numbers is not None:
        store.merge(Store(*_files(Path(args.numbers)), any_code=True))
    elif not args.whole:
        store.merge(Store(*_files(Path(DOCS) / "figures" / "league.csv")))
    store.begin()
    return store


def _files(runs: Path) -> tuple[Path, Path]:
    """The runs, and the facts beside them."""
    return runs, runs.with_suffix(".json")
