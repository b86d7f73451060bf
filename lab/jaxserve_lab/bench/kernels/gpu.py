"""Measures everything on a GPU, in under nine minutes.

    jaxserve bench gpu
    jaxserve bench gpu --json_file=gpu.json --markdown=gpu.md

Checks every kernel against its reference; times kernels, products with quantised weights and
mixtures of experts; tries attention by other backends; then
runs OPT-13B, Llama-3-8B and Qwen3-30B-A3B with random weights: decode steps against their byte
floors with both kinds of cache, and quantised, and the engine's throughput. --sections selects some
of these. Sections that would start too late are left out and reported; a failing section does not
stop the others. With 80 GB, set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. Exit codes: 0, 1 if a check or
a section failed or there is no GPU, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from jaxserve.bench.command import BenchParser
from jaxserve.machine import machine, versions
from jaxserve.writable import check_file
from jaxserve_lab.bench.kernels import kernels
from jaxserve_lab.bench.kernels.end_to_end import StepSize, decode_steps, throughput
from jaxserve_lab.bench.kernels.gpu_outcome import MINUTES, Outcome, Plan
from jaxserve_lab.bench.kernels.gpu_report import page
from jaxserve_lab.bench.kernels.gpu_rivals import run_trials
from jaxserve_lab.bench.kernels.kernel_cases import narrowed
from jaxserve_lab.bench.kernels.kernel_checks import Check, check_kernels
from jaxserve_lab.bench.kernels.mixtures import check_mixtures, time_mixtures
from jaxserve_lab.bench.kernels.products import check_contenders, check_products, time_products

LAST_START = 0.75  # of the minutes; later sections would not end in time

Tell = Callable[[str], None]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; argparse exits on errors."""
    parser = BenchParser("gpu", json=False, description=__doc__)
    parser.add_argument("--json_file", help="write everything here")
    parser.add_argument("--markdown", help="write the tables here, as a page")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="at most (%(default)s)")
    parser.add_argument("--sections", help="sections, separated by commas (all)")
    args = parser.parse_args(argv)
    names, known = (args.sections or "").split(","), _sections(Plan())
    if args.sections and not set(names) <= set(known):
        parser.error(f"--sections: known are {', '.join(known)}, got {args.sections}")
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
    """Measures, prints and writes; returns the exit code."""
    if jax.default_backend() != "gpu":
        print(
            f"jaxserve bench gpu: there is no GPU here; jax sees {kernels.device_name()} only",
            file=sys.stderr,
        )
        return 1
    about = {  # first, so that a failure loses no time
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    plan = Plan(minutes=args.minutes)
    only = args.sections.split(",") if args.sections else ()
    outcome = run(plan, lambda text: print(text, flush=True), only)
    if args.json_file:
        text = json.dumps({"command": "gpu", **about, **as_json(plan, outcome)}, indent=2)
        Path(args.json_file).write_text(text + "\n", encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(page(plan, outcome, about), encoding="utf-8")
    return 1 if outcome.failed or outcome.broken else 0


Section = Callable[[Plan, Outcome, Tell], None]


def _sections(plan: Plan) -> dict[str, Section]:
    steps = {f"step {i + 1}": partial(_step, size) for i, size in enumerate(plan.steps)}
    return {
        "checks": _checks,
        "kernels": _kernels,
        "products": _products,
        "mixtures": _mixtures,
        "attention by others": _trials,
        **steps,
        "throughput": _throughput,
    }


def run(plan: Plan, tell: Tell, only: Sequence[str] = ()) -> Outcome:
    """Runs the sections, or only those, in order, as long as there is time."""
    begin = time.monotonic()
    outcome = Outcome(kernels.device_name())
    for name, section in _sections(plan).items():
        if only and name not in only:
            continue
        start = time.monotonic()
        if start - begin > LAST_START * plan.minutes * 60:
            outcome.left_out.append(name)
            tell(f"{name}: left out, no time")
            continue
        try:
            section(plan, outcome, tell)
        except Exception as error:  # it must not lose earlier measurements
            outcome.broken[name] = f"{type(error).__name__}: {str(error).strip()[:500]}"
            tell(f"{name}: {outcome.broken[name]}")
        outcome.seconds[name] = round(time.monotonic() - start, 1)
        tell(f"{name}: {outcome.seconds[name]} s")
    return outcome


def _checks(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    checks = check_kernels(plan.backend, plan.dtypes, plan.shapes)
    products = check_products(plan.formats), check_contenders(plan.contenders, plan.formats)
    for check in chain(checks, *products):
        _checked(check, outcome, tell)


def _checked(check: Check, outcome: Outcome, tell: Tell) -> None:
    outcome.checks.append(check)
    verdict = check.why or ("right" if check.passed else "WRONG")
    about = f"{check.kernel:<30}{check.shape:<28}{check.dtype:<10}"
    tell(f"{about}{check.error:>10.1e} of {check.limit:.0e}  {verdict}")


def _kernels(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    arguments = plan.backend, plan.matrix, tell
    outcome.ceilings, outcome.kernels = kernels.run(plan.models, plan.workload, *arguments)
    for dtype in plan.caches:
        work = narrowed(plan.workload, dtype)
        names = ("decode attention", "prefill attention")
        run = partial(kernels.run, ceilings=outcome.ceilings, only=names)
        outcome.kernels += run(plan.models, work, *arguments)[1]


def _ceilings(plan: Plan, outcome: Outcome) -> kernels.Ceilings:
    """The earlier ceilings, or new ones if the kernels' section was left out."""
    if outcome.ceilings is None:
        dtype = jax.numpy.dtype(plan.workload.dtype)
        outcome.ceilings = kernels.measure_ceilings(plan.matrix, dtype)
    return outcome.ceilings


def _products(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    def found(into: list[kernels.Measured], one: kernels.Measured) -> None:
        into.append(one)
        tell(kernels.line(one))

    given = plan.workload.dtype, _ceilings(plan, outcome)
    for model in plan.models:
        time_products(model, plan.formats, plan.rows, *given, partial(found, outcome.products))
    for model in plan.models:
        tell_of = partial(found, outcome.contended)
        time_products(model, plan.formats, plan.many_rows, *given, tell_of, plan.contenders)


def _mixtures(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    for check in check_mixtures():
        _checked(check, outcome, tell)

    def found(one: kernels.Measured) -> None:
        outcome.mixtures.append(one)
        tell(kernels.line(one))

    for model in plan.mixtures:
        time_mixtures(model, plan.tokens, plan.workload.dtype, _ceilings(plan, outcome), found)


def _trials(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    arguments = (plan.rivals, plan.models, plan.workload, plan.caches, outcome.kernels)
    outcome.trials += run_trials(*arguments, dtypes=plan.dtypes, shapes=plan.shapes, tell=tell)


def _step(size: StepSize, plan: Plan, outcome: Outcome, tell: Tell) -> None:
    steps = decode_steps(size, plan.backend, _ceilings(plan, outcome).copy)
    outcome.steps += steps
    for step in steps:
        tell(
            f"{step.model}, decode step of {step.rows} x {step.context}, {step.weights}, "
            f"{step.cache}: {step.seconds * 1e3:.2f} ms, {step.times_floor:.2f} x its byte floor"
        )


def _throughput(plan: Plan, outcome: Outcome, tell: Tell) -> None:
    outcome.load = throughput(plan.load, plan.backend)
    rate = outcome.load["output_tokens_per_s"]["median"]
    tell(f"{plan.load.model}, {plan.load.requests} requests at once: {rate:,.1f} output tokens/s")


def as_json(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """The outcome as a JSON object."""
    steps = [{**asdict(step), "times_floor": step.times_floor} for step in outcome.steps]
    return {"plan": asdict(plan), "outcome": {**asdict(outcome), "steps": steps}}
