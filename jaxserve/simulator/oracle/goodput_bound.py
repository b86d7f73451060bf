"""Upper bounds on the goodput of any schedule, by relaxation; the lowest is used.

Goodput is the number of requests that end and attain their SLO, over the seconds from the first
arrival to the last token. So two things are bounded: the number of such requests, and the length of
that time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jaxserve.simulator.oracle.least_work import LeastWork, latest
from jaxserve.simulator.settings import Setting
from jaxserve.simulator.workloads.workload import Workload

POINTS = 48  # points of time between which work is added up
_ROUNDING = 1e-9


def goodput_bound(workload: Workload, setting: Setting, hidden: bool, until: float) -> float:
    """A goodput that no schedule on one replica exceeds.

    If k requests attain their SLO, the run lasts at least until the k-th earliest of their best
    possible ends; and, if no request is refused or cut off, until all requests can have ended.

    Args:
        workload: The requests.
        setting: Where they are served.
        hidden: Whether there are hidden caches.
        until: When the run is cut off, seconds; inf if it is not.

    Returns:
        Requests/s; inf if there is no bound.
    """
    work = LeastWork.of_workload(workload, setting, hidden)
    begin = float(workload.arrival.min())
    ends = workload.arrival + work.jct
    asked = workload.terms.asked  # without any targets, all ended requests count
    met = work.met & (ends <= until * (1 + _ROUNDING)) & (asked | ~asked.any())
    most = min((most_met(workload, met, *way, until) for way in _ways(work)), default=0)
    if until < math.inf:
        return most / (until - begin)
    count = np.arange(1, most + 1)
    last = np.sort(ends[met])[:most]
    if setting.capacity == math.inf:
        last = np.maximum(last, _shortest(workload, work))
    with np.errstate(divide="ignore"):
        return float((count / np.maximum(last - begin, 0.0)).max(initial=0.0)) * (1 + _ROUNDING)


def _ways(work: LeastWork) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Seconds that each request takes of a serial resource, until its first token and after it,
    float64 [n] both. Each batch takes additional time of its own; since no batch has more than 1 of
    a kind of share, requests need at least as many batches as the sum of their shares."""
    for resource in work.resources:
        for shares in work.shares:
            yield (
                resource.first + resource.batch * shares.first,
                resource.rest + resource.batch * shares.rest,
            )


def _shortest(workload: Workload, work: LeastWork) -> float:
    """The earliest end of all requests: the last arrival takes its own time; and work that arrives
    after some time is done after that."""
    arrival = workload.arrival
    soonest = float((arrival + work.jct).max())
    for first, rest in _ways(work):
        behind = np.cumsum((first + rest)[::-1])[::-1]
        soonest = max(soonest, float((arrival + behind).max()))
    return soonest


def most_met(
    workload: Workload, met: np.ndarray, first: np.ndarray, rest: np.ndarray, until: float
) -> int:
    """Bounds how many of the requests in `met` a resource has time for.

    A request that attains its TTFT has `first` done between its arrival and that target, and all of
    its work by `latest` or the end of the run. Of the requests whose times lie in a window, no more
    attain their targets than the shortest ones that fit into its seconds. Disjoint windows have no
    requests in common (a request's times begin with its arrival), so their exclusions add up.

    Args:
        workload: All n requests.
        met: bool [n], requests that may attain their SLO.
        first: float64 [n], seconds of the resource that each takes until its first token.
        rest: float64 [n], seconds that it takes after that.
        until: When the run is cut off.
    """
    arrival = workload.arrival[met]
    early = arrival + workload.ttft[met]
    late = np.minimum(arrival + latest(workload)[met], until)
    early = np.minimum(early, late)
    part, whole = first[met], (first + rest)[met]
    points = _points(np.concatenate([arrival, early, late]))
    excluded = np.zeros(len(points), np.int64)  # by windows that end by then
    for j in range(1, len(points)):
        excluded[j] = excluded[j - 1]
        ends = points[j]
        in_time = np.where(late <= ends, whole, part)
        here = np.flatnonzero(early <= ends)
        here = here[np.argsort(in_time[here], kind="stable")]
        for i in range(j):
            inside = here[arrival[here] >= points[i]]
            room = (ends - points[i]) * (1 + _ROUNDING) + _ROUNDING
            fit = int(np.searchsorted(np.cumsum(in_time[inside]), room, side="right"))
            excluded[j] = max(excluded[j], excluded[i] + len(inside) - fit)
    return int(met.sum()) - int(excluded[-1] if len(points) else 0)


def _points(times: np.ndarray) -> np.ndarray:
    """At most POINTS of these times, evenly chosen, ascending."""
    times = np.unique(times[np.isfinite(times)])
    if len(times) <= POINTS:
        return times
    return times[np.linspace(0, len(times) - 1, POINTS).astype(np.int64)]
