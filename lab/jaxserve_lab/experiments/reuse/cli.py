"""Makes the measured tables of docs/reuse.md, each between its markers.

    python -m jaxserve_lab.experiments.reuse
    python -m jaxserve_lab.experiments.reuse --parts=retention --workload=mooncake.jsonl --rate=0.9
    python -m jaxserve_lab.experiments.reuse --quick --out=/some/file.md

--parts: which of them, separated by commas. --workload: a trace in Mooncake's format, which goes
into the tables beside the drawn workloads. --quick runs toy sizes, for the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.command_line import Parser, exit_code
from jaxserve.simulator.workload_flags import positive_int
from jaxserve_lab.experiments.common.page import write_part
from jaxserve_lab.experiments.reuse import figures, retention
from jaxserve_lab.experiments.reuse.setting import Setting

Part = Callable[[Setting], str]  # makes its Markdown
PARTS: dict[str, Part] = {"figures": figures.part, "retention": retention.part}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts, and puts each into the page as it ends.

    Args:
        argv: Arguments without the program's name.

    Returns:
        Exit status: 0 if the page is written, 1 or 2 after a line on stderr.
    """
    parser = Parser(prog="python -m jaxserve_lab.experiments.reuse", description=str(__doc__))
    add = parser.add_argument
    add("--out", default="docs/reuse.md", help="the page, which has the markers (docs/reuse.md)")
    add("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (all)")
    add("--workload", default="", help="a trace, beside the drawn workloads")
    add("--rate", type=float, help="requests/s of the trace (its own)")
    add("--num_requests", type=positive_int, help="the first of the trace (all)")
    add("--quick", action="store_true", help="toy sizes, for the test")
    add("--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (all cores)")
    args = parser.parse_args(argv)
    unknown = [name for name in args.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts: there is no part {unknown[0]!r}; known: {', '.join(PARTS)}")
    setting = Setting(args.workload, args.rate, args.num_requests, args.quick, args.jobs)
    page = Path(args.out)
    try:
        for name in args.parts.split(","):
            write_part(page, "reuse", name, PARTS[name](setting))
    except (ValueError, OSError) as error:
        print(f"jaxserve_lab.experiments.reuse: {error}", file=sys.stderr)
        return exit_code(error)
    return 0
