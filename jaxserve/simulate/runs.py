"""One simulation of those asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.simulation import simulator
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.simulation.settings import Routing
from jaxserve.sched.simulation.systems.profiles import System
from jaxserve.sched.simulation.systems.systems import system
from jaxserve.sched.workloads.closed_loop import ClosedLoop
from jaxserve.sched.workloads.specs import WorkloadSpec
from jaxserve.sched.workloads.workload import Workload

REFUSED = (ValueError, InvalidPlan, OSError)
# Of a run, as `simulate` has them.
_SIMULATED = (
    *("kv_tokens", "num_blocks", "host_tokens", "block_size", "rules", "overlap", "replicas"),
    *("routing", "max_queue", "refuse_late", "record_rows"),
)


@dataclass(frozen=True)
class Outcome:
    """numbers: as `SimulationResult.summary` has them. kv_tokens: of the cache. seed_read: whether
    the policy drew lots. attained: bool [n], which requests are within all of their targets.
    result: if it is kept."""

    numbers: dict[str, Any]
    kv_tokens: int
    seed_read: bool
    attained: np.ndarray
    result: SimulationResult | None

    @classmethod
    def from_result(cls, result: SimulationResult, *, keep: bool) -> Outcome:
        """Of a simulation, or of what was served."""
        kept = result if keep else None
        return cls(result.summary(), result.kv_tokens, result.seed_read, result.attained, kept)


@dataclass(frozen=True)
class Recorded:
    """A workload that is there already, beside those that a `WorkloadSpec` makes. lengths: what it
    is called."""

    lengths: str
    workload: Workload
    rate: float | None = None
    duration: float | None = None
    best_effort: ClosedLoop | None = None

    @property
    def count(self) -> float:
        """Requests."""
        return len(self.workload)

    def make_workload(self, seed: int) -> Workload:
        """The same for every seed."""
        return self.workload

    def drawn(self) -> bool:
        """Whether the seed matters: it does not."""
        return False


Source = WorkloadSpec | Recorded


@dataclass(frozen=True)
class Run:
    """One simulation: a policy on a workload. Holds only what can go to another process. system: or
    the name of one, see `systems.system`. num_blocks: of the pool, instead of kv_tokens. overlap:
    instead of the rules'. keep: whether its outcome has all of the result; record_rows: who was in
    each batch, too."""

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
    num_blocks: int | None = None
    overlap: bool | None = None

    @property
    def rate(self) -> float | None:
        """Requests/s; None if it is not given."""
        return self.workload.rate

    @property
    def requests(self) -> float:
        """How many there are; infinity where that is known only when they are made."""
        return math.inf if self.workload.best_effort else self.workload.count

    @property
    def system_name(self) -> str:
        """As it was given, if it was by name."""
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

    def outcome(
        self,
        progress: Callable[[float], None] | None = None,
        compiling: Callable[[], None] | None = None,
    ) -> Outcome:
        """Simulates it. progress(share): so much more of it is done, 1 in all. compiling: as
        `simulate` has it. Raises one of REFUSED."""
        workload = self.workload.make_workload(self.seed)
        share = 1 / len(workload)  # those of the loop, which nobody can count, come beside
        result = simulator.simulate(
            self.policy,
            workload,
            self.place(),
            limits=self.limits(),
            seed=self.seed,
            best_effort=self.workload.best_effort,
            until=math.inf if self.workload.duration is None else self.workload.duration,
            **{name: getattr(self, name) for name in _SIMULATED},
            progress=None if progress is None else lambda count: progress(count * share),
            compiling=compiling,
        )
        return Outcome.from_result(result, keep=self.keep)
