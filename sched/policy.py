"""The interface of scheduling policies: their input, their plans and their properties.

The policies themselves are in `sched/policies/`, and `sched/registry.py` knows them by name.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import LEFT, CacheKind
from jaxserve.sched.cache.kv_offload import HostMemory
from jaxserve.sched.cost.cost_model import BatchFeatures, CostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.reachability import prefill_times
from jaxserve.sched.cost.size_ratios import SizeRatios
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.programs.program_table import ProgramTable
from jaxserve.sched.request import Tier
from jaxserve.sched.row_columns import grow_columns
from jaxserve.sched.state.request_table import RequestTable


@dataclass(frozen=True)
class Limits:
    """Names and letters are those of InferMax section 3.1.

    Attributes:
        max_batch_tokens: C, tokens of one batch.
        max_prefill_tokens: P <= C. A prefill joins a batch only as far as the whole batch,
        including decodes, stays within it.
        max_rows: Most requests in a batch, and most requests that hold a cache.

    Raises:
        ValueError: A limit is below 1, or P above C.
    """

    max_batch_tokens: int
    max_prefill_tokens: int
    max_rows: int

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_prefill_tokens", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_prefill_tokens > self.max_batch_tokens:
            raise ValueError(
                f"max_prefill_tokens ({self.max_prefill_tokens}) must not exceed "
                f"max_batch_tokens ({self.max_batch_tokens})"
            )


class Oracle:
    """How much each request will write, and its number in the workload, which no server can know:
    for hypothetical policies (InferMax section 3)."""

    def __init__(self, capacity: int) -> None:
        self._lengths = np.zeros(capacity, np.int64)
        self._numbers = np.zeros(capacity, np.int64)

    def follow(self, rows: int) -> None:
        """Makes room for rows up to `rows`."""
        grow_columns(self, rows, _lengths=0, _numbers=0)

    def set_output(self, row: int, length: int, number: int) -> None:
        """Sets the output length and the number of the request in that row."""
        self._lengths[row], self._numbers[row] = length, number

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each output, int64 [n]."""
        return np.asarray(self._lengths[rows])

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Each request's index in the workload, from 0 in order of arrival, int64 [n]."""
        return np.asarray(self._numbers[rows])


@dataclass
class Device:
    """The state of the device.

    Attributes:
        free_at: When it is predicted to finish what has been launched, seconds
            (`StepWatch.free_at`); in the past if nothing is in flight.
        overrun: Ratio of measured to predicted time that four of five steps do not exceed
        (`StepWatch.overrun`), for what must certainly be in time.
        host_gap_s: Seconds for which it is idle if the host plans the next step only after it has
        received this step's tokens.
        ratios: How exactly steps of each size are predicted (`StepWatch.ratios`).
    """

    free_at: float = -math.inf
    overrun: float = 1.0
    host_gap_s: float = 0.0
    ratios: SizeRatios = field(default_factory=SizeRatios)


_MANY_SLOTS = 1 << 30  # so many that copies take longer than any batch beside them


@dataclass(frozen=True)
class View:
    """Everything that a policy sees; it must not change it.

    Attributes:
        table: The requests.
        pool: Their blocks.
        limits: C, P and rows.
        cost_model: Cost model of `step_time`.
        padding: The shapes that batches are rounded up to; None for none.
        seed: For policies that draw random numbers; they use `policy_seed`.
        rho: Added seconds of a step for each token that it reads from a hidden cache instead of K
        and V (Apt-Serve Eq. 6). Negative if that is faster; None if there are no hidden caches.
        projects: Whether such a read projects every vector into K and V (Apt-Serve section 3.1),
        instead of absorbing the projections into queries and sums.
        host: Caches in host memory.
        oracle: For hypothetical policies; None for all others.
        device: Its state, see `step_end`, and how exactly its steps are predicted.
        programs: What is known of the programs that requests belong to, beside the table's columns.
    """

    table: RequestTable
    pool: BlockPool
    limits: Limits
    cost_model: CostModel
    padding: Padding | None = None
    seed: int = 0
    rho: float | None = None
    projects: bool = False
    host: HostMemory = field(default_factory=HostMemory)
    oracle: Oracle | None = None
    device: Device = field(default_factory=Device)
    programs: ProgramTable = field(default_factory=lambda: ProgramTable(RequestTable(0)))

    def policy_seed(self) -> int:
        """`seed`, for a policy that draws random numbers: simulations note its use."""
        return self.seed

    def step_end(self, now: float) -> float:
        """When the step in flight is expected to end, seconds: the planned step begins then. `now`
        if nothing is in flight, or if it should have ended already."""
        return max(now, self.device.free_at)

    def step_time(self, batch: BatchFeatures) -> Any:
        """Seconds that the device takes for a batch, planned or hypothetical, after padding; an
        array if the features are arrays. Live it is learned from the steps so far
        (`sched/cost/online_cost_model.py`), so it may change from step to step. While any request
        has an adapter, every batch is assumed to have one."""
        if self.padding is not None:
            batch = batch.padded(self.padding)
        if self.table.num_adapted:
            batch = batch._replace(adapted_tokens=batch.padded_tokens)
        return self.cost_model.batch_time(batch)

    def swap_time(self, tokens: np.ndarray, kinds: Any = CacheKind.KV) -> np.ndarray:
        """Seconds to checkpoint and restore these cached tokens, by the cost model's price of
        copied slots. If copies run beside batches, a step is longer only by what they take beyond
        the batch (`LinearCostModel.overlapped`). Live, copies are timed at the start, for policies
        with `moves_cache`, and learned from the steps that copy.

        Args:
            tokens: int64 [n].
            kinds: `CacheKind` of their caches, one or [n].

        Returns:
            float64 [n]; 0 if the cost model does not price copies.
        """
        less, more = (
            float(self.step_time(BatchFeatures(0, 0, 0, 0, 0, 0, 0, loaded_slots=slots)))
            for slots in (_MANY_SLOTS, 2 * _MANY_SLOTS)
        )
        return np.asarray(2 * self.host.slots_for(tokens, kinds) * ((more - less) / _MANY_SLOTS))

    def refill_time(self, tokens: np.ndarray, chunk: int | None = None) -> np.ndarray:
        """Seconds to compute these tokens of a request again, in steps of its own.

        Args:
            tokens: int64 [n].
            chunk: Most tokens of a step; None for P.

        Returns:
            float64 [n].
        """
        chunk = chunk or self.limits.max_prefill_tokens
        seconds = prefill_times(self.step_time, np.maximum(tokens, 1), chunk)
        return np.where(tokens > 0, seconds, 0.0)

    def most_output(self, rows: np.ndarray) -> np.ndarray:
        """Most tokens that each may write, int64 [n]: its limit, or its length for policies that
        know it."""
        if self.oracle is not None:
            return self.oracle.lengths(rows)
        return np.asarray(self.table.max_tokens[rows])


class Policy(abc.ABC):
    """A scheduling system. It keeps no clock and touches no device. Every scheduler gets a new
    instance, so a policy may remember things between plans.

    Attributes:
        chunked: Whether a prompt may be computed in parts; if not, max_batch_tokens must hold a
        whole one.
        full_prefill: P = C, whatever the limits say.
        mixed_batches: Whether prompts are computed beside decodes.
        max_rows: Most requests that hold a cache, if the policy has its own limit.
        hypothetical: Whether it knows what no server can, `View.oracle`. Simulations run it; the
        live server refuses it.
        hybrid_cache: Whether it ever plans hidden caches, if the view offers them (`View.rho`).
        moves_cache: Whether it ever plans `Copy`, `Checkpoint` or `Restore`. For other policies,
        engines need not be prepared for these.
        adapts: Whether it remains what it is without hidden caches and host memory, since it plans
        them only where they pay off.
        counts_blocks: Whether it only asks how many blocks there are, and how many a request has or
        takes, but never which. A simulation then only counts them.
        steady: Whether it plans a token for each request, and gives none up, while no request
        waits, every request decodes and memory lasts. Such steps are predictable, and a simulation
        takes several at once.
        speculates: Whether the scheduler adds drafted tokens to its decodes (the variant `+spec`,
        `sched/speculation/`).
        keeps_programs: Whether it counts on a retention that keeps caches while tools run
        (`Retention.by_program`). A start without one warns.
    """

    chunked: bool = True
    full_prefill: bool = False
    mixed_batches: bool = True
    max_rows: int | None = None
    hypothetical: bool = False
    hybrid_cache: bool = False
    moves_cache: bool = False
    adapts: bool = False
    counts_blocks: bool = False
    steady: bool = False
    speculates: bool = False
    keeps_programs: bool = False

    def queue_priority(self, requests: Any, now: float) -> Any:
        """A number for each request: among waiting ones, the smallest is served first, as far as
        this is predictable. It predicts waits, and decides in which order one tenant's requests
        are offered to the policy (`fair_queue.py`). Called from any thread: it must not change
        anything.

        Args:
            requests: One or several, with the attributes of `policy_spec.Columns`.
            now: Seconds.

        Returns:
            A number or an array; None if unknown.
        """
        return None

    def makes_room(self, running: Any, request: Any, now: float) -> Any:
        """Which running requests give their memory and rows to a new one that finds none. Used for
        predictions, like `queue_priority`.

        Args:
            running: See `queue_priority`; answers for requests that do not run are ignored.
            request: A single request, with the same attributes.
            now: Seconds.

        Returns:
            A bool or an array.
        """
        return False

    def prefill_limit(self, limits: Limits) -> int:
        """How many tokens of a batch prompts may fill: P, or C if they are whole, or may fill
        it."""
        whole = not self.chunked or self.full_prefill
        return limits.max_batch_tokens if whole else limits.max_prefill_tokens

    def side(self, tier: int) -> int:
        """The side from which requests of this tier fill blocks (`Direction`)."""
        return LEFT

    @property
    def two_sided(self) -> bool:
        """Whether tiers fill blocks from different sides."""
        return len({self.side(tier) for tier in Tier}) > 1

    def row_limit(self, limits: Limits) -> int:
        """Most requests that hold a cache."""
        return min(limits.max_rows, self.max_rows or limits.max_rows)

    @abc.abstractmethod
    def plan(self, view: View, now: float) -> BatchPlan:
        """The next step. now: seconds, on the clock of `RequestTable.arrival`."""
