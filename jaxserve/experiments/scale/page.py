"""Makes docs/scale.md: many replicas behind one stream of requests, simulated.

    python -m jaxserve.experiments.scale --azure=DIR
    python -m jaxserve.experiments.scale --azure=DIR --numbers=docs/figures/scale.json
    python -m jaxserve.experiments.scale --quick --out=/some/folder

--azure: the folder of the two hours of the Azure public dataset; without it, they are drawn with
the hours' moments. --numbers takes what an earlier run has simulated and measured from there and
runs only what is missing: after a change of a text, say, or when a run was interrupted. --requests:
of each run; --few: of shorter ones before the most replicas, one at each load. A million take some
12 s of one core, and 2.2 GB of memory a process. --quick runs toy sizes that say nothing about the
claims. Needs numba (pip install 'jaxserve[fast]').
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxserve.experiments.common.grid import Known, dump, run_all
from jaxserve.experiments.common.page import Page, flags, write_page
from jaxserve.experiments.scale.cell import Case, Found, read, run
from jaxserve.experiments.scale.grid import QUICK, Scale, cases
from jaxserve.experiments.scale.on_ray import on_ray
from jaxserve.experiments.scale.reading import introduction, sections
from jaxserve.experiments.scale.traffic import check_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    parser = flags("scale", __doc__)
    parser.add_argument("--azure", metavar="DIR", default="", help="folder of the Azure traces")
    parser.add_argument("--requests", type=int, help="of each run (1000000; 2000 with --quick)")
    parser.add_argument("--few", type=int, help="of the short ones (100000; 1000 with --quick)")
    return write_page("scale", parser, argv, _make)


def _command(args: Namespace) -> str:
    flags = [" --azure=DIR" if args.azure else ""]
    for name in ("requests", "few"):
        value = getattr(args, name)
        flags += [f" --{name}={value}" if value is not None else ""]
    return "python -m jaxserve.experiments.scale" + "".join(flags)


def _make(args: Namespace, figures: Path) -> Page:
    scale: Scale = QUICK if args.quick else Scale()
    for name in ("requests", "few"):
        value = getattr(args, name)
        if value is not None:
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
            scale = replace(scale, **{name: value})
    check_folder(args.azure)
    numbers = figures / "scale.json"
    known = Known(Path(args.numbers), read) if args.numbers else None
    wanted = cases(scale, args.azure)
    there: dict[Case, Found] = known.of(wanted) if known else {}

    def keep(some: dict[Case, Found]) -> None:
        dump(some, numbers)

    results = run_all(wanted, args.jobs, run, there, keep)
    keep(results)
    return Page(
        "Many replicas behind one stream of requests, simulated",
        _command(args),
        introduction(scale, args.azure),
        [
            *sections(scale, args.azure, results, figures, checked=not args.quick),
            *on_ray(figures),
        ],
    )
