"""Everything there is to measure on a GPU, in under nine minutes.

    jaxserve bench gpu
    jaxserve bench gpu --json_file=gpu.json --markdown=gpu.md

Checks every kernel against its reference, times them, tries decode attention by other backends,
which none but whoever reads here may choose, then runs OPT-13B with random weights: a
decode step against its byte floor with either kind of cache, and the engine's throughput. Sections
that would start too late are left out, and said to be; one that fails does not stop the others.
With 80 GB, set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. Exit codes: 0, 1 where a check or a section
failed or there is no GPU, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxserve.bench.command import BenchParser
from jaxserve.bench.kernels import kernels
from jaxserve.bench.kernels.end_to_end import decode_steps, throughput
from jaxserve.bench.kernels.gpu_outcome import MINUTES, Outcome, Plan
from jaxserve.bench.kernels.gpu_report import page
from jaxserve.bench.kernels.gpu_rivals import run_trials
from jaxserve.bench.kernels.kernel_checks import check_kernels
from jaxserve.machine import machine, versions
from jaxserve.writable import check_file

LAST_START = 0.75  # of the minutes: what starts later would not end in time

Tell = Callable[[str], None]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked; argparse exits by itself where they are wrong."""
    parser = BenchParser("gpu", json=False, description=__doc__)
    parser.add_argument("--json_file", help="write everything here")
    parser.add_argument("--markdown", help="write the tables here, as a page")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="at most (%(default)s)")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    try:
        for name in ("json_file", "markdown"):
            if getattr(args, name):
                check_file(name, Path(getattr(args, name)))
    except ValueError as error:
        parser.error(str(error))
    return args


def show(args: argparse.Namespace) -> int:
    """Measures, prints and writes; the exit code."""
    if jax.default_backend() != "gpu":
        print(
            f"jaxserve bench gpu: there is no GPU here: jax sees {kernels.device_name()} only",
            file=sys.stderr,
        )
        return 1
    about = {  # first: if it fails, no minutes are lost
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    plan = Plan(minutes=args.minutes)
    outcome = run(plan, lambda text: print(text, flush=True))
    if args.json_file:
        text = json.dumps({"command": "gpu", **about, **as_json(plan, outcome)}, indent=2)
        Path(args.json_file).write_text(text + "\n", encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(page(plan, outcome, about), encoding="utf-8")
    return 1 if outcome.failed or outcome.broken else 0


def run(plan: Plan, tell: Tell) -> Outcome:
    """Runs the sections in order, as far as time lasts."""
    begin = time.monotonic()
    outcome = Outcome(kernels.device_name())
    sections: dict[str, Callable[[Plan, Outcome, Tell], None]] = {
        "checks": _checks,
        "kernels": _kernels,
        "decodes by others": _trials,
        "decode step": _steps,
        "throughput": _throughput,
    }
    for name, section in sections.items():
        start = time.monotonic()
        if start - begin > LAST_START * plan.minutes * 60:
            outcome.left_out.append(name)
            tell(f"{name}: left out, no time")
            continue
        try:
            section(plan, outcome, tell)
        except Exception as error:  # minutes of measurements must not go with it
            outcome.broken[name] = f"{type(error).__name__}: {str(error).strip()[:500]}"
            tell(f"{name}: {outcome.broken[name]}")
        outcome.seconds[name] = round(time.monotonic() - start, 1)
        tell(f"{name}: {outcome.seconds[name]} s")
    return outcome


def _checks(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    for check in check_kernels(plan.backend, plan.dtypes, plan.shapes):
        outcome.checks.append(check)
        verdict = check.why or ("right" if check.passed else "WRONG")
        about = f"{check.kernel:<30}{check.shape:<22}{check.dtype:<10}"
        tell(f"{about}{check.error:>10.1e} of {check.limit:.0e}  {verdict}")


def _kernels(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    found = kernels.run(plan.models, plan.workload, plan.backend, plan.matrix, tell)
    outcome.ceilings, outcome.kernels = found


def _trials(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    given = (plan.rivals, plan.models, plan.workload, outcome.kernels)
    outcome.trials += run_trials(*given, dtypes=plan.dtypes, shapes=plan.shapes, tell=tell)


def _steps(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    if outcome.ceilings is None:  # the kernels' section was left out, but not this one
        outcome.ceilings = kernels.measure_ceilings(plan.matrix, jax.numpy.dtype(plan.step.dtype))
    outcome.steps = decode_steps(plan.step, plan.backend, outcome.ceilings.copy)
    for step in outcome.steps:
        tell(
            f"{step.model}, decode step of {step.rows} x {step.context}, {step.cache} cache: "
            f"{step.seconds * 1e3:.2f} ms, {step.times_floor:.2f} x its byte floor"
        )


def _throughput(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    outcome.load = throughput(plan.load, plan.backend)
    rate = outcome.load["output_tokens_per_s"]["median"]
    tell(f"{plan.load.model}, {plan.load.requests} requests at once: {rate:,.1f} output tokens/s")


def as_json(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """The outcome as a JSON object."""
    steps = [{**asdict(step), "times_floor": step.times_floor} for step in outcome.steps]
    return {"plan": asdict(plan), "outcome": {**asdict(outcome), "steps": steps}}
