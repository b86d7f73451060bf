"""The Azure conversation hour with the 70B constants (InferMax section 6, Figure 16)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.comparisons import Row, Section
from jaxserve.experiments.figures import bars
from jaxserve.experiments.grid import UNLIMITED, Case, Results

SYSTEM = "llama-3-70b@4xa100"
M = 100_000
POLICIES = ("vllm", "sarathi", "sarathi_pc", "vllm+ef", "sarathi+ef", "sarathi_pc+ef", "infermax")
TITLE = "7. `infermax` on the Azure conversation hour, 70B (section 6, Figure 16)"


def case(policy: str, trace: str, requests: int | None, kv_tokens: int = M) -> Case:
    return Case(policy, trace, kv_tokens, requests, SYSTEM)


def cases(trace: str, requests: int | None) -> Iterator[Case]:
    """Every scheduler with M, and the bound: `vllm` without a limit of memory."""
    for policy in POLICIES:
        yield case(policy, trace, requests)
    yield case("vllm", trace, requests, UNLIMITED)


def section(trace: str, requests: int | None, results: Results, figures: Path) -> Section:
    found = {policy: results[case(policy, trace, requests)] for policy in POLICIES}
    bound = results[case("vllm", trace, requests, UNLIMITED)]
    plain = {policy: found[policy].latency for policy in ("vllm", "sarathi", "sarathi_pc")}
    ours = found["infermax"].latency
    free = {policy: n.latency for policy, n in found.items() if policy.endswith("+ef")}
    total = " / ".join(f"{value:,.0f} s (`{policy}`)" for policy, value in plain.items())
    best = min(plain.values())
    rows = [
        Row("deployable schedulers take about 7K s", total, WHY["plain"]),
        Row(
            "`infermax` takes about 6K s",
            f"{ours:,.0f} s: {ours / best - 1:+.1%} against the best of them, "
            f"{ours / max(plain.values()) - 1:+.1%} against the worst",
            WHY["infermax"],
        ),
        Row("the bound with unlimited M is about 5K s", f"{bound.latency:,.0f} s", WHY["bound"]),
        Row(
            "`infermax` beats the eviction-free schedulers, which evict nothing",
            " / ".join(f"{value:,.0f} s (`{policy}`)" for policy, value in free.items()),
            WHY["free"],
        ),
    ]
    name = "infermax-16-azure.png"
    names = ["vllm,\nM unlimited", *(policy.replace("+", "\n+") for policy in POLICIES)]
    latencies = [bound.latency, *(found[policy].latency for policy in POLICIES)]
    bars(figures / name, names, latencies, "sum of batch times, s")
    lines = [
        "| scheduler | latency, s | TTFT, s | TPOT, s | batches | evictions | M in use |",
        "|---" * 7 + "|",
    ]
    for label, n in [("`vllm`, M unlimited", bound), *((f"`{p}`", n) for p, n in found.items())]:
        used = "-" if n is bound else f"{n.kv_used:.0%}"
        lines.append(
            f"| {label} | {n.latency:,.1f} | {n.ttft:,.2f} | {n.tpot:.4f} | {n.batches:,} | "
            f"{n.evictions:,} | {used} |"
        )
    return Section(
        TITLE,
        f"{Path(trace).name}: {bound.requests:,} requests, {bound.output_tokens:,} tokens out; "
        f"Llama-3-70B on four A100s, C = 16,384, M = {M:,}, arrivals as in the trace.",
        rows,
        [(name, "Sum of batch times, in seconds")],
        ["\n".join(lines)],
    )


def skipped() -> Section:
    return Section(
        TITLE,
        "Not run: the trace is not part of jaxserve. Give its path with `--azure=PATH` "
        "(AzureLLMInferenceTrace_conv.csv of the Azure public dataset).",
        [],
        [],
        [],
    )


WHY = {"plain": "", "infermax": "", "bound": "", "free": ""}
