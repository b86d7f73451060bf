"""The best schedule for a known workload, by search (AccelGen section 6.1, "Oracle").

Every policy is tried, then the unified scheduler with a few orders of the requests; then the best
of these are changed slightly, again and again. Each is simulated, so results are feasible.
`goodput_bound.py` bounds how far they may be below the optimum.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policies.oracle import OraclePolicy, Portfolio
from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.request import Rule
from jaxserve.sched.slo.metrics import attained, rate, span
from jaxserve.simulator.dispatch import form_of, has_form, run
from jaxserve.simulator.oracle.candidates import Candidate, Changes, starts
from jaxserve.simulator.oracle.goodput_bound import goodput_bound
from jaxserve.simulator.oracle.least_work import LeastWork
from jaxserve.simulator.results import RequestRecords
from jaxserve.simulator.settings import RunOptions, Served, Setting, TrafficOptions
from jaxserve.simulator.workloads.workload import Workload

# In addition to each policy with its default parameters.
VARIED = ("sarathi+ef", "sarathi_pc+ef", "vllm+ef", "edf+ef", "infermax:expect=nothing")
_KEPT = 6  # candidates that are changed further
_NEAR = 1 - 1e-6  # of the bound: nothing is left to find


class NotSearched(ValueError):
    """The search does not support this simulation; the message says why."""


@dataclass(frozen=True)
class Found:
    """The best schedule that a search found.

    Attributes:
        name: Name of its policy, or `ordered` for a schedule of the search itself.
        served: Its run.
        bound: Requests/s that no schedule exceeds, inf if there is no bound.
        runs: Schedules simulated.
    """

    name: str
    served: Served
    bound: float
    runs: int


@dataclass(frozen=True)
class _Tried:
    """A simulated schedule.

    Attributes:
        met: bool [n], requests that attained their SLO.
        score: Goodput, then the number of requests that attained their SLO.
    """

    name: str
    policy: Policy
    setting: Setting
    served: Served
    met: np.ndarray
    score: tuple[float, int]
    candidate: Candidate | None = None


def search(
    oracle: OraclePolicy,
    workload: Workload,
    setting: Setting,
    traffic: TrafficOptions,
    options: RunOptions,
) -> Found:
    """Searches for the schedule with the most goodput, for as long as the oracle's parameters say.

    Args:
        oracle: How long to search, and where to begin.
        workload: The requests.
        setting: Where they are served.
        traffic: When the run is cut off.
        options: Execution options. The search cannot be compiled; progress(n) is called as it
            proceeds, n adding up to the number of requests.

    Raises:
        NotCompiled: `options.compiled` is True.
        NotSearched: There are several replicas, closed-loop requests or programs, whose arrivals
            are not known, or drafts.
        InvalidPlan: No policy can serve the workload.
    """
    if options.compiled:
        form_of(oracle)
    if setting.replicas > 1:
        raise NotSearched("policy oracle: schedules are searched for one replica, not for several")
    if oracle.speculates:
        raise NotSearched("policy oracle+spec: the search plans without drafts; ask for oracle")
    if traffic.best_effort is not None:
        raise NotSearched(
            "policy oracle: best_effort requests come when others have ended; arrivals must be "
            "known to search"
        )
    if workload.programs.closed:
        raise NotSearched(
            "policy oracle: calls of programs come when others have ended; arrivals must be known "
            "to search"
        )
    in_python = options.checked or setting.online is not None or traffic.until < math.inf
    asked = options.compiled is False and (in_python or not options.record_rows)
    quiet = dataclasses.replace(options, progress=None)
    runner = _Runner(
        workload=workload,
        setting=setting,
        traffic=traffic,
        options=dataclasses.replace(quiet, record_rows=False, compiled=False if asked else None),
        rule=oracle.rule,
    )
    told = _Told(options.progress, len(workload))
    bound = goodput_bound(workload, setting, setting.rho is not None, traffic.until)
    best = _search(oracle, runner, bound, told)
    told.share(1.0)
    served = best.served
    if options.record_rows:
        again = dataclasses.replace(quiet, compiled=False)
        served = run([best.policy], workload, best.setting, traffic, again)
    served = dataclasses.replace(served, seed_read=True)
    return Found(best.name, served, bound, runner.runs)


@dataclass
class _Told:
    """Reports the progress of the search as arrived requests."""

    progress: Callable[[int], None] | None
    whole: int
    said: int = 0

    def share(self, done: float) -> None:
        """Reports that this share of the search is done, from 0 to 1."""
        now = int(min(done, 1.0) * self.whole)
        if self.progress is not None and now > self.said:
            self.progress(now - self.said)
            self.said = now


@dataclass
class _Runner:
    """Simulates schedules, and counts them."""

    workload: Workload
    setting: Setting
    traffic: TrafficOptions
    options: RunOptions
    rule: Rule
    runs: int = 0

    def tried(
        self, name: str, policy: Policy, setting: Setting, candidate: Candidate | None = None
    ) -> _Tried:
        """Simulates a policy.

        Args:
            name: What to call it.
            policy: The policy.
            setting: Where it is simulated.
            candidate: The candidate that it comes from, if any.

        Raises:
            InvalidPlan: It cannot serve the workload.
        """
        self.runs += 1
        made, traffic = self.workload, self.traffic
        served = run([policy], made, setting, traffic, self.options)
        found = RequestRecords.from_served(served, traffic.until)
        met = np.zeros(len(made), bool)
        goodput = 0.0
        if len(found):
            asked = found.workload.terms.asked
            within = attained(found.times, found.workload.terms).slo(self.rule) & found.finished
            within &= asked | ~asked.any()
            met[: len(within)] = within
            goodput = rate(int(within.sum()), span(found.times)) or 0.0
        return _Tried(name, policy, setting, served, met, (goodput, int(met.sum())), candidate)

    def candidate(self, one: Candidate) -> _Tried | None:
        """Simulates a candidate. None if it cannot serve the workload, for example because two
        requests preempt each other for ever."""
        try:
            return self.tried("ordered", one.policy, one.setting(self.setting), one)
        except InvalidPlan:
            return None


def _search(oracle: OraclePolicy, runner: _Runner, bound: float, told: _Told) -> _Tried:
    pool: list[_Tried] = []
    best: _Tried | None = None

    def note(one: _Tried | None) -> None:
        nonlocal best
        if one is None:
            return
        if best is None or one.score > best.score:
            best = one
        if one.candidate is not None:
            pool.append(one)
            pool.sort(key=lambda tried: tried.score, reverse=True)
            del pool[_KEPT:]

    for one in _portfolio(oracle, runner):
        note(one)
    workload, setting = runner.workload, runner.setting
    work = LeastWork.of_workload(workload, setting, setting.rho is not None)
    left = _Left(oracle, told)
    rng = np.random.default_rng((setting.seed, 11))
    changes = Changes(workload, work.jct, setting, rng)
    for first in starts(workload, work, setting):
        if left.over():
            break
        note(runner.candidate(first))
    while pool and best is not None and best.score[0] < bound * _NEAR and not left.over():
        # Half of the time the best of all, so that results improve soon.
        parent = pool[0 if rng.random() < 0.5 else int(rng.integers(len(pool)))]
        assert parent.candidate is not None
        note(runner.candidate(changes.changed(parent.candidate, parent.met)))
    if best is None:
        raise InvalidPlan("policy oracle: no policy can serve the workload")
    return best


def _portfolio(oracle: OraclePolicy, runner: _Runner) -> Iterator[_Tried]:
    """Runs of all policies that can serve the workload."""
    for name in portfolio(oracle.portfolio):
        policy, setting = make_policy(name), runner.setting
        limits, workload = setting.limits, runner.workload
        if not policy.chunked:
            if int(workload.lengths.total.max()) - 1 > limits.max_batch_tokens:
                continue
            whole = dataclasses.replace(limits, max_prefill_tokens=limits.max_batch_tokens)
            setting = dataclasses.replace(setting, limits=whole)
        try:
            yield runner.tried(name, policy, setting)
        except InvalidPlan:
            continue


def portfolio(which: Portfolio) -> list[str]:
    """The names of the policies that a search begins with: all registered ones but the oracle and
    those for programs, which it does not search, and some with parameters."""
    known = [name for name, one in policies().items() if not one.for_programs]
    names = [name for name in known if not isinstance(make_policy(name), OraclePolicy)]
    names += VARIED
    if which is Portfolio.QUICK:
        names = [name for name in names if has_form(make_policy(name))]
    return names


class _Left:
    """The remaining search time or runs after the portfolio."""

    def __init__(self, oracle: OraclePolicy, told: _Told) -> None:
        self._oracle, self._told = oracle, told
        self._began, self._runs = time.monotonic(), 0

    def over(self) -> bool:
        """Whether the search is over; otherwise counts a run."""
        oracle = self._oracle
        if oracle.runs is not None:
            done, whole = float(self._runs), float(oracle.runs)
        else:
            done, whole = time.monotonic() - self._began, oracle.seconds
        self._told.share(done / whole if whole else 1.0)
        self._runs += 1
        return done >= whole
