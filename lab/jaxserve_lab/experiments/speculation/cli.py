"""Makes the simulated part of docs/speculation.md, between its markers.

    python -m jaxserve_lab.experiments.speculation
    python -m jaxserve_lab.experiments.speculation --quick --out=/some/file.md

--quick runs toy sizes, for the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.command_line import Parser, exit_code
from jaxserve.simulator.workload_flags import positive_int
from jaxserve_lab.experiments.common.page import write_part
from jaxserve_lab.experiments.speculation import simulated

PARTS: dict[str, Callable[[bool, int], str]] = {"simulated": simulated.part}  # make their Markdown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts, and puts each into the page as it ends.

    Args:
        argv: Arguments without the program's name.

    Returns:
        Exit status: 0 if the page is written, 1 or 2 after a line on stderr.
    """
    parser = Parser(prog="python -m jaxserve_lab.experiments.speculation", description=str(__doc__))
    add = parser.add_argument
    add("--out", default="docs/speculation.md", help="the page, with its markers (%(default)s)")
    add("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (all)")
    add("--quick", action="store_true", help="toy sizes, for the test")
    add("--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (all cores)")
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts: there is no part {unknown[0]!r}; known: {', '.join(PARTS)}")
    try:
        for name in args.parts.split(","):
            write_part(Path(args.out), "speculation", name, PARTS[name](args.quick, args.jobs))
    except (ValueError, OSError) as error:
        print(f"jaxserve_lab.experiments.speculation: {error}", file=sys.stderr)
        return exit_code(error)
    return 0
