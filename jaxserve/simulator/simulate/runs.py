"""A single simulation of the command."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.slo.metrics import has_targets
from jaxserve.simulator import simulator
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.settings import (
    EngineOptions,
    FleetOptions,
    Routing,
    RunOptions,
    TrafficOptions,
)
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.closed_loop import ClosedLoop
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload

REFUSED = (ValueError, InvalidPlan, OSError)
# Defaults of a run, as in `simulate`.


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        numbers: From `SimulationResult.summary`.
        kv_tokens: Size of the cache.
        seed_read: Whether the policy drew random numbers.
        attained: bool [n], which of the requests with targets attain their SLO.
        lasts: How long requests with targets kept arriving, as a multiple of the longest target;
        inf without a TTFT or JCT.
        result: The full result; None unless the run keeps it.
    """

    numbers: dict[str, Any]
    kv_tokens: int
    seed_read: bool
    attained: np.ndarray
    lasts: float
    result: SimulationResult | None

    @classmethod
    def from_result(cls, result: SimulationResult, *, keep: bool) -> Outcome:
        """From a simulation, or from a recording. keep: keep the result, too."""
        kept, workload = result if keep else None, result.requests.workload
        asked = workload.terms.asked
        attained, came = result.attained[asked], workload.arrival[asked]
        targets = np.stack([workload.ttft, workload.jct])
        longest = float(targets[targets < np.inf].max(initial=0.0))
        lasts = float(np.ptp(came)) / longest if longest else math.inf
        return cls(result.summary(), result.kv_tokens, result.seed_read, attained, lasts, kept)


@dataclass(frozen=True)
class Recorded:
    """An existing workload, in place of a `WorkloadSpec`.

    Attributes:
        lengths: Its name.
        workload: The requests.
        rate: Requests/s, if arrivals were rescaled.
        duration: Always None: it is served to its end.
        best_effort: Always None: it has no closed loop.
    """

    lengths: str
    workload: Workload
    rate: float | None = None
    duration: float | None = None
    best_effort: ClosedLoop | None = None

    @property
    def count(self) -> float:
        """Number of requests."""
        return len(self.workload)

    def at_rate(self, rate: float) -> Recorded:
        """The same requests at another rate, in requests/s."""
        return replace(self, workload=self.workload.at_rate(rate), rate=rate)

    def make_workload(self, seed: int) -> Workload:
        """The same for every seed."""
        return self.workload

    def drawn(self) -> bool:
        """Whether the seed matters, which it does not."""
        return False


Source = WorkloadSpec | Recorded


@dataclass(frozen=True)
class Run:
    """One simulation: a policy on a workload. Can be pickled, for another process.

    Attributes:
        policy: A name for `make_policy`.
        system: The system, or its name (`systems.system`).
        workload: A specification, or a recorded one.
        rules: A name of `simulator.RULES`.
        kv_tokens: Size of the cache; None for the system's.
        host_tokens: Tokens of K and V that fit in host memory.
        block_size: Tokens of a block; None for that of the system or the rules.
        max_batch_tokens: C; None for the system's.
        max_prefill_tokens: P; None for the default, see `simulate`.
        max_rows: Most requests in a batch; None for no limit.
        replicas: Number of replicas.
        routing: How requests are spread over them.
        seed: Seed of the workload and of the policy.
        keep: Whether the outcome has the whole result.
        record_rows: Whether the result also has the requests of each batch.
        hidden_read: How hidden caches are read, see `systems.system`.
        max_queue: Requests that may wait, in addition to max_rows; None for no limit.
        refuse_late, prefix_caching, retention, drop_too_long: See `simulate`.
        num_blocks: Size of the pool, in place of kv_tokens.
        overlap: Whether steps are planned ahead; None for that of the rules.
    """

    policy: str
    system: System | str
    workload: Source
    rules: str
    kv_tokens: int | None
    host_tokens: int
    block_size: int | None
    max_batch_tokens: int | None
    max_prefill_tokens: int | None
    max_rows: int | None
    replicas: int
    routing: Routing
    seed: int
    keep: bool = False
    record_rows: bool = False
    hidden_read: str = "auto"
    max_queue: int | None = None
    refuse_late: float | None = None
    prefix_caching: bool = False
    retention: str = LRU
    drop_too_long: bool = False
    num_blocks: int | None = None
    overlap: bool | None = None

    @property
    def rate(self) -> float | None:
        """Requests/s; None if not given."""
        return self.workload.rate

    @property
    def requests(self) -> float:
        """Number of requests; infinity if it is known only once they are made."""
        return math.inf if self.workload.best_effort else self.workload.count

    @property
    def system_name(self) -> str:
        """The system's name."""
        return self.system.name if isinstance(self.system, System) else self.system

    def place(self) -> System:
        """The system. Raises one of REFUSED for an unknown one."""
        if isinstance(self.system, System):
            return self.system
        return system(self.system, self.hidden_read)

    def limits(self) -> Limits:
        """C, P and rows. Raises one of REFUSED, also for an unknown policy or system."""
        return simulator.default_limits(
            make_policy(self.policy),
            self.place(),
            max_batch_tokens=self.max_batch_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            max_rows=self.max_rows,
        )

    def engine(self) -> EngineOptions:
        """How each replica serves. Raises the errors of `limits`."""
        return EngineOptions(
            limits=self.limits(),
            kv_tokens=self.kv_tokens,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            host_tokens=self.host_tokens,
            rules=self.rules,
            overlap=self.overlap,
            max_queue=self.max_queue,
            refuse_late=self.refuse_late,
            prefix_caching=self.prefix_caching,
            retention=self.retention,
        )

    def outcome(
        self,
        progress: Callable[[float], None] | None = None,
        compiling: Callable[[], None] | None = None,
    ) -> Outcome:
        """Simulates the run.

        Args:
            progress: Called with the share done since the last call, up to 1 in total.
            compiling: Called when numba begins to compile.

        Raises:
            REFUSED: The run is impossible.
        """
        workload = self.workload.make_workload(self.seed)
        share = 1 / len(workload)  # without requests of the loop, whose number is unknown
        result = simulator.simulate(
            self.policy,
            workload,
            self.place(),
            engine=self.engine(),
            fleet=FleetOptions(replicas=self.replicas, routing=self.routing),
            traffic=TrafficOptions(
                best_effort=self.workload.best_effort,
                until=math.inf if self.workload.duration is None else self.workload.duration,
                drop_too_long=self.drop_too_long,
            ),
            run=RunOptions(
                seed=self.seed,
                record_rows=self.record_rows,
                progress=None if progress is None else lambda count: progress(count * share),
                compiling=compiling,
            ),
        )
        return Outcome.from_result(result, keep=self.keep)


def check_targets(run: Run, problem: str) -> None:
    """ValueError if no request of the run has a target. problem: how its line begins."""
    if not has_targets(run.workload.make_workload(run.seed).terms):
        flags = "--slo_ttft_ms, --slo_tbt_ms, --slo_jct_ms, --slo_max_tbt_ms, --classes with one"
        raise ValueError(f"{problem}: {flags}, or traffic with them")
