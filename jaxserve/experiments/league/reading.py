"""What the page says of the league: sentences, each refused where the numbers do not carry it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxserve.experiments.league.standings import Standings
from jaxserve.experiments.league.tables import kinds

EDGE = 0.03  # by which a policy has to lead to be named for a kind of workload
Claim = Callable[[Standings], tuple[bool, str]]


class NotCarried(ValueError):
    """Sentences that the numbers do not carry."""


def advice(standings: Standings) -> str:
    """One sentence: what to run when nothing is known, and where something else is better."""
    best, *_ = standings.ranked(standings.points)
    first = (
        f"If you do not know your traffic, start with `--policy={best}`: over all workloads and "
        f"loads it has {standings.share(best):.0%} of the best policy's goodput on average, more "
        "than any other"
    )
    others: dict[str, list[str]] = {}
    for kind in kinds(standings):
        points = standings.where(kind=kind)
        winner = standings.ranked(points)[0]
        lead = standings.share(winner, points) - standings.share(best, points)
        if lead > EDGE:
            share = standings.share(winner, points)
            mine = standings.share(best, points)
            others.setdefault(winner, []).append(f"{kind} ({share:.0%} against {mine:.0%})")
    if not others:
        return first + "."
    said = [f"`{name}` for {' and '.join(where)}" for name, where in others.items()]
    return f"{first}; take {', '.join(said[:-1]) + ', and ' if said[1:] else ''}{said[-1]}."


def reading(standings: Standings) -> Iterator[str]:
    """The sentences, in order. NotCarried names those that the numbers say otherwise."""
    found = [claim(standings) for claim in CLAIMS]
    wrong = [sentence for holds, sentence in found if not holds]
    if wrong:
        raise NotCarried("the numbers do not carry: " + " | ".join(wrong))
    yield from (sentence for _, sentence in found)


CLAIMS: tuple[Claim, ...] = ()
