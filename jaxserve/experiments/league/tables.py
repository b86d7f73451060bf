"""The tables of the league's page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean, median

from jaxserve.experiments.common.page import table
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
    worst, the cut-down cases, and plans."""
    sizes = sorted(next(iter(standings.found.plans.values())))
    header = [*_SHARES, "optimum", *(f"plan of {size:,}, ms" for size in sizes)]
    rows = []
    for policy in standings.policies:
        gap, plans = standings.gap(policy), standings.found.plans[policy]
        optimum = "-" if gap is None else f"{100 * gap:+.1f}"
        rows.append(
            [*_shares(standings, policy), optimum, *(f"{plans[size]:.2f}" for size in sizes)]
        )
    return _by_load(standings, header, rows)


def by_rule(standings: Standings, rule: str) -> str:
    """The same by another rule, without what does not depend on it."""
    other = standings.ruled(rule)
    return _by_load(other, list(_SHARES), [_shares(other, policy) for policy in other.policies])


_SHARES = ("all", "least", "where")


def _by_load(standings: Standings, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(["policy", *standings.loads, *header], rows)


def _shares(standings: Standings, policy: str) -> list[str]:
    worst = standings.worst(policy)
    loads = [standings.share(policy, standings.where(load=load)) for load in standings.loads]
    return [
        f"`{label(policy)}`",
        *(f"{100 * share:.1f}" for share in (*loads, standings.share(policy))),
        f"{100 * standings.relative(worst, policy):.1f}",
        _place(worst),
    ]


def _place(point: Point) -> str:
    return f"{point.workload}, {point.load}, {_short(point.system)}"


def against_others(standings: Standings, policy: str) -> str:
    """A row a load: the policy in percent of the best of all others, by both rules."""
    header, rows = ["load"], []
    rules = {"goodput": "papers' rule", "with_gap": "with the longest gap"}
    for words in rules.values():
        header += [f"{words}: mean", "least", "where"]
    for load in [*standings.loads, None]:
        row = [load or "all"]
        for rule in rules:
            other = standings.ruled(rule).against_others(policy)
            points = other.where(load=load) if load else other.points
            worst = other.worst(policy, points)
            shares = (other.share(policy, points), other.relative(worst, policy))
            row += [*(f"{100 * share:.1f}" for share in shares), _place(worst)]
        rows.append(row)
    return table(header, rows)


def fairness(standings: Standings) -> str:
    """A row a policy: what the points above saturation say of who waits, and of work done twice."""
    points = [p for p in standings.points if p.load not in ("below", "at")]
    rows = []
    for policy in standings.policies:
        row = [f"`{label(policy)}`"]
        for name, _, factor, form, of in FAIRNESS:
            values = standings.numbers(policy, points, name)
            row.append(format(factor * of(values), form) if values else "-")
        rows.append(row)
    return table(["policy", *(title for _, title, *_ in FAIRNESS)], rows)


# Of `LeagueNumbers`: what the page calls it, in which unit, how it is written, and of which value.
FAIRNESS: tuple[tuple[str, str, float, str, Callable[[list[float]], float]], ...] = (
    ("longest_wait", "longest wait, s", 1.0, ".0f", max),
    ("longest_wait", "median, s", 1.0, ".1f", median),
    ("overtaken", "longest overtaken, s", 1.0, ".0f", max),
    ("paused", "paused over 5 s, %", 100.0, ".1f", fmean),
    ("fair_lengths", "Jain over lengths", 1.0, ".2f", fmean),
    ("fair_tenants", "Jain over parts", 1.0, ".2f", fmean),
    ("recomputed", "computed again, %", 100.0, ".1f", fmean),
    ("floor", "best-effort floor, %", 100.0, ".0f", min),
)


def winners(standings: Standings) -> str:
    """A row a kind of workload and load: the two best there, and those of SHOWN that take part."""
    shown = [name for name in SHOWN if name in standings.entrants]
    header = ["workloads", "load", "the best", "%", "the next", "%"]
    rows = []
    for kind, load in product(kinds(standings), standings.loads):
        points = standings.where(kind=kind, load=load)
        if not points:
            continue
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
    ("with_gap", "with the longest gap, %", 100.0, ".1f"),
    ("goodput", "goodput, 1/s", 1.0, ".3g"),
    ("throughput", "tokens/s", 1.0, ".4g"),
    ("ttft_p99", "P99 TTFT, s", 1.0, ".3g"),
    ("tbt_p99", "P99 TBT, s", 1.0, ".3g"),
    ("latency", "normalised latency, s", 1.0, ".3g"),
    ("preemptions", "preemptions a request", 1.0, ".2g"),
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
