"""Makes docs/aptserve.md: what Apt-Serve (SIGMOD 2025) claims, and what the simulator says.

    python -m jaxserve.experiments.aptserve
    python -m jaxserve.experiments.aptserve --measure=steps,load
    python -m jaxserve.experiments.aptserve --numbers=docs/figures/aptserve.json
    python -m jaxserve.experiments.aptserve --quick --out=/some/folder

Every number and figure on the page comes from the runs of this command, on all cores. --numbers
takes what an earlier run has simulated, and the plans' times beside it, from there and runs only
what is missing: after a change of a text, say. --measure runs the engine itself on this machine,
which should have nothing else to do: `steps` times decode steps by cache, `load` serves, for about
a quarter of an hour in all; what is not asked for is shown as it was measured last. --quick runs
toy sizes that say nothing about the claims.
"""

from __future__ import annotations

import shutil
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from jaxserve.experiments.aptserve import load, plan, steps
from jaxserve.experiments.aptserve.departures import Departures
from jaxserve.experiments.aptserve.effective import Absorbed, Effective
from jaxserve.experiments.aptserve.general import Chunked, LongContexts
from jaxserve.experiments.aptserve.latency import Latencies
from jaxserve.experiments.aptserve.robust import Ablations, Bursts
from jaxserve.experiments.aptserve.setting import MODELS, QUICK, Part, Scale
from jaxserve.experiments.common.claims import Section, table
from jaxserve.experiments.common.grid import Known, dump, run_asked
from jaxserve.experiments.common.online import OnlineCase, OnlineResults, read_numbers, run
from jaxserve.experiments.common.page import Page, flags, write_page
from jaxserve.sched.simulation.systems.systems import system

# In the order of the page; the time of a plan, which is no simulation, follows the fourth.
PARTS: tuple[type[Part], ...] = (
    Effective,
    Bursts,
    Ablations,
    Latencies,
    Chunked,
    LongContexts,
    Absorbed,
    Departures,
)
PLAN_AT = 4
TIMES = "aptserve_plan.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    parser = flags("aptserve", __doc__)
    parser.add_argument(
        "--measure", type=_measurements, default=[], help="steps, load or both: run the engine"
    )
    return write_page("aptserve", parser, argv, _make)


def _make(args: Namespace, figures: Path) -> Page:
    scale = QUICK if args.quick else Scale()
    parts = [make(scale) for make in PARTS]
    known = Known(Path(args.numbers), read_numbers) if args.numbers else None
    numbers = figures / "aptserve.json"

    def asked(results: OnlineResults) -> set[OnlineCase]:
        return {case for part in parts for case in part.cases(results)}

    results = run_asked(asked, args.jobs, run, known, lambda some: dump(some, numbers))
    earlier = Path(args.numbers).with_name(TIMES) if args.numbers else None
    times = plan.load(earlier, scale.candidates) if earlier else None
    times = times or plan.measure(scale)
    plan.dump(times, figures / TIMES)
    sections = [part.section(results, figures) for part in parts]
    sections.insert(PLAN_AT, plan.section(scale, times))
    sections += _measured(args.measure, figures, args.numbers)
    return Page(
        "Apt-Serve's claims, simulated",
        "python -m jaxserve.experiments.aptserve",
        [INTRODUCTION.format(requests=scale.requests), _systems(scale)],
        sections,
    )


def _measured(wanted: Sequence[str], figures: Path, numbers: str) -> list[Section]:
    """The sections on the engine itself. wanted: what to measure now; the rest is as it was
    measured last, beside the numbers of the earlier run if there is one."""
    if "steps" in wanted:
        steps.dump(steps.measure(), figures / steps.FILE_NAME)
    if "load" in wanted:
        load.dump(load.measure(), figures / load.FILE_NAME)
    for name in (steps.FILE_NAME, load.FILE_NAME) if numbers else ():
        earlier = Path(numbers).with_name(name)
        if earlier.exists() and not (figures / name).exists():
            shutil.copy(earlier, figures / name)
    first = len(PARTS) + 2
    return [
        steps.section(figures / steps.FILE_NAME, first),
        load.section(figures / load.FILE_NAME, figures, first + 1),
    ]


def _measurements(text: str) -> list[str]:
    """Of --measure."""
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - {"steps", "load"}:
        raise ArgumentTypeError(f"steps, load or both, not {', '.join(sorted(unknown))}")
    return names


def _systems(scale: Scale) -> str:
    rows = []
    for name in scale.models:
        projected, absorbed = (system(MODELS[name], r) for r in ("projected", "absorbed"))
        assert projected.rho is not None and absorbed.rho is not None
        model = projected.cost_model
        rows.append(
            [
                f"`{MODELS[name]}`",
                f"{projected.kv_tokens:,}",
                f"{1e3 * model.num_layers * model.coefficients.token_bias:.1f}",
                f"{1e6 * model.num_layers * model.coefficients.decode_kv:.2f}",
                f"{1e6 * projected.rho:.2f}",
                f"{1e6 * absorbed.rho:.2f}",
            ]
        )
    header = [
        "system",
        "tokens of K and V",
        "weights, ms a step",
        "K and V of a token, us",
        "rho projected, us",
        "rho absorbed, us",
    ]
    return table(header, rows)


INTRODUCTION = """\
Paper: Gao, Zhang, Shen, Chen, "Apt-Serve: Adaptive Request Scheduling on Hybrid Cache for \
Scalable LLM Inference Serving" (SIGMOD 2025). {requests:,} requests a trace, Poisson arrivals, \
the same requests at every rate and for every system; the SLOs of Table 3, TTFT and the 99th \
percentile of each request's times between tokens. The simulator serves with the engine's own \
scheduler, block accounting (blocks of 16 tokens) and overlap of planning and running; batch times \
come from `jaxserve.sched.simulation.systems.systems.scale`: layers as fitted to tables of A100s, \
attention at the efficiencies that InferMax's authors measured ([systems.md](systems.md)). Lengths \
are drawn from distributions with the data sets' \
published moments (`jaxserve.sched.workloads.lengths`), cut to OPT's 2,048 tokens. C = 2,048 \
tokens a batch, so that every prompt fits into one; P = 512 for `sarathi`, `fastgen` and \
`aptserve_s`. Nothing was tuned towards the paper's results."""
