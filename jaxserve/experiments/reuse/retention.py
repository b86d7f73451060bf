"""The part `retention`: `worth` against `lru`, in a cache alone and simulated with time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from jaxserve.experiments.common.page import table
from jaxserve.experiments.common.processes import worked
from jaxserve.experiments.reuse.replay import distinct_pages, replayed
from jaxserve.experiments.reuse.setting import Setting
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.simulation.simulator import simulate
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.workloads.specs import WorkloadSpec
from jaxserve.sched.workloads.workload import Workload

RETENTIONS = ("lru", "worth")
SHARES = (0.05, 0.1, 0.25, 0.5)  # of the pages that would hold all
SYSTEM, POLICY = "llama-3-8b@h100", "goodput"
TRACE, TIERS = "trace", "two tiers"
TTFT = {"conversation": 2.0, "agent": 5.0, TIERS: 2.0, TRACE: 10.0}  # seconds
RATES = {"conversation": 16.0, "agent": 1.5, TIERS: 16.0}  # requests/s
REQUESTS, FEW = 600, 40
BLOCKS = {TRACE: 512}  # tokens of a page: the trace has its ids for so many
BLOCK = 64


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        workload: Its name.
        retention: Its name.
        share: Of the pages that would hold all, those that there are.
        setting: What the command line says.
    """

    workload: str
    retention: str
    share: float
    setting: Setting


@dataclass(frozen=True)
class Numbers:
    """What comes of it.

    Attributes:
        alone: Share of the prompts' pages that a cache alone finds, of those that one without end
            finds.
        found: Tokens of the prompts that were found, simulated, as a share.
        met: Requests a second within their TTFT; of two tiers the real-time ones.
        seconds: That the device worked.
    """

    alone: float
    found: float
    met: float
    seconds: float


def part(setting: Setting) -> str:
    """Runs the cases, and makes the Markdown. ValueError for a trace that cannot be read."""
    names = ["conversation", "agent", TIERS, *([TRACE] if setting.trace else [])]
    if setting.quick:
        names = names[::2]
    cases = [Case(*one, setting) for one in product(names, RETENTIONS, SHARES)]
    cases.sort(key=lambda case: case.workload != TRACE)  # the longest first
    found = dict(worked(cases, setting.jobs, run))
    rows, ratios = [], []
    for name, share in product(names, SHARES):
        lru, worth = (found[Case(name, each, share, setting)] for each in RETENTIONS)
        ratios.append(worth.met / max(lru.met, 1e-9))
        rows.append(
            [
                name,
                f"{share:.0%}",
                f"{lru.alone:.1%} / {worth.alone:.1%}",
                f"{lru.found:.1%} / {worth.found:.1%}",
                f"{worth.seconds / lru.seconds:.3f}",
                f"{lru.met:.2f} / {worth.met:.2f}",
                f"{ratios[-1]:.3f}",
            ]
        )
    header = ["workload", "pool", "alone", "found", "seconds", "in time, 1/s", "times"]
    return f"""\
`worth` against `lru`: requests a second within their TTFT at {len(rows)} places, least \
{min(ratios):.2f} times (target: 0.99), most {max(ratios):.2f} (target: 1.10).

{table(header, rows)}

pool: share of what would hold all. alone: pages found by a cache alone, of those that one without
end finds, `lru` / `worth`. The others are simulated, policy `{POLICY}` on {SYSTEM}. found: tokens,
of the prompts'. seconds: that the device works, `worth` over `lru`.
"""


def run(case: Case) -> Numbers:
    """Does one."""
    workload, block = made(case.workload, case.setting), BLOCKS.get(case.workload, BLOCK)
    longest = int(workload.lengths.total.max()) // block + 2
    pages = max(int(distinct_pages(workload, block) * case.share), longest)
    alone = replayed(workload, case.retention, pages, block)
    result = simulate(
        POLICY,
        workload,
        system(SYSTEM),
        kv_tokens=max(pages * block, int((workload.prompt_len + workload.limit).max())),
        block_size=block,
        prefix_caching=True,
        retention=case.retention,
    )
    asked = workload.terms.tier == Tier.REALTIME
    requests, met = result.requests, result.met.slo[asked]
    assert requests.found is not None
    return Numbers(
        alone=alone.found / max(alone.asked, 1),
        found=float(requests.found.sum() / workload.prompt_len.sum()),
        met=float(met.sum() / np.nanmax(requests.finish)),
        seconds=float(result.batches.duration.sum()),
    )


def made(name: str, setting: Setting) -> Workload:
    """The workload of that name. ValueError for a trace that cannot be read."""
    count, slo = FEW if setting.quick else REQUESTS, SLO(ttft=TTFT[name])
    if name == TRACE:
        spec = WorkloadSpec(setting.trace, setting.num_requests, rate=setting.rate, slo=slo)
        return replace(spec, max_tokens="length").make_workload(0)
    if name != TIERS:
        spec = WorkloadSpec(name, count, rate=RATES[name], slo=slo, max_tokens="length")
        return spec.make_workload(0)
    parts = [
        WorkloadSpec(
            "conversation", count // 2, rate=RATES[name] / 2, slo=slo, max_tokens="length"
        ).make_workload(seed)
        for seed in (0, 1)
    ]
    terms = parts[1].terms
    batch = replace(terms, tier=np.full(len(terms), Tier.BEST_EFFORT, terms.tier.dtype))
    batch = replace(batch, ttft=np.full(len(terms), np.inf))
    return Workload.merged([parts[0], parts[1].with_terms(batch)])[0]
