"""Where a policy is simulated, and what became of the requests there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from jaxserve.sched.cost_model import CostModel
from jaxserve.sched.host_terms import HostTerms
from jaxserve.sched.padding import Padding
from jaxserve.sched.policy import Limits

REFUSED = -1  # the replica of a request that found the queue full

# A batch, as `BatchRecords` has them.
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
class Setting:
    """num_blocks, block_size: of each replica's pool. capacity: requests, waiting and running, that
    each has at most, inf for any number; who comes then is refused. The rest is as `simulate` has
    it."""

    limits: Limits
    num_blocks: int
    block_size: int
    cost_model: CostModel
    overlap: bool
    padding: Padding | None = None
    host: HostTerms = field(default_factory=HostTerms)
    replicas: int = 1
    routing: str = "round_robin"
    capacity: float = math.inf
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """token_times: float64 [sum of output_len], nan for those that were refused. preemptions,
    replica: int64 [n]; the latter REFUSED for who found no room. batches: of each replica, records
    with the fields of BATCH."""

    token_times: np.ndarray
    preemptions: np.ndarray
    replica: np.ndarray
    batches: list[np.ndarray]
