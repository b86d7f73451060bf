"""Metrics of a load test or a simulation, computed from the times at which tokens arrived.

TTFT: due time to first token. TBT: between two tokens of one request; if several come at once, like
drafted ones, the time since the one before is spread over them (`deliveries.py`). JCT, or end to
end: due time to last token. Normalised latency: JCT over the number of tokens. A `Rule` says
whether a request attains its SLO, a server's unless a paper is reproduced; refused or failed
requests do not. A request cut off at the end of the run is judged as if its next token came then:
it attains a target whose time has not passed.
Goodput: requests per second that have ended and attain their SLO. Requests without targets neither
attain nor miss any: shares are of requests with targets, or with that target, and goodput counts
only these. Percentiles interpolate linearly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.parallel_arrays import ParallelArrays
from jaxserve.sched.request import Rule, Tier
from jaxserve.sched.slo.deliveries import spread_all
from jaxserve.sched.slo.slo_columns import TARGETS, SloColumns


@dataclass(frozen=True)
class Times:
    """Token times of n requests, in seconds on one clock.

    Attributes:
        due: float64 [n], when each was due to be sent. The sender may have sent it later.
        token_times: float64 [sum of tokens], the first request's in order, then the second's, and
        so on.
        tokens: int64 [n], number of tokens of each; at least 1 if finished.
        finished: bool [n]; False if it was refused, failed, or was cut off at `end`.
        going: bool [n], requests that were cut off; None for none.
        end: When the run was cut off.
    """

    due: np.ndarray
    token_times: np.ndarray
    tokens: np.ndarray
    finished: np.ndarray
    going: np.ndarray | None = None
    end: float = math.inf

    @classmethod
    def from_tokens(
        cls, due: Sequence[float], token_times: Sequence[Sequence[float]], finished: Sequence[bool]
    ) -> Times:
        """From lists, one entry per request."""
        flat = [time for times in token_times for time in times]
        return cls(
            np.asarray(due, np.float64),
            np.asarray(flat, np.float64),
            np.array([len(times) for times in token_times], np.int64),
            np.asarray(finished, bool),
        )

    def __len__(self) -> int:
        return len(self.due)

    @property
    def offsets(self) -> np.ndarray:
        """Where each request's tokens begin in token_times, int64 [n]."""
        return np.asarray(np.cumsum(self.tokens) - self.tokens)

    @property
    def first_token(self) -> np.ndarray:
        """Time of the first token, float64 [n]; nan without a token."""
        return self._time_of(self.offsets)

    @property
    def last_token(self) -> np.ndarray:
        """Time of the last token, float64 [n]; nan without a token."""
        return self._time_of(self.offsets + self.tokens - 1)

    @property
    def ttft(self) -> np.ndarray:
        """float64 [n]; nan without a token."""
        return self.first_token - self.due

    @property
    def e2e(self) -> np.ndarray:
        """float64 [n]; nan without a token."""
        return self.last_token - self.due

    @property
    def normalised_latency(self) -> np.ndarray:
        """Seconds per token, float64 [n]; nan without a token."""
        return np.asarray(self.e2e / np.maximum(self.tokens, 1))

    @property
    def tbt(self) -> tuple[np.ndarray, np.ndarray]:
        """Times between tokens, one request after the other, float64 [sum of counts], and the
        number for each request, int64 [n]."""
        gaps = np.diff(self.token_times, prepend=0.0)
        within = np.ones(len(gaps), bool)
        within[self.offsets[self.tokens > 0]] = False
        return spread_all(gaps, ~within)[within], np.maximum(self.tokens - 1, 0)

    def select(self, which: np.ndarray) -> Times:
        """The times of selected requests. which: bool [n]."""
        return dataclasses.replace(
            self,
            due=self.due[which],
            token_times=self.token_times[np.repeat(which, self.tokens)],
            tokens=self.tokens[which],
            finished=self.finished[which],
            going=None if self.going is None else self.going[which],
        )

    def judged(self) -> Times:
        """The times with another token at `end` for each request that was cut off."""
        if self.going is None or not self.going.any():
            return self
        behind = (self.offsets + self.tokens)[self.going]
        return dataclasses.replace(
            self,
            token_times=np.insert(self.token_times, behind, self.end),
            tokens=self.tokens + self.going,
            finished=self.finished | self.going,
        )

    def _time_of(self, token: np.ndarray) -> np.ndarray:
        found = np.full(len(self), np.nan)
        some = self.tokens > 0
        found[some] = self.token_times[token[some]]
        return found


@dataclass(frozen=True)
class Attained(ParallelArrays):
    """Which requests met their targets, bool [n] each. A finished request meets targets that it
    does not have.

    Attributes:
        ttft: To the first token.
        tbt: Between two tokens, 99th percentile.
        jct: To the last token.
        max_tbt: Between two tokens, the longest.
    """

    ttft: np.ndarray
    tbt: np.ndarray
    jct: np.ndarray
    max_tbt: np.ndarray

    def slo(self, rule: Rule = Rule.SERVER) -> np.ndarray:
        """Which requests attained their SLO by the rule, bool [n]."""
        met = self.ttft & self.tbt & self.jct
        return np.asarray(met if rule is Rule.PAPERS else met & self.max_tbt)


def summarise(values: Sequence[float] | np.ndarray, scale: float = 1.0) -> dict[str, float] | None:
    """mean, p50, p90, p99 and max of the values times `scale`; None if there are none."""
    if len(values) == 0:
        return None
    scaled = np.asarray(values, np.float64) * scale
    p50, p90, p99 = np.percentile(scaled, (50, 90, 99)).tolist()
    return {
        "mean": float(scaled.mean()),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": float(scaled.max()),
    }


def attained(times: Times, terms: SloColumns) -> Attained:
    """Which requests met their own targets. terms: those of the requests."""
    times = times.judged()
    done = times.finished
    ttft, jct = times.ttft, times.e2e
    tbt, shares = times.tbt
    return Attained(
        done & ~(ttft > terms.ttft),
        done & _within_tbt(tbt, shares, terms.tbt),
        done & ~(jct > terms.jct),
        done & _within_max_tbt(tbt, shares, terms.max_tbt_that_counts),
    )


def tokens_in_time(times: Times, terms: SloColumns) -> tuple[int, int]:
    """How many tokens met their own target (TTFT for a request's first token, TBT for the others),
    and of how many. Their ratio is AccelGen's iteration-level attainment (section 3.2). A request
    that was refused or failed counts as one missed token; one that was cut off does if its next
    token was late by then."""
    tbt, shares = times.tbt
    have = times.tokens > 0
    met = int((times.ttft[have] <= terms.ttft[have]).sum())
    met += int((tbt <= np.repeat(terms.tbt, shares)).sum())
    since = np.where(have, times.last_token, times.due)
    target = np.where(have, terms.tbt, terms.ttft)
    going = np.zeros(len(times), bool) if times.going is None else times.going
    lost = ~times.finished & (~going | (times.end - since > target))
    return met, len(times.token_times) + int(lost.sum())


def group_metrics(
    times: Times,
    terms: SloColumns,
    met: Attained,
    duration: float | None = None,
    rule: Rule = Rule.SERVER,
) -> dict[str, Any]:
    """Metrics of selected requests; latencies are of the finished ones.

    Args:
        times: Times of the requests.
        terms: Their targets.
        met: Which targets they met.
        duration: Seconds that rates refer to; by default from the first due time to the last token.
        rule: When a request attains its SLO.

    Returns:
        Numbers by name. `slo` is None if no request has a target, and so is each share in it for a
        target that no request has.
    """
    done = times.select(times.finished)
    tbt, _ = done.tbt
    duration = span(times) if duration is None else duration
    return {
        "requests": len(times),
        "finished": len(done),
        "finished_per_s": rate(len(done), duration),
        "output_tokens": len(times.token_times),
        "ttft_ms": summarise(done.ttft, 1e3),
        "tbt_ms": summarise(tbt, 1e3),
        "e2e_ms": summarise(done.e2e, 1e3),
        "normalised_latency_ms": summarise(done.normalised_latency, 1e3),
        "slo": _slo_metrics(met, terms, times.finished, duration, rule)
        if has_targets(terms)
        else None,
    }


def split_metrics(
    times: Times,
    terms: SloColumns,
    met: Attained,
    total: dict[str, Any],
    rule: Rule = Rule.SERVER,
) -> dict[str, Any]:
    """`group_metrics` by tier and by SLO class, without those that have no requests.

    Args:
        times: Times of all requests; rates refer to their duration.
        terms: Their targets.
        met: Which targets they met.
        total: `group_metrics` of all of them.
        rule: When a request attains its SLO.
    """
    duration = span(times)

    def group(which: np.ndarray) -> dict[str, Any]:
        if which.all():
            return dict(total)
        return group_metrics(times.select(which), terms.select(which), met[which], duration, rule)

    tiers = {tier.name.lower(): terms.tier == tier for tier in Tier}
    classes = {name: terms.slo_class == index for index, name in enumerate(terms.classes)}
    return {
        "tiers": {name: group(which) for name, which in tiers.items() if which.any()},
        "classes": {name: group(which) for name, which in classes.items() if which.any()},
    }


def load_metrics(times: Times, terms: SloColumns, rule: Rule = Rule.SERVER) -> dict[str, Any]:
    """All metrics of a load test, in total and by tier and class. Names end with the unit.

    Latencies are of the finished requests only. duration_s: first due time to last token. rule:
        when a request attains its SLO.
    """
    met, duration = attained(times, terms), span(times)
    done = times.select(times.finished)
    total = group_metrics(times, terms, met, rule=rule)
    return {
        "duration_s": duration,
        "output_tokens": total["output_tokens"],
        "output_tokens_per_s": rate(total["output_tokens"], duration),
        "finished_per_s": total["finished_per_s"],
        **{name: total[name] for name in ("ttft_ms", "tbt_ms", "e2e_ms", "slo")},
        "request_p99_tbt_ms": summarise(request_p99_tbt(done), 1e3),
        "normalised_latency_ms": total["normalised_latency_ms"],
        **split_metrics(times, terms, met, total, rule),
    }


def overtaken(times: Times, group: np.ndarray) -> float:
    """The longest that a request waited while later ones of its own group were served.

    It waits from its arrival to its first token, from each token to the next, and from its last
    token to the end if the run was cut off. The result is the longest time from the beginning of
    such a wait to the last token within it of a later request of the group.

    Args:
        times: times of n requests.
        group: int64 [n], the group of each, such as its tier or class.

    Returns:
        Seconds; 0 if no request was ever overtaken.
    """
    return max((_overtaken(times.select(group == one)) for one in np.unique(group)), default=0.0)


def _overtaken(times: Times) -> float:
    """`overtaken` within one group."""
    order = np.argsort(times.token_times, kind="stable")
    when, place = times.token_times[order], np.argsort(np.argsort(times.due, kind="stable"))
    came = np.repeat(place, times.tokens)[order]
    judged = times.judged()
    begin = np.insert(judged.token_times, judged.offsets, judged.due)
    begin = np.delete(begin, judged.offsets + judged.tokens + np.arange(len(judged)))
    low, high = np.searchsorted(when, begin, "right"), np.searchsorted(when, judged.token_times)
    mine, wait, longest = np.repeat(place, judged.tokens), judged.token_times - begin, 0.0
    some = np.flatnonzero(low < high)  # others were served in between
    for i in some[np.argsort(-wait[some], kind="stable")].tolist():
        if wait[i] <= longest:
            break
        later = np.flatnonzero(came[low[i] : high[i]] > mine[i])
        if len(later):
            longest = max(longest, float(when[low[i] + later[-1]] - begin[i]))
    return longest


def waits(times: Times) -> tuple[np.ndarray, np.ndarray]:
    """How long each request waited for its first token, and its longest wait for a later one,
    seconds, float64 [n] each; 0 for the latter without a second token."""
    tbt, shares = times.tbt
    longest = np.zeros(len(times))
    np.maximum.at(longest, np.repeat(np.arange(len(times)), shares), tbt)
    return times.ttft, longest


def jain_index(values: np.ndarray) -> float:
    """Jain's index of fairness: 1 if all values are the same, 1/n if all but one of n are 0 (Jain,
    Chiu and Hawe, "A quantitative measure of fairness", 1984). values: float64 [n], n at least 1.
    """
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0


def span(times: Times) -> float:
    """Seconds from the first due time to the last token, or to the end if the run was cut off; 0
    without a token."""
    begin = float(times.due.min())
    if times.end < math.inf:
        return times.end - begin
    return float(times.token_times.max()) - begin if len(times.token_times) else 0.0


def has_targets(terms: SloColumns) -> bool:
    """Whether any request has a target."""
    return bool(terms.asked.any())


def request_p99_tbt(times: Times) -> np.ndarray:
    """The 99th percentile of each request's own TBTs, seconds, for requests with at least two
    tokens."""
    tbt, shares = times.tbt
    parts = np.split(tbt, np.cumsum(shares)[:-1])
    return np.array([percentile_99(part.tolist()) for part in parts if len(part)])


def percentile_99(values: Sequence[float]) -> float:
    """The 99th percentile of at least one value, interpolated linearly. In plain Python, since the
    engine's thread also uses it (`sched/slo/verdict.py`), for one request at a time."""
    ordered = sorted(values)
    place = 0.99 * (len(ordered) - 1)
    low = int(place)
    share, below, above = place - low, ordered[low], ordered[min(low + 1, len(ordered) - 1)]
    if share < 0.5:  # NumPy's rounding
        return below + (above - below) * share
    return above - (above - below) * (1 - share)


def _slo_metrics(
    met: Attained, terms: SloColumns, finished: np.ndarray, duration: float, rule: Rule
) -> dict[str, Any]:
    asked, attain = terms.asked, met.slo(rule)
    targets = {name: getattr(terms, name) for name in TARGETS}
    targets["max_tbt"] = terms.max_tbt_that_counts
    shares = {
        f"{name}_attainment": _share(getattr(met, name)[target < np.inf])
        for name, target in targets.items()
    }
    return {
        "attainment": _share(attain[asked]),
        **shares,
        "goodput_per_s": rate(int((attain & finished & asked).sum()), duration),
    }


def _share(met: np.ndarray) -> float | None:
    return float(met.mean()) if len(met) else None


def rate(count: int, duration: float) -> float | None:
    """1/s; None over no time. duration: seconds."""
    return count / duration if duration > 0 else None


def _within_tbt(tbt: np.ndarray, shares: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Which requests' 99th percentile is within the target, bool [n]; a request of one token has no
    TBT to miss. tbt, shares: see `Times.tbt`. Sorts only if needed."""
    slow = np.zeros(len(shares), np.int64)
    owner = np.repeat(np.arange(len(shares)), shares)
    np.add.at(slow, owner[tbt > target[owner]], 1)
    # The percentile lies between the sorted values of ranks floor(h) and floor(h) + 1.
    low = np.floor(0.99 * (shares - 1)).astype(np.int64)
    within = shares - slow  # values within the target
    met = (shares == 0) | (within > low)
    ends = np.cumsum(shares)
    for i in np.flatnonzero(met & (shares > 0) & (within == low + 1) & (slow > 0)).tolist():
        mine = tbt[ends[i] - shares[i] : ends[i]]
        met[i] = percentile_99(mine.tolist()) <= target[i]
    return np.asarray(met)


def _within_max_tbt(tbt: np.ndarray, shares: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Which requests' longest TBT is within the target, bool [n]. Arguments as in `_within_tbt`."""
    owner = np.repeat(np.arange(len(shares)), shares)
    met = np.ones(len(shares), bool)
    met[owner[tbt > target[owner]]] = False
    return met
