"""Drives a scheduler the way the engine does, one step at a time, with everything checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cache.groups.windows import WindowGroups
from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.cost.cost_model import CostModel
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy, make_retention
from jaxserve.sched.request import SLO, Program, Request, SamplingParams, Tier
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import State
from jaxserve.sched.step import Step
from jaxserve.simulator.workloads.guessable import draw
from tests.cost_models import FLAT
from tests.sched.cache.invariants import TableMirror, check_host, check_pool

MAX_STEPS = 5000  # of one test: more means that it does not end


class Drive:
    """plans: row -> tokens, by step. preempted, ended, projected: rows in that order, the preempted
    with all of their caches; cuts: how often it was with some. hidden: rows that were ever planned
    with hidden caches. drafted, accepted: tokens, in all.

    guessable: share and right of `workloads.guessable.draw`, for the requests' texts. What can be
    guessed is offered then, with the chance that it is right."""

    def __init__(
        self,
        policy: str,
        *,
        c: int = 64,
        p: int = 64,
        rows: int = 8,
        blocks: int = 256,
        block_size: int = 4,
        max_model_len: int = 64,
        seed: int = 0,
        rho: float | None = None,
        projects: bool = False,
        host_slots: int = 0,
        prefix_caching: bool = False,
        retention: str = LRU,
        cost_model: CostModel = FLAT,
        groups: WindowGroups | None = None,
        guessable: tuple[float, float] | None = None,
        **overrides: Any,
    ) -> None:
        self.policy = make_policy(policy, **overrides)
        self.limits = Limits(c, p, rows)
        self.scheduler = Scheduler(
            self.policy,
            self.limits,
            num_blocks=blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            capacity=64,
            cost_model=cost_model,
            seed=seed,
            rho=rho,
            projects=projects,
            host_slots=host_slots,
            prefix_caching=prefix_caching,
            retention=make_retention(retention),
            groups=groups,
        )
        self.table, self.pool = self.scheduler.table, self.scheduler.pool
        self._mirror = TableMirror(self.pool)
        self.plans: list[dict[int, int]] = []
        self.preempted: list[int] = []
        self.cuts = 0
        self._starts: list[int] = []
        self.ended: list[int] = []
        self.projected: list[int] = []
        self.hidden: set[int] = set()
        self.live = 0
        self.drafted = self.accepted = 0
        self._guessable, self._seed, self._requests = guessable, seed, 0
        self._texts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by row

    def add(
        self,
        prompt: int,
        output: int,
        *,
        arrival: float = 0.0,
        tier: Tier = Tier.REALTIME,
        tenant: str = "",
        weight: float | None = None,
        value: float = 1.0,
        keys: tuple[bytes, ...] | None = None,
        program: Program | None = None,
        **slo: float,
    ) -> int:
        sampling, own = SamplingParams(max_tokens=output), SLO(**slo)
        whose: dict[str, Any] = {"tenant": tenant, "weight": weight, "value": value}
        whose |= {"block_keys": keys, "program": program}
        request = Request(
            f"r{self._requests}", (1,) * prompt, sampling, own, tier, arrival, **whose
        )
        self.live += 1
        row = self.scheduler.add(request)
        if self._guessable is not None:
            rng = np.random.default_rng((self._seed, self._requests))
            self._texts[row] = draw(*self._guessable, output, rng)
        self._requests += 1
        return row

    def step(self, now: float = 0.0, overrun: float = 1.0) -> dict[int, int]:
        """One iteration; row -> tokens. AssertionError if it breaks C, P, M or the accounting."""
        table, pool = self.table, self.pool
        prefill = ~table.decoding(np.arange(table.capacity))
        booked = self.scheduler.schedule(now, overrun=overrun)
        self._mirror.follow(booked)
        plan = booked.plan
        self._check(plan, prefill)
        seq = np.sort(table.seq[plan.rows])  # those of one step start together
        done = self.scheduler.release_finished(booked)
        more = self._receive(booked, now)
        done = np.concatenate([done, more[~np.isin(more, done)]])
        for row in done.tolist():
            self.scheduler.finish(row)
        check_pool(pool)
        check_host(self.scheduler.host)
        self._starts += [s for s in seq.tolist() if s not in self._starts]
        self.preempted += plan.preempted.tolist()
        cuts = (op.keep for op in plan.operations if isinstance(op, Preempt))
        self.cuts += sum(int(np.count_nonzero(keep)) for keep in cuts)
        self.projected += plan.projected.tolist()
        self.hidden |= set(plan.rows[plan.kinds == CacheKind.HIDDEN].tolist())
        self.ended += done.tolist()
        self.live -= len(done)
        self.plans.append(dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)))
        return self.plans[-1]

    def _receive(self, booked: Step, now: float) -> np.ndarray:
        """The step's tokens come. Returns the rows that have all of theirs."""
        table, plan, rows = self.table, booked.plan, booked.emitting
        before, counts = table.received[rows], None
        if plan.drafts is not None:
            drafts = plan.drafts[booked.emits]
            assert plan.drafts.any() and not plan.drafts[~booked.emits].any()
            assert (drafts <= table.offered[rows]).all(), "more drafts than were offered"
            assert len(plan.rows) + drafts.sum() <= self.limits.max_rows, "more logits than rows"
            ahead = [int(self._texts[row][1][at]) for row, at in zip(rows, before, strict=True)]
            counts = 1 + np.minimum(ahead, drafts)
            self.drafted += int(drafts.sum())
            self.accepted += int((counts - 1).sum())
        self.scheduler.receive(rows, now, counts)
        came = table.received[rows]
        assert (came == before + (1 if counts is None else counts)).all()
        assert (came == table.generated[rows]).all() and (came <= table.max_tokens[rows]).all()
        known = table.prompt_len[rows] + came
        assert (table.computed[rows] == known - 1).all(), "not all but the newest is cached"
        if self._guessable is not None:
            for row, at in zip(rows.tolist(), came.tolist(), strict=True):
                offered = at < table.max_tokens[row] and self._texts[row][0][at]
                self.scheduler.offer(row, 8 if offered else 0, self._guessable[1])
        return np.asarray(rows[came == table.max_tokens[rows]])

    def to_the_end(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.live:
                assert self.pool.num_free == self.pool.num_blocks
                assert self.scheduler.host.num_used == 0
                return
            preemptions = len(self.preempted)
            planned = self.step(float(len(self.plans)))
            assert planned or len(self.preempted) > preemptions, "nothing is planned"
        raise AssertionError(f"{self.live} requests have not ended after {MAX_STEPS} steps")

    def first_plan_rows(self) -> list[int]:
        return list(self.plans[0])

    def order_of_first_start(self) -> list[int]:
        """Numbers of the requests, from 0 by arrival, in the order in which they started."""
        return self._starts

    def _check(self, plan: BatchPlan, prefill: np.ndarray) -> None:
        table, limits = self.table, self.limits
        assert plan.total_tokens <= limits.max_batch_tokens
        whole = not self.policy.chunked or self.policy.full_prefill
        p = limits.max_batch_tokens if whole else limits.max_prefill_tokens
        # Decodes may come on top where a policy puts them behind prefills.
        assert plan.num_tokens[prefill[plan.rows]].sum() <= p
        running = np.flatnonzero(table.state == State.RUNNING)
        assert len(running) <= limits.max_rows
        assert self.pool.num_used <= self.pool.num_blocks
        assert (self.pool.room(running) >= table.computed[running]).all()
