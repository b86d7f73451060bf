"""The advice as a table, the flags to serve with, and a few sentences why; and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxserve.config import CacheConfig
from jaxserve.sched.request import Rule
from jaxserve.simulator.advise.margins import DEFAULT, Margin, margin, score
from jaxserve.simulator.advise.rounds import Advice, equals
from jaxserve.simulator.group_table import aligned
from jaxserve.simulator.simulate.spread import LEVEL
from jaxserve.simulator.simulate.sweep import Point
from jaxserve.simulator.simulator import MAX_ROWS

_TARGETS = {"ttft": "TTFT", "tbt": "TBT", "jct": "JCT", "max_tbt": "longest TBT"}


def report(advice: Advice) -> str:
    """The whole advice as text, for people."""
    lines = [_setting(advice), "", _table(advice), *_notes(advice), ""]
    lines += [_verdict(advice), why(advice), *_other_rates(advice)]
    return "\n".join([*lines, "", f"    jaxserve serve {' '.join(serve_flags(advice.best))}"])


def as_json(advice: Advice) -> dict[str, Any]:
    """The advice, ready for JSON.

    `policy`, `flags` and `why` describe the best policy. `within_noise`: policies that are as good.
        `ranking`: every policy with its seeds, attainment, goodput, and how far its attainment is
        behind the best's, with half of the interval. `rates`: attainments by policy at other rates.
        `refused`: why other policies are left out.
    """
    return {
        "policy": advice.best.run.policy,
        "flags": serve_flags(advice.best),
        "why": why(advice),
        "within_noise": [one.run.policy for one in advice.equal],
        "ranking": [_ranked(advice, one) for one in advice.points],
        "rates": [
            {"rate": rate, "attainment": {p.run.policy: score(p)[0] for p in points}}
            for rate, points in advice.elsewhere.items()
        ],
        "refused": advice.refused,
    }


def serve_flags(point: Point) -> list[str]:
    """The flags for a server with the simulated settings."""
    run, limits = point.run, point.run.limits()
    flags = [f"--policy={run.policy}"]
    values = {
        "max_batch_tokens": limits.max_batch_tokens,
        "max_prefill_tokens": limits.max_prefill_tokens,
        "max_rows": None if limits.max_rows >= MAX_ROWS else limits.max_rows,
        "max_queue": run.max_queue,
    }
    if run.prefix_caching != CacheConfig.prefix_caching:
        flags.append(f"--config.cache.prefix_caching={str(run.prefix_caching).lower()}")
    return flags + [
        f"--config.scheduler.{name}={value}" for name, value in values.items() if value is not None
    ]


def why(advice: Advice) -> str:
    """One sentence on why to choose this policy."""
    best, others = advice.best, [one for one in advice.equal if one is not advice.best]
    default = next((one for one in advice.points if one.run.policy == DEFAULT), None)
    base = default if default is not None and default is not best else _next(advice)
    if best.run.policy == DEFAULT and others:
        return f"It makes no difference, and {DEFAULT} is what the server does by itself."
    if base is None:
        return "There is no other to compare it with."
    found = margin(best, base)
    if not found.matters:
        return f"It cannot be told from {base.run.policy}, but is the plainer one."
    return (
        f"{_less(found)} than with {base.run.policy}{_parts(best, base)}: "
        f"{score(best)[0]:.1%} against {score(base)[0]:.1%}."
    )


def _next(advice: Advice) -> Point | None:
    """The best policy that differs significantly from the chosen one; otherwise the next best."""
    apart = [one for one in advice.points if one not in advice.equal]
    others = apart or [one for one in advice.points if one is not advice.best]
    return others[0] if others else None


def _less(found: Margin) -> str:
    width = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    points = 100 * found.attainment
    if abs(points) < 0.05:
        return f"As many requests attain their SLO, but {100 * found.goodput:.1f}% more a second"
    return f"{points:.1f}{width} points more of the requests attain their SLO"


def _parts(best: Point, base: Point) -> str:
    """The target that gains most, and the class or tier that gains most."""
    ours, theirs = best.mean, base.mean
    gains = {
        named: ours[f"{name}_attainment"] - theirs[f"{name}_attainment"]
        for name, named in _TARGETS.items()
        if ours[f"{name}_attainment"] is not None  # no request has that target
    }
    target = max(gains, key=lambda name: gains[name])
    if gains[target] <= 0:
        return ""
    where = ""
    for key, kind in (("classes", "class"), ("tiers", "tier")):
        shared = ours[key].keys() & theirs[key].keys()
        if len(shared) > 1:
            gained = {name: _met(ours[key][name]) - _met(theirs[key][name]) for name in shared}
            where = f", most of them of {kind} {max(sorted(gained), key=lambda n: gained[n])}"
            break
    return f" ({100 * gains[target]:.1f} more their {target}{where})"


def _met(group: dict[str, Any]) -> float:
    """How many of the group's requests attain their SLO."""
    slo = group["slo"]
    return float(group["requests"] * (1.0 if slo is None else slo["attainment"]))


def _verdict(advice: Advice) -> str:
    name, others = advice.best.run.policy, [p.run.policy for p in advice.equal]
    if len(others) == 1:
        return f"Take {name}."
    return f"Any of these, which are within noise of each other: {', '.join(others)}. Take {name}."


def _other_rates(advice: Advice) -> Iterator[str]:
    """Rates at which another policy would be better."""
    for rate, points in advice.elsewhere.items():
        good = equals(points)
        if advice.best.run.policy in [one.run.policy for one in good]:
            continue
        first = max(good, key=score)
        own = next(one for one in points if one.run.policy == advice.best.run.policy)
        yield (
            f"At {rate:g}/s {first.run.policy} would be better: {score(first)[0]:.1%} of the "
            f"requests attain their SLO, and {score(own)[0]:.1%} with {own.run.policy}."
        )


def _setting(advice: Advice) -> str:
    run, outcome = advice.best.run, advice.best.outcomes[0]
    rate = "" if run.rate is None else f" at {run.rate:g} requests/s"
    count = outcome.numbers["num_requests"]
    return f"{count:,} requests of {run.workload.lengths}{rate}, on {run.system_name}"


def _table(advice: Advice) -> str:
    rates = list(advice.elsewhere)
    best = advice.best.run.policy
    header = ["policy", "seeds", "SLO", f"less than {best}, points", "goodput less, %"]
    lines = [[*header, *(f"SLO at {rate:g}/s" for rate in rates)]]
    for point in advice.points:
        cells = [point.run.policy, str(len(point.outcomes)), f"{score(point)[0]:.1%}"]
        cells += ["", ""] if point is advice.best else _behind(margin(advice.best, point))
        for rate in rates:
            there = [p for p in advice.elsewhere[rate] if p.run.policy == point.run.policy]
            cells.append(f"{score(there[0])[0]:.1%}" if there else "")
        lines.append(cells)
    return aligned(lines)


def _behind(found: Margin) -> list[str]:
    """How far a policy is behind, compared on the same seeds only, since others have other
    requests."""
    pairs = (
        (found.attainment, found.half_width),
        (found.goodput, found.goodput_half_width),
    )
    widths = ("" if width is None else f" ±{100 * width:.1f}" for _, width in pairs)
    return [f"{100 * less:.1f}{width}" for (less, _), width in zip(pairs, widths, strict=True)]


def _notes(advice: Advice) -> list[str]:
    notes = [
        f"SLO: {Rule.SERVER.value},",
        "of each policy's own seeds. Less: of those that it and the best both have, with half of",
        f"the {LEVEL:.0%} interval of the difference, over them or, of one, over its requests",
    ]
    short = next((one.short for one in advice.points if one.short), "")
    notes += [short] if short else []
    return notes + [f"not compared: {line}" for line in advice.refused]


def _ranked(advice: Advice, point: Point) -> dict[str, Any]:
    attainment, goodput = score(point)
    found = margin(advice.best, point)
    return {
        "policy": point.run.policy,
        "seeds": list(point.seeds),
        "attainment": attainment,
        "goodput_per_s": goodput,
        "less_than_best": found.attainment,
        "half_width": found.half_width,
        "mean": point.mean,
    }
