"""Makes docs/infermax.md: what InferMax (arXiv 2411.07447) claims, and what the simulator says.

    python -m jaxserve.experiments.infermax --azure=AzureLLMInferenceTrace_conv.csv
    python -m jaxserve.experiments.infermax --quick --out=/some/folder

Every number and figure on the page comes from the runs of this command, on all cores. --azure is
the hour of conversations of Azure's public dataset of 2023; without it the seventh comparison is
left out, and the page says so. --numbers=docs/figures/infermax.json takes what an earlier run has
simulated from there and runs only what is missing: after a change of a text, say. --quick runs toy
sizes that say nothing about the claims.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jaxserve.experiments.common.claims import QUICK, Comparison, Scale
from jaxserve.experiments.common.grid import Case, Known, Numbers, dump, run, run_asked
from jaxserve.experiments.common.page import Page, flags, write_page
from jaxserve.experiments.infermax import azure, optimum
from jaxserve.experiments.infermax.contention import HighContention, LowContention
from jaxserve.experiments.infermax.memory import EvictionFree, MemorySize
from jaxserve.experiments.infermax.ranks import Ranks

COMPARISONS: tuple[type[Comparison], ...] = (
    LowContention,
    HighContention,
    EvictionFree,
    MemorySize,
    Ranks,
)
QUICK_AZURE = 200  # requests


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    parser = flags("infermax", __doc__)
    add = parser.add_argument
    add("--azure", metavar="PATH", default="", help="Azure's conversation trace")
    add("--time_limit", type=float, default=300.0, help="seconds for one optimal schedule (300)")
    return write_page("infermax", parser, argv, _make)


def _make(args: Namespace, figures: Path) -> Page:
    if args.azure and not Path(args.azure).is_file():
        raise ValueError(f"--azure: there is no {args.azure}")
    scale = QUICK if args.quick else Scale()
    comparisons = [make(scale) for make in COMPARISONS]
    count = QUICK_AZURE if args.quick else None
    cases: list[Case] = [case for comparison in comparisons for case in comparison.cases()]
    if args.azure:
        cases += azure.cases(args.azure, count)
    else:
        print("no --azure=PATH: the seventh comparison is left out", file=sys.stderr)
    known = Known(Path(args.numbers), Numbers) if args.numbers else None
    numbers = figures / "infermax.json"
    results = run_asked(lambda _: cases, args.jobs, run, known, lambda some: dump(some, numbers))
    instances = optimum.solve_all(scale, args.time_limit, args.jobs)
    sections = [comparison.section(results, figures) for comparison in comparisons]
    sections.append(optimum.section(scale, instances, figures))
    sections.append(
        azure.section(args.azure, count, results, figures) if args.azure else azure.skipped()
    )
    return Page(
        "InferMax's claims, simulated",
        "python -m jaxserve.experiments.infermax --azure=PATH",
        [INTRODUCTION.format(kv_tokens=scale.kv_tokens)],
        sections,
    )


INTRODUCTION = """\
Paper: Kim, Hong, Gulcehre, Ailamaki, "Optimizing LLM Inference for Database Systems: Cost-Aware \
Scheduling for Concurrent Requests". All runs use the rules `infermax_paper`: the authors' batch \
times, blocks of one token, no watermark, each batch planned when the one before it has ended \
(`--rules=infermax_paper` of `jaxserve.simulate`). Llama-2-7B on one A100, M = {kv_tokens:,} \
tokens of cache, C = 4,096 tokens a batch, all requests there at the start, unless something else \
is said. \
P is 512 for `sarathi` and the `rank_` policies, C for the others. Latency is the sum of the batch \
times. TPOT is the mean over requests of the time between first and last token, divided by the \
tokens in between: time in which a request is preempted counts."""
