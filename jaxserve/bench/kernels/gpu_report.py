"""What `jaxserve bench gpu` found, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.bench.kernels.gpu_outcome import Outcome, Plan
from jaxserve.bench.kernels.kernels import Measured
from jaxserve.group_table import markdown


def page(plan: Plan, outcome: Outcome, about: dict[str, Any]) -> str:
    """The result as a Markdown page. about: date, machine and versions."""
    parts = [
        _title(plan, outcome, about),
        "## Right\n\n" + _checks(outcome),
        "## Kernels\n\n" + _kernels(outcome),
        "## Decode attention by other backends\n\n" + _trials(outcome),
        f"## {plan.step.model}, end to end\n\n" + _end_to_end(plan, outcome),
        "## Against the targets\n\n" + markdown(("target", "measured", ""), targets(outcome)),
    ]
    if outcome.left_out:
        parts.append(f"Left out for lack of time: {', '.join(outcome.left_out)}.")
    parts += [f"**{name}** ended early: {error}" for name, error in outcome.broken.items()]
    return "\n\n".join(parts) + "\n"


def targets(outcome: Outcome) -> list[tuple[str, str, str]]:
    """(target, measured, met or missed) for what was measured."""
    rows: list[tuple[str, str, str]] = []

    def add(text: str, value: float, met: bool, shown: str) -> None:
        rows.append((text, shown.format(value), "met" if met else "**missed**"))

    # A kernel that the clock did not see has met nothing.
    by_name = {(one.model, one.kernel): one for one in outcome.kernels if one.seconds > 0}
    for (model, kernel), one in by_name.items():
        if kernel == "decode attention":
            share = one.copy_share
            add(
                f"{model}: decode attention at 85% of the copy rate", share, share >= 0.85, "{:.1%}"
            )
        elif kernel == "prefill attention":
            share = one.matmul_share
            text = f"{model}: prefill attention at 50% of the matrix product's rate"
            add(text, share, share >= 0.5, "{:.1%}")
        elif kernel == "absorbed hidden decode" and (model, "decode attention") in by_name:
            ratio = one.seconds / by_name[model, "decode attention"].seconds
            text = f"{model}: absorbed hidden decode in 1.2 times the KV kernel's time"
            add(text, ratio, ratio <= 1.2, "{:.2f}")
    for step in outcome.steps:
        if step.cache == "KV":
            text = f"{step.model}: decode step of {step.rows} within 1.25 of its byte floor"
            add(text, step.times_floor, step.times_floor <= 1.25, "{:.2f}")
    return rows


def _title(plan: Plan, outcome: Outcome, about: dict[str, Any]) -> str:
    used = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        "# Performance on a GPU\n\n"
        "Measured, none of it estimated, by\n\n"
        "    jaxserve bench gpu --markdown=gpu.md\n\n"
        f"on {outcome.device}, {about['date']}, {used}; backend `{plan.backend}`."
    )


def _checks(outcome: Outcome) -> str:
    if not outcome.checks:
        return "Not run."
    ran = [check for check in outcome.checks if not check.why]
    wrong = outcome.failed
    said = f"{len(ran)} checks against float64 references, {len(ran) - len(wrong)} right."
    worst: dict[str, float] = {}
    for check in ran:
        worst[check.dtype] = max(worst.get(check.dtype, 0.0), check.error)
    lines = [said, *(f"Largest error, {dtype}: {error:.1e}." for dtype, error in worst.items())]
    bad = [f"- **wrong**: {c.kernel}, {c.shape}, {c.dtype}: {c.error:.1e}" for c in wrong]
    return " ".join(lines) + ("\n\n" + "\n".join(bad) if bad else "")


def _kernels(outcome: Outcome) -> str:
    ceilings = outcome.ceilings
    if not outcome.kernels or ceilings is None:
        return "Not run."
    head = (
        "model", "kernel", "shape", "us", "GB/s", "of copy", "TFLOP/s", "of matmul", "clock",
    )  # fmt: skip
    said = (
        f"Ceilings measured in the same run: copy {ceilings.copy / 1e9:,.0f} GB/s, matrix product "
        f"{ceilings.matmul / 1e12:,.1f} TFLOP/s."
    )
    return said + "\n\n" + markdown(head, [_row(one) for one in outcome.kernels])


def _trials(outcome: Outcome) -> str:
    rows = [
        (one.model, one.backend, f"{one.seconds * 1e6:.1f}", f"{one.own * 1e6:.1f}", one.verdict)
        for one in outcome.trials
    ]
    return markdown(("model", "backend", "us", "own, us", ""), rows) if rows else "None was tried."


def _row(one: Measured) -> Sequence[str]:
    done = [f"{one.flop_per_s / 1e12:.1f}", f"{one.matmul_share:.1%}"]
    return (
        one.model,
        one.kernel,
        one.shape,
        f"{one.seconds * 1e6:.1f}",
        f"{one.bytes_per_s / 1e9:.0f}",
        f"{one.copy_share:.1%}",
        *(done if one.flop_per_s else ["-", "-"]),
        one.clock,
    )


def _end_to_end(plan: Plan, outcome: Outcome) -> str:
    rows = [
        (
            step.cache,
            f"{step.rows} x {step.context}",
            f"{step.seconds * 1e3:.2f}",
            f"{step.floor_bytes / 1e9:.2f}",
            f"{step.floor_seconds * 1e3:.2f}",
            f"{step.times_floor:.2f}",
        )
        for step in outcome.steps
    ]
    head = ("cache", "decode step", "ms", "GB to read", "floor, ms", "x floor")
    parts = [markdown(head, rows) if rows else "Decode step: not run."]
    if outcome.load:
        load, rate = plan.load, outcome.load["output_tokens_per_s"]["median"]
        parts.append(
            f"{load.requests} requests at once, {load.input_len} tokens in and {load.output_len} "
            f"out: {rate:,.0f} output tokens/s (random weights, {load.dtype})."
        )
    return "\n\n".join(parts)
