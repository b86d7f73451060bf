"""The Azure conversation hour with the 70B constants (InferMax section 6, Figure 16)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jaxserve.experiments.common.claims import Row, Section
from jaxserve.experiments.common.figures import bars
from jaxserve.experiments.common.grid import UNLIMITED, Case, Results

SYSTEM = "llama-3-70b@4xa100"
M = 100_000
BOUND = "vllm, M unlimited"
Switches = tuple[tuple[str, bool | str], ...]
PC: Switches = (("full_prefill", True),)
PLAIN = ("vllm", "sarathi", "sarathi_pc")
FREE = ("vllm+ef", "sarathi+ef", "sarathi_pc+ef")
INFERMAX: dict[str, Switches] = {
    "infermax": (*PC, ("expect", "candidate")),
    "infermax, sorting only": (*PC, ("expect", "nothing")),
    "infermax, histogram only": (*PC, ("expect", "candidate"), ("longest_first", False)),
    "infermax, reserve for all": (*PC, ("expect", "running")),
    "infermax, P = 512": (("full_prefill", False), ("expect", "candidate")),
}
TITLE = "7. `infermax` on the Azure conversation hour, 70B (section 6, Figure 16)"


def runs(trace: str, requests: int | None) -> dict[str, Case]:
    """Every scheduler with M, by its label; first the bound: `vllm` without a limit of memory."""

    def case(policy: str, kv_tokens: int = M, switches: Switches = ()) -> Case:
        return Case(policy, trace, kv_tokens, requests, SYSTEM, switches)

    return {
        BOUND: case("vllm", UNLIMITED),
        **{policy: case(policy) for policy in (*PLAIN, *FREE)},
        **{label: case("infermax", switches=switches) for label, switches in INFERMAX.items()},
    }


def cases(trace: str, requests: int | None) -> list[Case]:
    """Those of `runs`. trace: the CSV's path; requests: its first so many, None for all."""
    return list(runs(trace, requests).values())


def section(trace: str, requests: int | None, results: Results, figures: Path) -> Section:
    """Section 7 of the page: latency of the deployable schedulers, of `infermax` and of its two
    halves, and the bound with unlimited M. Writes one bar chart; KeyError if `results` lacks one
    of `cases`."""
    found = {label: results[case] for label, case in runs(trace, requests).items()}

    def times(labels: Iterable[str]) -> str:
        return ", ".join(f"{found[label].latency:,.0f} s ({label})" for label in labels)

    def against(label: str) -> str:
        plain = [found[policy].latency for policy in PLAIN]
        ours = found[label].latency
        return f"{ours / min(plain) - 1:+.1%} and {ours / max(plain) - 1:+.1%}"

    rows = [
        Row("deployable schedulers take about 7K s", times(PLAIN)),
        Row(
            "`infermax` takes about 6K s",
            f"{times(INFERMAX)}; against the best and the worst of the three above: "
            f"{against('infermax')}",
            WHY["infermax"],
        ),
        Row("the bound with unlimited M is about 5K s", times([BOUND])),
        Row("`infermax` beats the eviction-free schedulers", times(FREE), WHY["free"]),
    ]
    name = "infermax-16-azure.png"
    labels = [label.replace("+", "\n+").replace(", ", ",\n") for label in found]
    bars(figures / name, labels, [n.latency for n in found.values()], "sum of batch times, s")
    lines = [
        "| scheduler | latency, s | TTFT, s | TPOT, s | batches | preemptions | M in use |",
        "|---" * 7 + "|",
    ]
    for label, n in found.items():
        used = "-" if label == BOUND else f"{n.kv_used:.0%}"
        lines.append(
            f"| {label} | {n.latency:,.1f} | {n.ttft:,.2f} | {n.tpot:.4f} | {n.batches:,} | "
            f"{n.preemptions:,} | {used} |"
        )
    bound = found[BOUND]
    return Section(
        TITLE,
        f"{Path(trace).name}: {bound.requests:,} requests, {bound.output_tokens:,} tokens out; "
        f"Llama-3-70B on four A100s, C = 16,384, M = {M:,}, arrivals as in the trace. *sorting*: "
        "long requests run first and short ones are preempted; *histogram*: a request starts if "
        "the memory that it is expected to end with is free. `infermax` is both. *Reserve for "
        "all*: a start also leaves free what those that run are expected to take yet "
        "(`expect=running`).",
        rows,
        [(name, "Sum of batch times, in seconds")],
        ["\n".join(lines)],
    )


def skipped() -> Section:
    """In place of `section` where no trace was given: how to get one."""
    return Section(
        TITLE,
        "Not run: the trace is not part of jaxserve. Give its path with `--azure=PATH` "
        "(AzureLLMInferenceTrace_conv.csv of the Azure public dataset).",
        [],
        [],
        [],
    )


WHY = {
    "infermax": (
        "The paper does not give P here. With P = 512 prefills trickle into batches of up to C = "
        "16,384 tokens, and `sarathi` loses as much to `sarathi_pc`; so `infermax` has P = C. Its "
        "reserve is that of section 3.1: only what the candidate itself is expected to end with "
        "has to be free. With a reserve for all, next to nothing is preempted, so that the "
        "sorting has nothing to do, and memory stays idle."
    ),
    "free": (
        "They know every output's length to the token, and keep memory free for all of it from "
        "the start; `infermax` guesses, lets more requests run in the memory that others will "
        "need only later, and refills the short ones where that was too many. Its guesses are "
        "bounded by the limit that a server would give, not by the true length."
    ),
}
