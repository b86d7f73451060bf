"""What a load test or a simulation reports, computed from the times at which tokens arrived.

TTFT: due time to first token. TBT: between two tokens of one request. Normalised latency: due
time to last token, over the number of tokens. A request attains its SLO if its TTFT is within the
one target and the 99th percentile of its own TBTs within the other (Apt-Serve section 1);
one that was refused or failed does not. Percentiles interpolate linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.request import SLO


@dataclass(frozen=True)
class RequestTimes:
    """One request, in seconds on one clock. due: when it was to be sent, which is earlier than
    when it was if the sender fell behind. token_times: float64 [tokens], ascending. finished:
    False if it was refused or failed."""

    due: float
    token_times: np.ndarray
    finished: bool = True

    @property
    def ttft(self) -> float:
        return float(self.token_times[0] - self.due)

    @property
    def tbt(self) -> np.ndarray:
        """float64 [tokens - 1]."""
        return np.diff(self.token_times)

    @property
    def e2e(self) -> float:
        return float(self.token_times[-1] - self.due)

    @property
    def normalised_latency(self) -> float:
        return self.e2e / len(self.token_times)


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


def meets_ttft(request: RequestTimes, slo: SLO) -> bool:
    return request.finished and (slo.ttft is None or request.ttft <= slo.ttft)


def meets_tbt(request: RequestTimes, slo: SLO) -> bool:
    """A request of one token has no TBT to miss."""
    if not request.finished:
        return False
    tbt = request.tbt
    return slo.tbt is None or tbt.size == 0 or float(np.percentile(tbt, 99)) <= slo.tbt


def load_metrics(requests: Sequence[RequestTimes], slo: SLO) -> dict[str, Any]:
    """All numbers of one load test; times in the unit that their name ends with.

    Latencies are of the finished requests only. duration_s: first due time to last token.
    """
    finished = [r for r in requests if r.finished]
    tbts = [r.tbt for r in finished if r.tbt.size]
    tokens = sum(len(r.token_times) for r in requests)
    begin = min(r.due for r in requests)
    end = max((float(r.token_times[-1]) for r in requests if r.token_times.size), default=begin)
    duration = end - begin
    return {
        "duration_s": duration,
        "output_tokens": tokens,
        "output_tokens_per_s": _rate(tokens, duration),
        "finished_per_s": _rate(len(finished), duration),
        "ttft_ms": summarise([r.ttft for r in finished], 1e3),
        "tbt_ms": summarise(np.concatenate(tbts) if tbts else (), 1e3),
        "request_p99_tbt_ms": summarise([float(np.percentile(t, 99)) for t in tbts], 1e3),
        "normalised_latency_ms": summarise([r.normalised_latency for r in finished], 1e3),
        "e2e_ms": summarise([r.e2e for r in finished], 1e3),
        "slo": _slo_metrics(requests, slo, duration),
    }


def _slo_metrics(
    requests: Sequence[RequestTimes], slo: SLO, duration: float
) -> dict[str, Any] | None:
    if slo.ttft is None and slo.tbt is None:
        return None
    ttft = np.array([meets_ttft(r, slo) for r in requests])
    tbt = np.array([meets_tbt(r, slo) for r in requests])
    both = ttft & tbt
    return {
        "ttft_ms": None if slo.ttft is None else slo.ttft * 1e3,
        "tbt_ms": None if slo.tbt is None else slo.tbt * 1e3,
        "attainment": float(both.mean()),
        "ttft_attainment": float(ttft.mean()),
        "tbt_attainment": float(tbt.mean()),
        "goodput_per_s": _rate(int(both.sum()), duration),
    }


def _rate(count: int, duration: float) -> float | None:
    return count / duration if duration > 0 else None


def attained(ttft: np.ndarray, tbt: np.ndarray, shares: np.ndarray, slo: SLO) -> np.ndarray:
    """Which requests attain the SLO, bool [n]; the same as `meets_ttft` and `meets_tbt`, for many.

    ttft: float64 [n]. tbt: the requests' times between tokens, one request after the other; shares:
    int64 [n], how many each has.
    """
    met = np.ones(len(ttft), bool) if slo.ttft is None else ttft <= slo.ttft
    if slo.tbt is None or not len(tbt):
        return met
    slow = np.zeros(len(shares), np.int64)
    some = shares > 0
    ends = np.cumsum(shares)
    np.add.at(slow, np.repeat(np.arange(len(shares)), shares)[tbt > slo.tbt], 1)
    # The percentile lies between the sorted values of ranks floor(h) and floor(h) + 1.
    low = np.floor(0.99 * (shares - 1)).astype(np.int64)
    within = shares - slow  # values within the target
    met = met & (~some | (within > low))
    for i in np.flatnonzero(met & some & (within == low + 1) & (slow > 0)).tolist():
        mine = tbt[ends[i] - shares[i] : ends[i]]
        met[i] = np.percentile(mine, 99) <= slo.tbt
    return met
