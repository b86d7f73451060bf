"""Takes snapshots of a scheduler: sums over its `Backlog`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cost.cost_model import CostModel
from jaxserve.sched.cost.reachability import NOTHING
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.request import Request, Tier
from jaxserve.sched.routing.snapshot import Prices, Snapshot
from jaxserve.sched.slo.backlog import Backlog, Known
from jaxserve.sched.state.request_table import MISSED, RELEGATED

WINDOW = 200  # outputs, or first tokens, that a mean covers
PACE = 0.05  # weight of a step in the mean step time


def lately(mean: Any, seen: Any, count: Any, total: Any) -> Any:
    """Updates a mean of about the last WINDOW values. The order of the new values does not matter.

    Args:
        mean: The mean so far.
        seen: Number of values in it.
        count: Number of new values, at least one.
        total: Sum of the new values.

    Returns:
        The new mean, and the number of values in it.
    """
    seen = min(seen + count, WINDOW)
    return mean + min(count / seen, 1.0) * (total / count - mean), seen


@dataclass
class Lately:
    """Recent statistics that a replica's scheduler does not keep.

    Attributes:
        mean_output: Mean length of recent outputs, tokens; 0 before the first.
        attainment: Share of recent first tokens that were in time.
        pace: Measured over predicted step time.
    """

    mean_output: float = 0.0
    attainment: float = 1.0
    pace: float = 1.0
    _outputs: int = 0
    _firsts: int = 0

    def ended(self, lengths: np.ndarray) -> None:
        """Takes the lengths, int64 [n], of outputs that have ended at the same time."""
        if len(lengths):
            total = int(lengths.sum())
            found = lately(self.mean_output, self._outputs, len(lengths), total)
            self.mean_output, self._outputs = found

    def began(self, outputs: int, in_time: int) -> None:
        """Counts first tokens that came at the same time. in_time: how many of them met their
        target."""
        if outputs:
            self.attainment, self._firsts = lately(self.attainment, self._firsts, outputs, in_time)

    def stepped(self, pace: float) -> None:
        """A step took `pace` times what the prices predict."""
        if pace != self.pace:
            self.pace += PACE * (pace - self.pace)


def constant_fields(
    model: CostModel, policy: Policy, limits: Limits, num_blocks: int, block_size: int
) -> dict[str, Any]:
    """The fields of a replica's snapshots that never change, by name. ValueError if the model has
    no linear prices.

    Args:
        model: Its step-time model.
        policy: Its policy.
        limits: C, P and rows.
        num_blocks: Blocks of its pool.
        block_size: Tokens of a block.
    """
    return {
        **asdict(Prices.from_cost_model(model)),
        "prefill_tokens": policy.prefill_limit(limits),
        "max_rows": policy.row_limit(limits),
        "by_tier": serves_by_tier(policy),
        "num_blocks": num_blocks,
        "block_size": block_size,
    }


def idle_snapshot(known: dict[str, Any], now: float = 0.0) -> Snapshot:
    """The snapshot of a replica that has served nothing yet. known: from `constant_fields`."""
    return Snapshot(time=now, free_blocks=known["num_blocks"], **known)


def serves_by_tier(policy: Policy) -> bool:
    """Whether the policy serves a real-time request before an earlier best-effort one, as far as
    its queue priority shows."""
    with np.errstate(all="ignore"):
        realtime, best_effort = (
            policy.queue_priority(
                Known.from_request(Request("", (0,), tier=tier), NOTHING, 1.0, seq, 0), 1.0
            )
            for tier, seq in ((Tier.REALTIME, 1), (Tier.BEST_EFFORT, 0))
        )
    return None not in (realtime, best_effort) and bool(realtime < best_effort)


def take_snapshot(
    backlog: Backlog, unfinished: int, known: dict[str, Any], learned: Lately, *, draining: bool
) -> Snapshot:
    """Sums up a scheduler's unfinished work. The work of relegated requests is counted separately,
    since it comes after new requests.

    Args:
        backlog: The scheduler's backlog.
        unfinished: Unfinished requests, including those with nothing left to compute.
        known: From `constant_fields`.
        learned: The replica's recent statistics.
        draining: Whether it takes no more requests.
    """
    mine = backlog.known
    last = mine.outlook == RELEGATED
    length = mine.prompt_len + mine.generated
    left = (length - mine.computed) * ~mine.decoding
    tokens = left * ~last
    quad = tokens * (tokens + 2 * mine.computed)
    blocks = blocks_for(length, backlog.block_size) * (mine.waiting & ~last)
    late = mine.tier == Tier.BEST_EFFORT
    runs = ~mine.waiting
    return Snapshot(
        time=backlog.time,
        busy=backlog.free_at - backlog.time,
        unfinished=unfinished,
        running=int(np.count_nonzero(runs)),
        cached=int(mine.computed[runs].sum()),
        waiting=int(np.count_nonzero(mine.waiting)),
        given_up=int(np.count_nonzero(mine.waiting & (mine.outlook >= MISSED))),
        relegated=int(np.count_nonzero(mine.waiting & last)),
        relegated_tokens=int(left[last].sum()),
        realtime_tokens=int(tokens[~late].sum()),
        best_effort_tokens=int(tokens[late].sum()),
        realtime_quad=int(quad[~late].sum()),
        best_effort_quad=int(quad[late].sum()),
        realtime_blocks=int(blocks[~late].sum()),
        best_effort_blocks=int(blocks[late].sum()),
        free_blocks=int(backlog.free_blocks),
        tbt=float(mine.tbt[runs].min(initial=np.inf)),
        mean_output=learned.mean_output,
        attainment=learned.attainment,
        pace=learned.pace,
        draining=draining,
        sketch="" if backlog.sketch is None else backlog.sketch.text(),
        **known,
    )
