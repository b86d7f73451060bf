"""What the page says of the league: sentences, each refused where the numbers do not carry it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

from jaxserve_lab.experiments.common.page import listed
from jaxserve_lab.experiments.league.runs import LASTING
from jaxserve_lab.experiments.league.standings import Standings
from jaxserve_lab.experiments.league.tables import kinds
from jaxserve_lab.experiments.league.workloads import LLAMA, OPT, SYSTEMS, TIERS

EDGE = 0.03  # by which a policy has to lead to be named for a kind of workload
NEAR = 0.9  # of the best policy's goodput: about as good
CLEAR = 0.1  # a difference of shares that is one
PLAN_MS = 1.0  # a plan that takes longer shows in the steps
ABOVE = ("above", "far above", LASTING)  # saturation
Claim = Callable[[Standings], tuple[bool, str]]


class NotCarried(ValueError):
    """Sentences that the numbers do not carry."""


def advice(standings: Standings) -> str:
    """One sentence: what to run when nothing is known, and where something else is better."""
    best, *others = standings.ranked(standings.points)
    following = next(name for name in others if _family(name) != _family(best))
    first = (
        f"If you do not know your traffic, start with `--policy={best}`. Averaged over all "
        f"workloads and loads it reaches {standings.share(best):.0%} of the best policy's goodput; "
        f"the next, `{following}`, reaches {standings.share(following):.0%}."
    )
    better: dict[tuple[str, str], list[str]] = {}  # by the policy, and the kind of workloads
    for kind in kinds(standings):
        for load in standings.loads:
            points = standings.where(kind=kind, load=load)
            if not points:
                continue
            winner = standings.ranked(points)[0]
            share, mine = standings.share(winner, points), standings.share(best, points)
            if share - mine > EDGE:
                where = f"{_at(load)} ({share:.0%} against {mine:.0%})"
                better.setdefault((winner, kind), []).append(where)
    said = [f" For {kind}, `{n}` is better {listed(where)}." for (n, kind), where in better.items()]
    return first + "".join(said)


def _family(policy: str) -> str:
    """The policy of which it is a part or a variant."""
    return policy.partition("_")[0]


def reading(standings: Standings) -> Iterator[str]:
    """The sentences, in order. NotCarried names those of which the numbers say otherwise."""
    found = [claim(standings) for claim in CLAIMS]
    wrong = [sentence for holds, sentence in found if not holds]
    if wrong:
        raise NotCarried("the numbers do not carry: " + " | ".join(wrong))
    yield from (sentence for _, sentence in found)


def by_load(s: Standings) -> tuple[bool, str]:
    """Policies differ above saturation."""
    count = {
        load: sum(s.share(name, s.where(load=load)) >= NEAR for name in s.entrants)
        for load in s.loads
    }
    return count["below"] > 3 * count["above"], (
        f"Below saturation the choice matters less: {count['below']} of {len(s.entrants)} policies "
        f"average at least {NEAR:.0%} of the best policy's goodput. At saturation "
        f"{count['at']} {_does(count['at'])}, above it {count['above']}."
    )


def in_order_of_arrival(s: Standings) -> tuple[bool, str]:
    """Under overload first come, first served is the wrong order."""
    above = s.where(load="above")
    fcfs, lots, short = (s.share(name, above) for name in ("sarathi", "random", "rank_i"))
    return min(lots, short) > fcfs + CLEAR, (
        "Above saturation, first come, first served makes everybody late, since the queue only "
        f"grows: `sarathi` keeps {fcfs:.0%} of the best goodput. With short prompts first "
        f"(`rank_i`) it would be {short:.0%}, and even in random order (`random`) {lots:.0%}."
    )


def last_in_order(s: Standings) -> tuple[bool, str]:
    """Who pays for that, in an overload that lasts."""
    points = s.where(load=LASTING)
    names = dict.fromkeys([*s.ranked(s.points)[:2], "edf", "rank_i", "sarathi"])
    longest = {name: max(s.numbers(name, points, "longest_wait")) for name in names}
    said = [f"`{n}` {s.share(n, points):.0%} and {longest[n]:.0f} s" for n in names]
    return longest["rank_i"] > longest["sarathi"], (
        "Any other order has its losers. Share of the best goodput, and the longest wait for a "
        f"token, in an overload of ten minutes that ends: {listed(said)}."
    )


def mixed_batches(s: Standings) -> tuple[bool, str]:
    """Prompts that stop all decodes."""
    pure, mixed = s.share("vllm"), s.share("vllm_hy")
    slow = {name: s.typical(name, s.where(load="at"), "tbt_p99") or 0.0 for name in ("vllm", "edf")}
    return mixed > pure + EDGE and slow["vllm"] > 2 * slow["edf"], (
        f"Prefill-only batches are costly: `vllm` keeps {pure:.0%}, with decodes beside its "
        f"prompts (`vllm_hy`) {mixed:.0%}. All decodes wait for such a batch: at saturation the "
        f"P99 of times between tokens is {slow['vllm']:.2f} s under `vllm` (median of points) and "
        f"{slow['edf']:.2f} s with the chunks of `edf`."
    )


def chunks(s: Standings) -> tuple[bool, str]:
    """A small P keeps TBT, and costs TTFT."""
    lead: dict[str, dict[str, float]] = {}
    for system, workload in s.found.saturations:
        points = [p for p in s.where(system=system, workload=workload) if p.load in ("at", "above")]
        gain = s.share("sarathi", points) - s.share("sarathi_pc", points)
        model = SYSTEMS[system].partition(" on ")[0]
        lead.setdefault(model, {})[workload] = gain
    small = _by_model(lead, lambda gain: gain > CLEAR)
    large = _by_model(lead, lambda gain: gain < -CLEAR)
    return bool(small and large), (
        "Whether chunks of 512 tokens pay depends on the targets. Where a batch full of prompt "
        "tokens takes longer than the TBT target, `sarathi` is far ahead of `sarathi_pc`, whose "
        f"chunks fill the batch: {small}. Elsewhere small chunks only delay first tokens, and at "
        f"and above saturation it is far behind: {large}."
    )


def tiers(s: Standings) -> tuple[bool, str]:
    """Who may wait, does."""
    points = s.where(kind=TIERS, load="above")
    order = s.ranked(points)
    shares = {name: s.share(name, points) for name in (*order[:3], "priority", "bros", "sarathi")}
    text = ", ".join(f"`{name}` {share:.0%}" for name, share in shares.items())
    best = shares[order[0]]
    return min(best, shares["priority"]) > shares["sarathi"] + CLEAR, (
        f"Several tiers on one server, above saturation, share of the best goodput: {text}. "
        "Policies that know who may wait let them wait; under the others everybody is late."
    )


def unmixed(s: Standings) -> tuple[bool, str]:
    """The two that are never right."""
    last = s.ranked(s.points)[-2:]
    shares = [s.share(name) for name in last]
    return set(last) == {"orca", "sarathi_nohy"}, (
        f"`{last[0]}` ({shares[0]:.0%}) and `{last[1]}` ({shares[1]:.0%}) are always wrong. "
        "`orca` reserves memory for the longest possible output, so a handful of requests fills "
        "the cache; `sarathi_nohy` starts no prompt while anybody decodes."
    )


def hybrid(s: Standings) -> tuple[bool, str]:
    """Hidden caches, where a model's keys and values are larger."""
    opt = [point for point in s.where(system=OPT) if point.load != "below"]
    with_hidden, without = (s.share(name, opt) for name in ("aptserve", "aptserve_kv"))
    same = all(
        s.mean(point, "aptserve", "goodput") == s.mean(point, "aptserve_kv", "goodput")
        for point in s.where(system=LLAMA)
    )
    return with_hidden > without and same, (
        f"Hidden caches bring `aptserve` from {without:.0%} to {with_hidden:.0%} on OPT-13B, at "
        "and above saturation. On Llama-3 they change nothing: with grouped queries, keys and "
        "values are no larger than hidden vectors."
    )


def accelgen(s: Standings) -> tuple[bool, str]:
    """Of the papers' policies."""
    rows = {load: s.ranked(s.where(load=load)).index("accelgen") + 1 for load in s.loads}
    text = ", ".join(f"{row} {_at(load)}" for load, row in rows.items())
    return True, f"`accelgen`, the best of the four papers over all, is number {text}."


def optimum(s: Standings) -> tuple[bool, str]:
    """Distances of the cut-down cases."""
    gaps = {name: gap for name in s.entrants if (gap := s.gap(name)) is not None}
    near, far = min(gaps, key=lambda n: gaps[n]), max(gaps, key=lambda n: gaps[n])
    proven = sum(cut.optimum.proven for cut in s.found.cuts.values())
    return gaps[near] >= 0, (
        f"For six requests of a workload the best schedule can be found ({proven} of "
        f"{len(s.found.cuts)} proven). Policies take {gaps[near]:.0%} (`{near}`) to "
        f"{gaps[far]:.0%} (`{far}`) longer, `sarathi` {gaps['sarathi']:.0%}."
    )


def plans(s: Standings) -> tuple[bool, str]:
    """Host time."""
    size = max(next(iter(s.found.plans.values())))
    slow = [name for name in s.entrants if s.found.plans[name][size] > PLAN_MS]
    quick = len(s.entrants) - len(slow)
    names = listed([f"`{name}` {s.found.plans[name][size]:.1f} ms" for name in slow])
    return quick >= len(s.entrants) // 2, (
        f"{quick} of {len(s.entrants)} policies plan a step of {size:,} requests within "
        f"{PLAN_MS:g} ms" + (f"; not {names}." if slow else ".")
    )


def waiting(s: Standings) -> tuple[bool, str]:
    """How long the order keeps somebody waiting."""
    points = [p for p in s.points if p.load in ABOVE]
    names = dict.fromkeys([*s.ranked(s.points)[:2], "sarathi", "priority", "bros", "random"])
    longest = {n: max(s.numbers(n, points, "overtaken")) for n in names}
    said = [f"`{name}` {longest[name]:.0f} s" for name in names]
    return longest["sarathi"] < longest["random"], (
        "The longest time that a request was overtaken by later ones of its own class, above "
        f"saturation: {listed(said)}."
    )


def gaps(s: Standings) -> tuple[bool, str]:
    """Who lives from streams that stand still."""
    other, points = s.ruled("with_gap"), [p for p in s.points if p.load in ABOVE]
    lost = {}
    for name in s.entrants:
        values = [(s.number(p, name, "attainment"), s.number(p, name, "with_gap")) for p in points]
        lost[name] = 100 * fmean((a or 0.0) - (b or 0.0) for a, b in values)
    most = sorted(lost, key=lambda n: -lost[n])[:3]
    best = other.ranked(other.points)[0]
    return lost[most[0]] > 0, (
        "A 99th percentile forgives one long pause in a hundred tokens. If the longest gap counts, "
        "too, attainment above saturation falls by "
        f"{listed([f'{lost[n]:.1f} points with `{n}`' for n in most])}; `{best}` is first then."
    )


CLAIMS: tuple[Claim, ...] = (
    by_load,
    in_order_of_arrival,
    last_in_order,
    mixed_batches,
    chunks,
    tiers,
    hybrid,
    accelgen,
    unmixed,
    optimum,
    plans,
    waiting,
    gaps,
)


def _at(load: str) -> str:
    """In words."""
    return "in an overload that lasts" if load == LASTING else f"{load} saturation"


def _does(count: int) -> str:
    return "does" if count == 1 else "do"


def _by_model(lead: dict[str, dict[str, float]], chosen: Callable[[float], bool]) -> str:
    """The workloads where the lead is as wanted, by model; empty where there are none."""
    found = {
        model: names
        for model, gains in lead.items()
        if (names := [name for name, gain in gains.items() if chosen(gain)])
    }
    return "; ".join(f"{listed(names)} on {model}" for model, names in found.items())
