"""Whether a request that has just ended has met its own targets.

Uses the definitions of `sched/slo/metrics.py`, which judges many requests at once; a test compares
both. This one is for the engine's thread: one request, in microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.sched.cost.reachability import SloProblem
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.slo.deliveries import spread
from jaxserve.sched.slo.metrics import percentile_99
from jaxserve.sched.slo.slo_columns import ALL_TARGETS

_NO_TARGETS = SLO()


@dataclass(frozen=True)
class Verdict:
    """Whether a finished request met its targets. As text: `met`, or `missed` and by how much.

    Attributes:
        slo: Its targets, after `SLO.with_max_tbt`.
        slo_class: Its SLO class.
        tier: Its tier.
        ttft: Whether TTFT was met; None without such a target.
        tbt: The same for the 99th percentile of its TBTs.
        jct: The same for JCT.
        max_tbt: The same for its longest TBT.
        problems: What is wrong with the targets themselves.
        took: The measured value for each target, by name, in seconds; None if there is none.
    """

    slo: SLO
    slo_class: str
    tier: Tier
    ttft: bool | None
    tbt: bool | None
    jct: bool | None
    max_tbt: bool | None = None
    problems: tuple[SloProblem, ...] = ()
    took: Mapping[str, float | None] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        if self.met:
            return "met"
        missed = (name for name in ALL_TARGETS if getattr(self, name) is False)
        return "missed: " + ", ".join(map(self._missed, missed))

    def _missed(self, name: str) -> str:
        target, took = getattr(self.slo, name), self.took.get(name)
        if took is None or took <= target:  # it has failed before
            return f"{name} of {target:.4g} s"
        return f"{name} {took:.4g} s > {target:.4g} s"

    @property
    def met(self) -> bool:
        """Whether all targets were met."""
        return False not in (self.ttft, self.tbt, self.jct, self.max_tbt)


def tbt_that_counts(token_times: Sequence[float]) -> float | None:
    """The 99th percentile of a request's times between tokens, in seconds (Apt-Serve section 1);
    None with fewer than two tokens. token_times: ascending."""
    return percentile_99(_gaps(token_times)) if len(token_times) > 1 else None


def longest_tbt(token_times: Sequence[float]) -> float | None:
    """The longest of a request's times between tokens, in seconds; None with fewer than two tokens.
    token_times: ascending."""
    return max(_gaps(token_times), default=None)


def _gaps(token_times: Sequence[float]) -> list[float]:
    return spread([after - before for before, after in itertools.pairwise(token_times)])


def judge(
    request: Request,
    token_times: Sequence[float],
    end: float,
    *,
    complete: bool,
    failed: bool = False,
    problems: tuple[SloProblem, ...] = (),
) -> Verdict | None:
    """Judges a request by its own targets. Times are in seconds on one clock.

    Args:
        request: The request.
        token_times: When its tokens came, ascending.
        end: When it ended.
        complete: Whether it ended by itself, with its last token. A cancelled request is judged as
        if its next token had come at `end`.
        failed: Whether it failed, and so met no target.
        problems: What is wrong with the targets themselves.

    Returns:
        None for a request without targets.
    """
    slo = request.slo.with_max_tbt()
    if slo == _NO_TARGETS:
        return None
    times = token_times if complete else [*token_times, end]

    took = {
        "ttft": times[0] - request.arrival,
        "tbt": None if slo.tbt is None else tbt_that_counts(times),
        "jct": times[-1] - request.arrival,
        "max_tbt": None if slo.max_tbt is None else longest_tbt(times),
    }

    def met(name: str) -> bool | None:
        target, got = getattr(slo, name), took[name]
        return None if target is None else not failed and (got is None or got <= target)

    return Verdict(
        slo,
        request.slo_class,
        request.tier,
        **{name: met(name) for name in ALL_TARGETS},
        problems=problems,
        took=took,
    )
