"""The tables of the league's page."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.sched.request import Tier
from jaxserve_lab.experiments.common.page import table
from jaxserve_lab.experiments.league.standings import Point, Standings, label
from jaxserve_lab.experiments.league.workloads import SYSTEMS, WORKLOADS, Part

KINDS = tuple(dict.fromkeys(entry.kind for entry in WORKLOADS.values()))


def kinds(standings: Standings) -> list[str]:
    """The groups of workloads that the league has."""
    there = {point.kind for point in standings.points}
    return [kind for kind in KINDS if kind in there]


def overall(standings: Standings) -> str:
    """A row per policy, the best first: shares of the best policy's goodput by load and by the
    other rule, the least of all points, the cut-down cases, and plans."""
    size = max(next(iter(standings.found.plans.values())))
    gaps = standings.ruled("with_gap")
    header = ["policy", *standings.loads, "all", "least", "all, with the longest gap"]
    rows = []
    for policy in standings.policies:
        shares = [standings.share(policy, standings.where(load=load)) for load in standings.loads]
        least = standings.relative(standings.worst(policy), policy)
        shares += [standings.share(policy), least, gaps.share(policy)]
        gap, plan = standings.gap(policy), standings.found.plans[policy][size]
        optimum = "-" if gap is None else f"{100 * gap:+.1f}"
        cells = (f"{100 * share:.1f}" for share in shares)
        rows.append([f"`{label(policy)}`", *cells, optimum, f"{plan:.2f}"])
    return table([*header, "optimum", f"plan of {size:,}, ms"], rows)


def _place(point: Point) -> str:
    return f"{point.workload}, {point.load}, {_short(point.system)}"


def against_others(standings: Standings, policy: str) -> str:
    """A row per load: the policy in percent of the best of all others, by both rules."""
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


def winners(standings: Standings) -> str:
    """A row per kind of workload, a column per load: the best two there, and their shares."""
    rows = []
    for kind in kinds(standings):
        row = [kind]
        for load in standings.loads:
            points = standings.where(kind=kind, load=load)
            best = standings.ranked(points)[:2] if points else []
            named = [f"`{name}` {100 * standings.share(name, points):.0f}" for name in best]
            row.append(", ".join(named) or "-")
        rows.append(row)
    return table(["workloads", *standings.loads], rows)


def settings(standings: Standings, workloads: Sequence[str], traces: Sequence[str]) -> str:
    """A table with a row per workload: what it is, its targets, and the rate that saturates each
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
            cells.append("-" if found is None else f"{found.rate:g}")
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
