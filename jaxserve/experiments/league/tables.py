"""The tables of the league's page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from jaxserve.experiments.common.page import table
from jaxserve.experiments.league.collect import LOADS
from jaxserve.experiments.league.standings import Point, Standings, label
from jaxserve.experiments.league.workloads import SYSTEMS, WORKLOADS, Part
from jaxserve.sched.request import Tier

KINDS = tuple(dict.fromkeys(entry.kind for entry in WORKLOADS.values()))
SHOWN = ("sarathi", "vllm")  # beside the best: what most servers run


def kinds(standings: Standings) -> list[str]:
    """The groups of workloads that the league has."""
    there = {point.kind for point in standings.points}
    return [kind for kind in KINDS if kind in there]


def overall(standings: Standings) -> str:
    """A row a policy, the best first: shares of the best policy's goodput by load, where it is
    worst, plans, and the cut-down cases."""
    sizes = sorted(next(iter(standings.found.plans.values())))
    header = ["policy", *LOADS, "all", "worst", "where", "optimum", "longest overtaken, s"]
    header += ["median, s", *(f"plan of {size:,}, ms" for size in sizes)]
    rows = []
    for policy in standings.policies:
        worst, gap = standings.worst(policy), standings.gap(policy)
        loads = [standings.share(policy, standings.where(load=load)) for load in LOADS]
        plans = standings.found.plans[policy]
        rows.append(
            [
                f"`{label(policy)}`",
                *(f"{100 * share:.1f}" for share in (*loads, standings.share(policy))),
                f"{100 * standings.relative(worst, policy):.1f}",
                f"{worst.workload}, {worst.load}, {_short(worst.system)}",
                "-" if gap is None else f"{100 * gap:+.1f}",
                *(f"{value:.2f}" for value in standings.overtaken(policy)),
                *(f"{plans[size]:.2f}" for size in sizes),
            ]
        )
    return table(header, rows)


def winners(standings: Standings) -> str:
    """A row a kind of workload and load: the two best there, and those of SHOWN that take part."""
    shown = [name for name in SHOWN if name in standings.entrants]
    header = ["workloads", "load", "the best", "%", "the next", "%"]
    rows = []
    for kind, load in product(kinds(standings), LOADS):
        points = standings.where(kind=kind, load=load)
        first, second = (standings.ranked(points) * 2)[:2]
        share = {name: f"{100 * standings.share(name, points):.1f}" for name in standings.entrants}
        best = [f"`{first}`", share[first], f"`{second}`", share[second]]
        rows.append([kind, load, *best, *(share[name] for name in shown)])
    return table([*header, *(f"`{name}`, %" for name in shown)], rows)


def typical(standings: Standings, system: str, load: str) -> str:
    """A row a policy: medians over the workloads on that system at that load."""
    points = standings.where(system=system, load=load)
    rows = []
    for policy in standings.policies:
        row = [f"`{label(policy)}`", f"{100 * standings.share(policy, points):.1f}"]
        for name, _, factor, form in NUMBERS:
            value = standings.typical(policy, points, name)
            row.append("-" if value is None else format(factor * value, form))
        rows.append(row)
    return table(["policy", "of the best, %", *(title for _, title, _, _ in NUMBERS)], rows)


# Of `LeagueNumbers`: what the page calls it, in which unit, and how it is written.
NUMBERS = (
    ("attainment", "attainment, %", 100.0, ".1f"),
    ("goodput", "goodput, 1/s", 1.0, ".3g"),
    ("throughput", "tokens/s", 1.0, ".4g"),
    ("ttft_p99", "P99 TTFT, s", 1.0, ".3g"),
    ("tbt_p99", "P99 TBT, s", 1.0, ".3g"),
    ("latency", "normalised latency, s", 1.0, ".3g"),
    ("worst", "worst request, s", 1.0, ".4g"),
    ("preemptions", "preemptions a request", 1.0, ".2g"),
    ("overtaken", "overtaken, s", 1.0, ".3g"),
)


def details(standings: Standings, point: Point) -> str:
    """A row a policy, the best first: means over the seeds with their intervals."""
    parts = WORKLOADS[point.workload].parts
    numbers = list(NUMBERS)
    if any(part.tier == Tier.BEST_EFFORT for part in parts):
        numbers += TIERS
    rows = []
    for policy in [*standings.own, *standings.ranked([point])]:
        row = [f"`{label(policy)}`"]
        for name, _, factor, form in numbers:
            found = standings.number(point, policy, name)
            row.append("-" if found is None else found.text(form, factor))
        rows.append(row)
    return table(["policy", *(title for _, title, _, _ in numbers)], rows)


TIERS = (
    ("realtime", "real-time attainment, %", 100.0, ".1f"),
    ("best_effort", "best-effort attainment, %", 100.0, ".1f"),
)


def settings(standings: Standings, workloads: Sequence[str], traces: Sequence[str]) -> str:
    """A table with a row a workload: what it is, its targets, and the rate that saturates each
    system. traces: workloads that come from a trace, not drawn."""
    systems = list(dict.fromkeys(point.system for point in standings.points))
    header = ["workload", "from", "requests", "targets"]
    header += [f"saturates {_short(system)} at, 1/s" for system in systems]
    rows = []
    for name in workloads:
        entry = WORKLOADS[name]
        drawn = ", ".join(_part(part) for part in entry.parts)
        gaps = "" if entry.cv == 1 else f", gaps of CV {entry.cv:g}"
        cells = []
        for system in systems:
            found = standings.found.saturations.get((system, name))
            cells.append("-" if found is None else f"{found.rate:g} ({found.count:,} requests)")
        rows.append(
            [
                f"`{name}`",
                entry.source,
                "the hour's own" if name in traces else drawn + gaps,
                "; ".join(dict.fromkeys(_targets(part, systems) for part in entry.parts)),
                *cells,
            ]
        )
    return table(header, rows)


def _part(part: Part) -> str:
    share = "" if part.share == 1 else f"{100 * part.share:g}% "
    tier = ", best-effort" if part.tier == Tier.BEST_EFFORT else ""
    return f"{share}`{part.lengths}`{tier}"


def _targets(part: Part, systems: Sequence[str]) -> str:
    """The targets by system: `TTFT 1 / 2 s`."""
    if part.targets is None:
        return "drawn as AccelGen's"
    words = []
    for name in ("ttft", "tbt", "jct"):
        values = [getattr(part.targets[system], name) for system in systems]
        if values[0] is not None:
            words.append(f"{name.upper()} {' / '.join(dict.fromkeys(f'{v:g}' for v in values))} s")
    return ", ".join(words)


def _short(system: str) -> str:
    """A name for a narrow column."""
    return SYSTEMS[system].partition(" on ")[0]
