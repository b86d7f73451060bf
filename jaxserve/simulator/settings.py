"""Settings of a simulation, and what it returns for its requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxserve.sched.cache.groups.groups import Groups, longest_in
from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.cost.cost_model import CostModel, LinearCostModel
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.step_residuals import Scatter
from jaxserve.sched.policy import Limits, View
from jaxserve.sched.routing.moves import Link
from jaxserve.sched.routing.routers import ROUTERS
from jaxserve.simulator.program_records import ProgramRecords
from jaxserve.simulator.workloads.closed_loop import ClosedLoop
from jaxserve.simulator.workloads.workload import Workload

REFUSED = -1  # the replica of a request that found the queue full

# A batch, see `BatchRecords`.
BATCH = np.dtype(
    [("start", np.float64), ("duration", np.float64)]
    + [
        (name, np.int64)
        for name in (
            *("num_tokens", "num_decodes", "num_prefills", "kv_used", "preemptions", "num_hidden"),
            *("num_recomputed", "saved_slots", "loaded_slots", "num_shared"),
        )
    ],
    align=True,
)


@dataclass(frozen=True)
class Fault:
    """A replica that gets slower, or dies. It dies once the step that its host waits for has ended.
    When that is noticed, its requests go on elsewhere, with prompts and tokens computed again. If
    no other replica is up, those with tokens end with them.

    Attributes:
        replica: Its number.
        time: When, seconds.
        slowdown: Factor of its step times from then on; inf if it dies.
        notice: Seconds until the routers notice a death.

    Raises:
        ValueError: For other values.
    """

    replica: int
    time: float
    slowdown: float = math.inf
    notice: float = 1.0

    def __post_init__(self) -> None:
        if self.replica < 0 or not 0 <= self.time < math.inf:
            raise ValueError("a fault needs a replica and a time, both 0 or more")
        if not self.slowdown >= 1 or not 0 <= self.notice < math.inf:
            raise ValueError(
                f"slowdown must be at least 1 and notice 0 or more seconds, got {self.slowdown} "
                f"and {self.notice}"
            )


@dataclass(frozen=True)
class Routing:
    """How requests reach the replicas.

    Attributes:
        name: One of `routing.ROUTERS`.
        routers: Number of routers. Router i of n has every n-th replica and every n-th request.
        interval: Seconds between two snapshots of a replica; 0 for routers that always see the
        present state.
        age: Delay of a snapshot in seconds, less than the interval.
        loss: Share of the snapshots that get lost.
        faults: At most one for each replica.
        prefixes: Whether routers use the contents of prefix caches.
        link: What lies between replicas, if requests may go on at another one after their first
            token; only with `slo`.
        roles: How many replicas, the first ones, compute prompts only, and how many of the others
            decodes only: at least one for each router, and all together; None if any may do both.
            Only with a link.

    Raises:
        ValueError: For other values.
    """

    name: str = "round_robin"
    routers: int = 1
    interval: float = 0.0
    age: float = 0.0
    loss: float = 0.0
    faults: tuple[Fault, ...] = ()
    prefixes: bool = True
    link: Link | None = None
    roles: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.name not in ROUTERS:
            raise ValueError(f"there is no routing {self.name!r}; known: {', '.join(ROUTERS)}")
        if self.link is not None and self.name != "slo":
            raise ValueError(f"requests move with routing slo only, not with {self.name}")
        if self.roles is not None and self.link is None:
            raise ValueError("without a link all replicas compute prompts and decodes")
        if self.roles is not None and min(self.roles) < self.routers:
            raise ValueError(f"roles must be at least routers, {self.routers}, got {self.roles}")
        if self.routers < 1:
            raise ValueError(f"routers must be at least 1, got {self.routers}")
        if not 0 <= self.interval < math.inf:
            raise ValueError(f"interval must be 0 or more seconds, got {self.interval}")
        if not (self.age == 0 or 0 < self.age < self.interval):
            raise ValueError(
                f"age must be 0 or more seconds and less than the interval of {self.interval:g}, "
                f"got {self.age}"
            )
        if not 0 <= self.loss <= 1 or (self.loss and not self.interval):
            raise ValueError(f"loss must be a share of what is published, got {self.loss}")
        if len({fault.replica for fault in self.faults}) < len(self.faults):
            raise ValueError("faults must be of different replicas")

    @property
    def looks(self) -> bool:
        """Whether the routers use snapshots."""
        return ROUTERS[self.name].looks

    @property
    def finds(self) -> bool:
        """Whether the routers use the contents of prefix caches."""
        return ROUTERS[self.name].finds and self.prefixes

    @property
    def draws(self) -> bool:
        """Whether routing depends on the seed."""
        return ROUTERS[self.name].draws or (self.looks and self.loss > 0)

    def first_times(self, replicas: int) -> np.ndarray:
        """When each replica publishes for the first time, one after the other, float64
        [replicas]."""
        return self.interval * np.arange(1, replicas + 1) / replicas


@dataclass(frozen=True)
class EngineOptions:
    """How each replica serves.

    Attributes:
        limits: By default the system's C, P = 512 (C for policies that do not chunk), any number
            of rows.
        kv_tokens: M, tokens of K and V that the pool holds.
        num_blocks: The same in blocks; K and V of block_size tokens take two.
        block_size: Tokens of a block.
        host_tokens: Tokens of K and V that fit in host memory: of checkpoints, and with
            prefix_caching of evicted pages.
        rules: A name of `simulator.RULES`.
        overlap: Overrides that of the rules.
        max_queue: Requests that may wait, in addition to max_rows. Further ones are refused.
        refuse_late: See `server.refuse_late`; inf predicts waits and refuses none.
        rho: Added time of a step for a token read from a hidden cache, see `View`; None for no
            hidden caches.
        prefix_caching: Whether requests reuse K and V of others, as far as the workload's prefixes
        say that their tokens are the same. Off by default, whatever the rules.
        retention: Which unread pages are kept: a name of `registry.RETENTIONS`, with parameters.
        Others than `lru` run in Python.
        groups: The groups of layers that keep less than all K and V; None for those with a state
            of the system, if it has some. Runs in Python.
        online: Policies see a model that starts as this one and learns from the steps, as in a
        server.
    """

    limits: Limits | None = None
    kv_tokens: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    host_tokens: int = 0
    rules: str = "jaxserve"
    overlap: bool | None = None
    max_queue: int | None = None
    refuse_late: float | None = None
    rho: float | Literal["system"] | None = "system"
    prefix_caching: bool = False
    retention: str = LRU
    online: LinearCostModel | None = None
    groups: Groups | None = None


@dataclass(frozen=True)
class FleetOptions:
    """The replicas.

    Attributes:
        replicas: Number of replicas, each with its own policy.
        routing: A name stands for one router that sees all.
    """

    replicas: int = 1
    routing: str | Routing = "round_robin"


@dataclass(frozen=True)
class TrafficOptions:
    """Which part of the workload is served, and what is served beside it.

    Attributes:
        best_effort: Additional best-effort traffic.
        until: When the run is cut off, seconds.
        drop_too_long: Whether requests that exceed M or C are left out and counted; the others are
            limited to what fits. Otherwise they are an error.
    """

    best_effort: ClosedLoop | None = None
    until: float = math.inf
    drop_too_long: bool = False


@dataclass(frozen=True)
class RunOptions:
    """How the simulation runs, and what it records.

    Attributes:
        seed: For all random draws.
        checked: Whether plans are checked as in the engine; by default all but those of built-in
        policies.
        compiled: Whether to run with numba (`dispatch.py`); by default if it can be. The outcome is
            the same.
        coast: In Python, whether to run several predictable steps at once. The outcome is the same.
        record_rows: Whether to record the requests of each batch.
        record_batches: Whether to keep the batches.
        progress: progress(n) is called when n more requests have come.
        compiling: Called when numba begins to compile.
        watch: Called before each step with the policy's view, for example for a picture of the pool
            (`figures.pool_view.policy_view`). Plans are checked then, and steps run one by one.
    """

    seed: int = 0
    checked: bool | None = None
    compiled: bool | None = None
    coast: bool = True
    record_rows: bool = False
    record_batches: bool = True
    progress: Callable[[int], None] | None = None
    compiling: Callable[[], None] | None = None
    watch: Callable[[View], None] | None = None


@dataclass(frozen=True)
class Setting:
    """Where a policy is simulated: the result of the options, the rules and the system. For fields
    not explained here see the options.

    Attributes:
        num_blocks, block_size: Pool of each replica.
        capacity: Most requests of a replica, waiting and running; others are refused.
        fixed: Fields of the replicas' snapshots that never change, see `routing.take_snapshot`.
        host_slots: Slots of host memory for caches.
        max_model_len: Tokens of the longest request, prompt and limit.
        projects: Whether reads of hidden caches project them into K and V, see `View`.
    """

    limits: Limits
    num_blocks: int
    block_size: int
    cost_model: CostModel
    overlap: bool
    padding: Padding | None = None
    host: HostOverhead = field(default_factory=HostOverhead)
    replicas: int = 1
    routing: Routing = field(default_factory=Routing)
    fixed: dict[str, Any] = field(default_factory=dict)
    capacity: float = math.inf
    seed: int = 0
    keeps_batches: bool = True
    scatter: Scatter | None = None
    host_slots: int = 0
    max_model_len: int = 0
    rho: float | None = None
    projects: bool = False
    refuse_late: float | None = None
    prefix_caching: bool = False
    retention: str = LRU
    online: LinearCostModel | None = None
    groups: Groups | None = None

    @property
    def longest_alone(self) -> int:
        """Tokens of the longest request that the pool holds."""
        ahead = self.limits.max_batch_tokens
        return longest_in(self.num_blocks, self.block_size, self.groups, ahead)


@dataclass(frozen=True)
class Served:
    """Results of the simulation of one workload.

    Attributes:
        workload: All requests that came, including best-effort ones.
        token_times: float64 [sum of output_len], nan for tokens that did not come.
        preemptions: int64 [n].
        replica: int64 [n], REFUSED for requests that found no room.
        failed: bool [n], requests that ended early since all replicas had died.
        batches: Of each replica, records with the fields of BATCH.
        seed_read: Whether a policy or a router asked for the seed.
        rows: By replica and batch, which requests were in it; None if not recorded.
        expected: float64 [n], seconds to the first token as predicted on arrival; None if not
        requested.
        found: int64 [n], cached tokens of each prompt; None without prefix caching.
        drafts: int64 [n] each, drafted tokens that were computed, and accepted ones; None without
        drafts.
        programs: The programs that began; None if there are none.
        moves: int64 [n], how often each went on at another replica while its own was well; None
            without a link.
    """

    workload: Workload
    token_times: np.ndarray
    preemptions: np.ndarray
    replica: np.ndarray
    failed: np.ndarray
    batches: list[np.ndarray]
    seed_read: bool = False
    rows: list[list[BatchRows]] | None = None
    expected: np.ndarray | None = None
    found: np.ndarray | None = None
    drafts: tuple[np.ndarray, np.ndarray] | None = None
    programs: ProgramRecords | None = None
    moves: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Which requests were in a batch.

    Attributes:
        requests: int64 [n], their numbers in the workload.
        tokens: int64 [n], tokens that each computed.
        decoding: bool [n], whether each was a decode.
        preempted: int64 [k], numbers of requests that lost their cache since the batch before.
        lengthening: Seconds that best-effort requests added to it, see `sched/slo/tiers.py`.
    """

    requests: np.ndarray
    tokens: np.ndarray
    decoding: np.ndarray
    preempted: np.ndarray
    lengthening: float = 0.0

    @classmethod
    def of_decodes(cls, requests: np.ndarray, steps: np.ndarray) -> list[BatchRows]:
        """Consecutive batches of decodes only.

        Args:
            requests: int64 [n], numbers in the workload.
            steps: int64 [n], number of the batches, from the first on, that each is in.
        """
        nobody, found = np.zeros(0, np.int64), []
        for step in range(1, int(steps.max()) + 1):
            here = requests[steps >= step]
            ones = np.ones(len(here), np.int64)
            found.append(cls(here, ones, ones > 0, nobody))
        return found
