"""Makes docs/accelgen.md: what AccelGen claims, and what the simulator says.

    python -m jaxserve.experiments.accelgen
    python -m jaxserve.experiments.accelgen --numbers=docs/figures/accelgen.json
    python -m jaxserve.experiments.accelgen --quick --out=/some/folder

Every number and figure on the page comes from the runs of this command, on all cores. --numbers
takes what an earlier run has simulated, and how long its plans took, from there and runs only what
is missing: after a change of a text, say, or when a run was interrupted. --quick runs toy sizes
that say nothing about the claims.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jaxserve.experiments.accelgen.ablated import Ablated
from jaxserve.experiments.accelgen.case import SloCase, SloResults, read_numbers, run
from jaxserve.experiments.accelgen.compared import Compared
from jaxserve.experiments.accelgen.exclusive import Exclusive
from jaxserve.experiments.accelgen.introduction import paragraphs
from jaxserve.experiments.accelgen.measured import Measured
from jaxserve.experiments.accelgen.otherwise import Printed, Reachable
from jaxserve.experiments.accelgen.planned import Planned
from jaxserve.experiments.accelgen.searched import Searched
from jaxserve.experiments.accelgen.sensitive import Alone, Sensitive
from jaxserve.experiments.accelgen.setting import QUICK, Part, Scale
from jaxserve.experiments.accelgen.tuning import Settings
from jaxserve.experiments.accelgen.verdict import Verdict
from jaxserve.experiments.common.grid import Known, dump, run_asked
from jaxserve.experiments.common.page import Page, flags, write_page

PARTS: tuple[type[Part], ...] = (
    Verdict,
    Settings,
    Measured,
    Exclusive,
    Compared,
    Planned,
    Ablated,
    Sensitive,
    Alone,
    Printed,
    Reachable,
    Searched,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    return write_page("accelgen", flags("accelgen", __doc__), argv, _make)


def _make(args: Namespace, figures: Path) -> Page:
    scale = QUICK if args.quick else Scale()
    parts = [make(scale) for make in PARTS]
    known = Known(Path(args.numbers), read_numbers) if args.numbers else None

    def asked(results: SloResults) -> set[SloCase]:
        return {case for part in parts for case in part.cases(results)}

    numbers = figures / "accelgen.json"
    results = run_asked(asked, args.jobs, run, known, lambda some: dump(some, numbers))
    return Page(
        "AccelGen's claims, simulated",
        "python -m jaxserve.experiments.accelgen",
        paragraphs(scale),
        [part.section(results, figures) for part in parts],
        "[accelgen-policy.md](accelgen-policy.md) says how the policy differs from the paper's",
    )
