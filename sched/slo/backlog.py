"""A copy of a scheduler's state at one moment, from which any thread can predict waits
(`sched/slo/ttft_estimator.py`) without the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.prefix_sketch import PrefixSketch
from jaxserve.sched.cost.cost_model import BatchFeatures, CostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.reachability import Alone, targets_that_count
from jaxserve.sched.fairness.fair_share import Share
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import RELEGATED, RUNNING


@dataclass(frozen=True, slots=True)
class Known:
    """What `Policy.queue_priority` may know of n requests: arrays [n] under the names of
    `policy_spec.Columns`. Times in seconds, lengths in tokens.

    Attributes:
        arrival: Time of arrival.
        last_token: When the last token came; the arrival before the first.
        ttft: Target to the first token; inf for none, also below.
        tbt: Target between two tokens.
        jct: Target to the last token.
        seq: Order of arrival.
        prompt_len: Prompt tokens.
        generated: Tokens generated.
        computed: Tokens cached.
        tier: A `Tier`.
        alone: Time to the first token on an idle engine; 0 without targets.
        most_output: Most tokens that it may write.
        waiting: bool, whether it holds no cache.
        decoding: bool, whether it decodes.
        program_start, attained: See `RequestTable`; of a request that has just come, as if it were
        of no program.
        seed: Seed of the run.
        given: See `Columns`.
        outlook: An `Outlook`.
        bare: bool, whether it is a best-effort request without targets.
    """

    arrival: Any
    last_token: Any
    ttft: Any
    tbt: Any
    jct: Any
    seq: Any
    prompt_len: Any
    generated: Any
    computed: Any
    tier: Any
    alone: Any
    most_output: Any
    waiting: Any
    decoding: Any
    program_start: Any
    attained: Any
    seed: int = 0
    given: float = 0.0
    outlook: Any = 0
    bare: Any = False

    @classmethod
    def from_request(
        cls, request: Request, alone: Alone, arrival: float, seq: int, seed: int, cached: int = 0
    ) -> Known:
        """A request that has just come.

        Args:
            request: The request.
            alone: Its latency on this engine, if it were idle.
            arrival: Seconds.
            seq: How many requests came before it.
            seed: Seed of the run.
            cached: Cached tokens of its prompt.
        """

        def one(value: Any) -> np.ndarray:
            return np.array([value])

        ttft, tbt, jct, _ = targets_that_count(request.slo, alone)
        return cls(
            arrival=one(arrival),
            last_token=one(arrival),
            ttft=one(ttft),
            tbt=one(tbt),
            jct=one(jct),
            seq=one(seq),
            prompt_len=one(len(request.prompt)),
            generated=_ZERO,
            computed=one(cached),
            tier=one(int(request.tier)),
            alone=one(alone.ttft),
            most_output=one(request.sampling.max_tokens),
            waiting=_YES,
            decoding=~_YES,
            program_start=one(arrival),
            attained=_ZERO,
            seed=seed,
            outlook=_ZERO,
            bare=one(request.tier == Tier.BEST_EFFORT and request.slo == SLO()),
        )


_ZERO, _YES = np.zeros(1, np.int64), np.ones(1, bool)


@dataclass(frozen=True)
class Backlog:
    """A copy of a scheduler's unfinished requests [n], of what they hold and of its settings.

    Attributes:
        time: When it was taken, seconds.
        free_at: When the device is predicted to finish the steps launched so far; their tokens
            count as computed.
        received: Requests so far, including finished ones.
        known: The requests as policies may know them.
        blocks: int64 [n], blocks of K held by each: half of what becomes free. Caches that grow
            take the rest, and with all of it predictions are too short by more than half.
        tenants: int64 [n], indices into `shares`.
        shares: Every tenant so far, by name.
        free_blocks: Free blocks of the pool.
        block_size: Tokens of a block.
        limits: C, P and rows.
        policy: Ranks the requests.
        cost_model: Predicts steps; it may continue to learn.
        padding: How steps are rounded up; None for no padding.
        output_lengths: From `OutputLengths.counted`.
        sketch: Sketch of the prefix cache, which continues to change; None without one.
    """

    time: float
    free_at: float
    received: int
    known: Known
    blocks: np.ndarray
    tenants: np.ndarray
    shares: dict[str, Share]
    free_blocks: int
    block_size: int
    limits: Limits
    policy: Policy
    cost_model: CostModel
    padding: Padding | None
    output_lengths: tuple[np.ndarray, np.ndarray]
    sketch: PrefixSketch | None = None

    @classmethod
    def from_scheduler(cls, scheduler: Scheduler, now: float, free_at: float) -> Backlog:
        """Copies a scheduler's state, on the thread that plans."""
        view, table, pool = scheduler.view, scheduler.table, scheduler.pool
        waiting = table.queued()
        rows = np.concatenate([table.in_state(RUNNING), waiting])
        waits = np.zeros(len(rows), bool)
        waits[len(rows) - len(waiting) :] = True
        computed = table.computed[rows]
        if scheduler.host.num_used:  # tokens there are not computed again
            computed = np.maximum(computed, scheduler.host.tokens[rows])
        known = Known(
            arrival=table.arrival[rows],
            last_token=table.last_token[rows],
            ttft=table.ttft[rows],
            tbt=table.tbt[rows],
            jct=table.jct[rows],
            seq=table.seq[rows],
            prompt_len=table.prompt_len[rows],
            generated=table.generated[rows],
            computed=computed,
            tier=table.tier[rows].astype(np.int64),
            alone=table.alone[rows],
            most_output=view.most_output(rows),
            waiting=waits,
            decoding=table.decoding(rows),
            program_start=table.program_start[rows],
            attained=table.attained[rows],
            seed=vars(view)["seed"],  # so that simulations do not count this as a use by the policy
            outlook=table.outlook[rows].astype(np.int64),
            bare=table.bare(rows),
        )
        return cls(
            time=now,
            free_at=max(now, free_at),
            received=table.num_added,
            known=known,
            blocks=np.where(waits, 0, pool.held[rows]),
            tenants=table.tenant[rows],
            shares=scheduler.shares.shares(),
            free_blocks=pool.num_free_kv,
            block_size=pool.block_size,
            limits=view.limits,
            policy=scheduler.policy,
            cost_model=view.cost_model,
            padding=view.padding,
            output_lengths=table.output_lengths.counted(),
            sketch=None if scheduler.cache is None else scheduler.cache.sketch,
        )

    def __len__(self) -> int:
        return len(self.blocks)

    def step_time(self, batch: BatchFeatures) -> Any:
        """Seconds of a batch, see `View.step_time`."""
        if self.padding is not None:
            batch = batch.padded(self.padding)
        return self.cost_model.batch_time(batch)

    def queue_priority(self, known: Known, now: float) -> np.ndarray | None:
        """The policy's queue priority, float64 [n], inf for relegated requests; None if it has
        none."""
        with np.errstate(all="ignore"):
            found = self.policy.queue_priority(known, now)
        if found is None:
            return None
        ranks = np.broadcast_to(np.fmin(np.asarray(found, np.float64), np.inf), known.seq.shape)
        return np.where(known.outlook == RELEGATED, np.inf, ranks)

    def makes_room(self, known: Known, now: float) -> np.ndarray:
        """Which running requests make room for this one, bool [n]. known: of a single request."""
        with np.errstate(all="ignore"):
            found = self.policy.makes_room(self.known, known, now)
        return np.asarray(found & ~self.known.waiting)

    @property
    def max_rows(self) -> int:
        """Most requests that may hold a cache, including the policy's own limit."""
        return self.policy.row_limit(self.limits)

    @property
    def prefill_tokens(self) -> int:
        """Most tokens of a batch that prompts may fill."""
        return self.policy.prefill_limit(self.limits)
