"""The part `retention`: `worth` against `lru`, in a cache alone and simulated with time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from jaxserve.sched.request import SLO, Tier
from jaxserve.simulator.settings import EngineOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.common.page import table
from jaxserve_lab.experiments.common.processes import worked
from jaxserve_lab.experiments.reuse.replay import distinct_pages, replayed
from jaxserve_lab.experiments.reuse.setting import Setting

RETENTIONS = ("lru", "worth")
SHARES = (0.05, 0.1, 0.25, 0.5)  # of the pages that would hold all
SYSTEM, POLICIES, SEEDS = "llama-3-8b@h100", ("goodput", "sarathi"), (0, 1)
TRACE, TIERS = "trace", "two tiers"
TTFT = {"conversation": 0.5, "agent": 1.0, TIERS: 0.5, TRACE: 3.0}  # seconds
RATES = {"conversation": 8.0, "agent": 1.0, TIERS: 8.0}  # requests/s
REQUESTS, FEW = {"conversation": 2000, "agent": 1200, TIERS: 2000}, 40
BLOCKS = {TRACE: 512}  # tokens of a page: the trace has its ids for so many
BLOCK = 64


@dataclass(frozen=True)
class RetentionCase:
    """A run.

    Attributes:
        workload: Its name.
        policy: Its name.
        retention: Its name.
        share: Of the pages that would hold all, those that there are.
        seed: Of the workload.
        setting: What the command line says.
    """

    workload: str
    policy: str
    retention: str
    share: float
    seed: int
    setting: Setting


@dataclass(frozen=True)
class Numbers:
    """What comes of it.

    Attributes:
        alone: Pages of the prompts that a cache alone finds.
        met: Share of the requests that meet their TTFT; of two tiers, of the real-time ones.
        seconds: That the device worked.
    """

    alone: float
    met: float
    seconds: float


def part(setting: Setting) -> str:
    """Runs the cases, and makes the Markdown. ValueError for a trace that cannot be read."""
    names = ["conversation", "agent", TIERS, *([TRACE] if setting.trace else [])]
    policies: tuple[str, ...] = POLICIES
    shares: tuple[float, ...] = SHARES
    if setting.quick:
        names, policies, shares = names[::2], policies[:1], shares[2:]
    places = [
        (name, policy, share, seed)
        for name, policy, share in product(names, policies, shares)
        for seed in (SEEDS if name != TRACE else SEEDS[:1])
    ]
    cases = [
        RetentionCase(name, policy, kind, share, seed, setting)
        for name, policy, share, seed in places
        for kind in RETENTIONS
    ]
    cases.sort(key=lambda case: case.workload != TRACE)  # the longest first
    found = dict(worked(cases, setting.jobs, run))
    rows, ratios = [], []
    for name, share in product(names, shares):
        row = [name, f"{share:.0%}"]
        for policy in policies:
            seeds = [at[3] for at in places if at[:3] == (name, policy, share)]
            lru, worth = (
                [found[RetentionCase(name, policy, kind, share, seed, setting)] for seed in seeds]
                for kind in RETENTIONS
            )
            if policy == POLICIES[0]:
                row.append(f"{_times(worth, lru, 'alone'):.3f}")
            times = [two.met / max(one.met, 1e-9) for one, two in zip(lru, worth, strict=True)]
            ratios.append(fmean(times))
            error = f" ± {stdev(times) / len(times) ** 0.5:.3f}" if len(times) > 1 else ""
            row.append(f"{fmean(one.met for one in lru):.1%}")
            row.append(f"{ratios[-1]:.3f}{error}")
            row.append(f"{_times(worth, lru, 'seconds'):.3f}")
        rows.append(row)
    loads = "; ".join(
        f"{name}: {REQUESTS[name]:,} requests, {RATES[name]:g}/s, TTFT {TTFT[name]:g} s"
        for name in names
        if name != TRACE
    )
    if setting.trace:
        loads += f"; trace: {Path(setting.trace).stem}, TTFT {TTFT[TRACE]:g} s"
        loads += f", the first {setting.num_requests:,}" if setting.num_requests else ""
        loads += f", {setting.rate:g}/s" if setting.rate else ""
    each = [f"{title}, {policy}" for policy in policies for title in ("`lru`", "times", "seconds")]
    header = ["workload", "pool", "found alone", *each]
    good, bad = (sum(map(test, ratios)) for test in ((1.1).__le__, (0.99).__gt__))
    return f"""\
| `worth` against `lru`, {len(ratios)} places | target | measured |
|---|---|---|
| goodput, worst | 0.99 | {min(ratios):.3f}; {bad} below |
| goodput, best | 1.10 | {max(ratios):.3f}; {good} at it |

{table(header, rows)}

pool: share of what would hold all. All but `lru` are `worth` over `lru`. found alone: pages that a
cache alone finds. By policy: requests within their TTFT with `lru`, of two tiers those of the
real-time half; how many times as many with `worth`, mean of {len(SEEDS)} seeds and its standard
error (the trace is one); seconds that the device works. {SYSTEM}, simulated; {loads}.
"""


def _times(new: Sequence[Numbers], old: Sequence[Numbers], name: str) -> float:
    """Mean ratio of one of their numbers."""
    return fmean(
        getattr(a, name) / max(getattr(b, name), 1e-9) for a, b in zip(new, old, strict=True)
    )


def run(case: RetentionCase) -> Numbers:
    """Does one."""
    workload, block = made(case.workload, case.setting, case.seed), BLOCKS.get(case.workload, BLOCK)
    longest = int(workload.lengths.total.max()) // block + 2
    pages = max(int(distinct_pages(workload, block) * case.share), longest)
    alone = 0
    if case.policy == POLICIES[0]:  # once is enough
        alone = replayed(workload, case.retention, pages, block).found
    result = simulate(
        case.policy,
        workload,
        system(SYSTEM),
        engine=EngineOptions(
            kv_tokens=max(pages * block, int((workload.prompt_len + workload.limit).max())),
            block_size=block,
            prefix_caching=True,
            retention=case.retention,
        ),
    )
    return Numbers(
        alone=alone,
        met=float(result.attained[workload.terms.tier == Tier.REALTIME].mean()),
        seconds=float(result.batches.duration.sum()),
    )


def made(name: str, setting: Setting, seed: int = 0) -> Workload:
    """The workload of that name. ValueError for a trace that cannot be read."""
    slo = SLO(ttft=TTFT[name])
    if name == TRACE:
        spec = WorkloadSpec(setting.trace, setting.num_requests, rate=setting.rate, slo=slo)
        return replace(spec, max_tokens="length").make_workload(seed)
    count = FEW if setting.quick else REQUESTS[name]
    talks = "conversation" if name == TIERS else name
    spec = WorkloadSpec(talks, count, rate=RATES[name], slo=slo, max_tokens="length")
    if name != TIERS:
        return spec.make_workload(seed)
    half = replace(spec, num_requests=count // 2, rate=RATES[name] / 2)
    parts = [half.make_workload(each) for each in (2 * seed, 2 * seed + 1)]
    terms = parts[1].terms
    batch = replace(terms, tier=np.full(len(terms), Tier.BEST_EFFORT, terms.tier.dtype))
    batch = replace(batch, ttft=np.full(len(terms), np.inf))
    return Workload.merged([parts[0], parts[1].with_terms(batch)])[0]
