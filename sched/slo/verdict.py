"""Whether a request that has just ended is within its own targets.

By the definitions of `sched/slo/metrics.py`, which judges many requests at once; a test holds the
two to the same. This one is for the engine's thread: one request, in microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.sched.cost.reachability import SloProblem
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.slo.metrics import percentile_99

_NO_TARGETS = SLO()


@dataclass(frozen=True)
class Verdict:
    """slo, slo_class, tier: what was asked for. ttft, tbt, jct: whether it was met, None where
    there is no such target. problems: with the targets themselves."""

    slo: SLO
    slo_class: str
    tier: Tier
    ttft: bool | None
    tbt: bool | None
    jct: bool | None
    problems: tuple[SloProblem, ...] = ()

    @property
    def met(self) -> bool:
        """All of them."""
        return False not in (self.ttft, self.tbt, self.jct)


def tbt_that_counts(token_times: Sequence[float]) -> float | None:
    """The 99th percentile of a request's times between tokens (Apt-Serve section 1), seconds; None
    with fewer than two tokens. token_times: ascending."""
    if len(token_times) < 2:
        return None
    return percentile_99([after - before for before, after in itertools.pairwise(token_times)])


def judge(
    request: Request,
    token_times: Sequence[float],
    end: float,
    *,
    complete: bool,
    failed: bool = False,
    problems: tuple[SloProblem, ...] = (),
) -> Verdict | None:
    """What to tell whoever asked for it; None for a request without targets. token_times: when its
    tokens came. complete: it has ended by itself, with the last of them. Another one, which was
    cancelled at `end`, is judged as if its next token came then, and one that failed meets nothing.
    All times in seconds on one clock.
    """
    slo = request.slo
    if slo == _NO_TARGETS:
        return None
    times = token_times if complete else [*token_times, end]

    def met(target: float | None, got: float | None) -> bool | None:
        return None if target is None else not failed and (got is None or got <= target)

    return Verdict(
        slo,
        request.slo_class,
        request.tier,
        ttft=met(slo.ttft, times[0] - request.arrival),
        tbt=met(slo.tbt, None if slo.tbt is None else tbt_that_counts(times)),
        jct=met(slo.jct, times[-1] - request.arrival),
        problems=problems,
    )
