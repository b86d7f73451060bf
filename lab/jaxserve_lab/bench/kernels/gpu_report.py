"""The results of `jaxserve bench gpu` as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from jaxserve_lab.bench.kernels.gpu_outcome import Outcome, Plan

TEMPLATE = Path(__file__).with_name("gpu.md.j2")


def page(plan: Plan, outcome: Outcome, about: dict[str, Any]) -> str:
    """The result as a Markdown page. about: date, machine and versions."""
    text = TEMPLATE.read_text(encoding="utf-8")
    template = jinja2.Template(text, trim_blocks=True, keep_trailing_newline=True)
    ran = [check for check in outcome.checks if not check.why]
    rows = targets(outcome)
    return template.render(plan=plan, outcome=outcome, about=about, ran=ran, targets=rows)


def targets(outcome: Outcome) -> list[tuple[str, str, str]]:
    """(target, measured, met or missed) for the measurements."""
    rows: list[tuple[str, str, str]] = []

    def add(text: str, value: float, met: bool, shown: str) -> None:
        rows.append((text, shown.format(value), "met" if met else "**missed**"))

    # A kernel that the clock missed meets no target.
    seen = [timed for timed in outcome.kernels if timed.seconds > 0]
    by_name = {(timed.model, timed.kernel): timed for timed in reversed(seen)}  # the first dtype's
    for timed in seen:
        model, kernel = timed.model, timed.kernel
        if kernel == "decode attention":
            share = timed.copy_share
            text = f"{model}: decode attention, {timed.dtype}, at 85% of the copy rate"
            add(text, share, share >= 0.85, "{:.1%}")
        elif kernel == "prefill attention":
            share = timed.matmul_share
            text = f"{model}: prefill attention, {timed.dtype}, at 50% of the matrix product's rate"
            add(text, share, share >= 0.5, "{:.1%}")
        elif kernel == "absorbed hidden decode" and (model, "decode attention") in by_name:
            ratio = timed.seconds / by_name[model, "decode attention"].seconds
            text = f"{model}: absorbed hidden decode in 1.2 times the KV kernel's time"
            add(text, ratio, ratio <= 1.2, "{:.2f}")
    wide: dict[tuple[str, str], float] = {}
    for timed in outcome.products:
        least = wide.setdefault((timed.model, timed.shape), timed.seconds)
        if timed.seconds > 0 and least > 0 and timed.dtype != outcome.products[0].dtype:
            text = f"{timed.model}: products {timed.shape}, {timed.dtype}, no slower than wide ones"
            add(text, timed.seconds / least, timed.seconds <= least, "{:.2f}")
    for step in outcome.steps:
        if step.cache.startswith("KV"):
            about = f"{step.model}, {step.weights}, {step.cache}"
            text = f"{about}: decode step of {step.rows} within 1.25 of its byte floor"
            add(text, step.times_floor, step.times_floor <= 1.25, "{:.2f}")
    return rows
