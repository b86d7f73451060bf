"""The schedules that a search chooses among: those of the unified scheduler with any order of
requests, shape of batches and tokens per batch. And small changes to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policies.oracle import Ordered
from jaxserve.sched.unified.unified_policy import Group, Phase, Reserve
from jaxserve.simulator.oracle.least_work import LeastWork
from jaxserve.simulator.settings import Setting
from jaxserve.simulator.workloads.workload import Workload

_ANY = (Group(Phase.ANY, preempts=True),)
_DECODES = (Group(Phase.DECODE, preempts=True), Group(Phase.PREFILL | Phase.WAITING))
_STARTS = (Group(Phase.WAITING), Group(Phase.RUNNING, preempts=True))
_PROMPTS = (Group(Phase.PREFILL | Phase.WAITING), Group(Phase.DECODE, preempts=True))
# (groups, mixed batches): one order for all; decodes first; waiting requests or prompts first.
SHAPES = ((_ANY, True), (_ANY, False), (_DECODES, True), (_PROMPTS, True), (_STARTS, False))
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of C, tokens of a batch with prompts


@dataclass(frozen=True)
class Candidate:
    """A schedule, given by its policy and limits.

    Attributes:
        policy: The order of the requests, and the shape of the batches.
        max_prefill_tokens: P, tokens of a batch with prompts, at most C.
    """

    policy: Ordered
    max_prefill_tokens: int

    def setting(self, setting: Setting) -> Setting:
        """The setting with the candidate's P."""
        limits = dataclasses.replace(setting.limits, max_prefill_tokens=self.max_prefill_tokens)
        return dataclasses.replace(setting, limits=limits)

    def ordered(self, given: np.ndarray) -> Candidate:
        """The candidate with another order of the requests."""
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, given=given))


def starts(workload: Workload, work: LeastWork, setting: Setting) -> Iterator[Candidate]:
    """The candidates that a search begins with: a few orders, shapes and budgets. Orders are by
    arrival, by the latest time to start, and by work; in the last two, requests that cannot attain
    their targets come last."""
    latest = np.minimum(
        workload.arrival + workload.ttft - work.ttft, workload.arrival + workload.jct - work.jct
    )
    hopeless = np.where(work.met, 0.0, float(len(workload)))
    orders = [
        _ranks(workload.arrival),
        _ranks(latest) + hopeless,
        _ranks(work.jct) + hopeless,
    ]
    most = setting.limits.max_batch_tokens
    for groups, mixed in SHAPES:
        for given in orders:
            for share in SHARES:
                tokens = max(int(share * most), 1)
                policy = Ordered(
                    groups,
                    mixed,
                    chunked=True,
                    reserve=Reserve.WHOLE,
                    watermark=0.0,
                    given=given,
                )
                yield Candidate(policy, tokens)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values by arrival, float64 [n]."""
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


@dataclass(frozen=True)
class Changes:
    """Draws small changes to candidates.

    Attributes:
        workload: The requests.
        size: float64 [n], work of each request.
        setting: Where they are served.
        rng: Random numbers for the changes.
    """

    workload: Workload
    size: np.ndarray
    setting: Setting
    rng: np.random.Generator

    def changed(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        """The candidate after one or two changes. met: requests that attained their SLO with it,
        bool [n]."""
        for _ in range(int(self.rng.integers(1, 3))):
            candidate = self._one(candidate, met)
        return candidate

    def _one(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        moves: list[Callable[[Candidate, np.ndarray], Candidate]] = [
            self._give_up,
            self._hurry,
            self._give_way,
            self._disturb,
            self._retokened,
            self._reshaped,
        ]
        weights = np.array([3, 3, 2, 3, 2, 1], float)
        if met.all():
            weights[:2] = 0
        return moves[int(self.rng.choice(len(moves), p=weights / weights.sum()))](candidate, met)

    def _give_up(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        """Moves some requests that miss their SLO to the end, out of the others' way."""
        return self._moved(candidate, self._some(np.flatnonzero(~met)), float(len(met)))

    def _hurry(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        """Moves a few requests that miss their SLO forward."""
        missed = np.flatnonzero(~met)
        which = self.rng.choice(missed, size=min(len(missed), int(self.rng.integers(1, 4))))
        return self._moved(candidate, np.unique(which), -self._distance(len(met)))

    def _give_way(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        """Moves the request with the most work to the end, of a few that arrived about the same
        time."""
        place, width = int(self.rng.integers(len(met))), int(self.rng.integers(2, 12))
        near = np.arange(max(place - width, 0), min(place + width, len(met)))
        return self._moved(candidate, near[[int(self.size[near].argmax())]], float(len(met)))

    def _disturb(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        """Perturbs the order of requests that arrived about the same time, or the place of one."""
        count = len(met)
        place, width = int(self.rng.integers(count)), int(self.rng.choice([1, 4, 16, 64]))
        given = candidate.policy.given.copy()
        part = slice(place, min(place + width, count))
        given[part] += self.rng.normal(0.0, self._distance(count), len(given[part]))
        return candidate.ordered(given)

    def _retokened(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        """Changes P."""
        most = self.setting.limits.max_batch_tokens
        tokens = candidate.max_prefill_tokens * 2.0 ** self.rng.normal(0.0, 0.7)
        return dataclasses.replace(candidate, max_prefill_tokens=int(np.clip(tokens, 1, most)))

    def _reshaped(self, candidate: Candidate, met: np.ndarray) -> Candidate:
        """Changes the shape of batches, the reserve, or the limit of requests."""
        policy, rng = candidate.policy, self.rng
        what = int(rng.integers(4))
        if what == 0:
            groups, mixed = SHAPES[int(rng.integers(len(SHAPES)))]
            policy = dataclasses.replace(policy, groups=groups, mixed_batches=mixed)
        elif what == 1:
            policy = dataclasses.replace(policy, probing=not policy.probing)
        elif what == 2:
            whole = policy.reserve is Reserve.WHOLE
            reserve = Reserve.PROMPT if whole else Reserve.WHOLE
            policy = dataclasses.replace(policy, reserve=reserve)
        else:
            rows = int(2 ** rng.uniform(0, np.log2(len(met) + 1)))
            policy = dataclasses.replace(policy, max_rows=None if policy.max_rows else rows)
        return dataclasses.replace(candidate, policy=policy)

    def _some(self, which: np.ndarray) -> np.ndarray:
        """All of these requests, or a random share."""
        share = self.rng.choice([0.1, 0.5, 1.0])
        return which[self.rng.random(len(which)) <= share]

    def _distance(self, count: int) -> float:
        """A number of places, usually small."""
        return float(np.exp(self.rng.uniform(0.0, np.log(count + 1.0))))

    @staticmethod
    def _moved(candidate: Candidate, which: np.ndarray, by: float) -> Candidate:
        given = candidate.policy.given.copy()
        given[which] += by
        return candidate.ordered(given)
