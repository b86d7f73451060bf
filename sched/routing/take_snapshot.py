"""Takes snapshots, by whoever drives a scheduler: sums over its `Backlog`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cost.reachability import NOTHING
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.request import Request, Tier
from jaxserve.sched.routing.snapshot import Prices, Snapshot
from jaxserve.sched.slo.backlog import Backlog, Known

WINDOW = 200  # outputs, or first tokens, of which a mean is
PACE = 0.05  # weight of a step in the mean of how long steps take


def lately(mean: Any, seen: Any, count: Any, total: Any) -> Any:
    """The mean of about the last WINDOW values, and of how many it is, once `count` more, at least
    one, with that sum have come. Their order does not matter."""
    seen = min(seen + count, WINDOW)
    return mean + min(count / seen, 1.0) * (total / count - mean), seen


@dataclass
class Lately:
    """What a replica has learned that its scheduler does not keep; see `Snapshot`."""

    mean_output: float = 0.0
    attainment: float = 1.0
    pace: float = 1.0
    _outputs: int = 0
    _firsts: int = 0

    def ended(self, lengths: np.ndarray) -> None:
        """Outputs of so many tokens, int64 [n], have ended at once."""
        if len(lengths):
            total = int(lengths.sum())
            found = lately(self.mean_output, self._outputs, len(lengths), total)
            self.mean_output, self._outputs = found

    def began(self, outputs: int, in_time: int) -> None:
        """So many first tokens have come at once, as many of them in time."""
        if outputs:
            self.attainment, self._firsts = lately(self.attainment, self._firsts, outputs, in_time)

    def stepped(self, pace: float) -> None:
        """A step has taken so many times what the prices say."""
        if pace != self.pace:
            self.pace += PACE * (pace - self.pace)


def constant_fields(
    prices: Prices, policy: Policy, limits: Limits, num_blocks: int, block_size: int
) -> dict[str, Any]:
    """What no step changes of a replica's snapshots, by field."""
    return {
        "prices": prices,
        "prefill_tokens": policy.prefill_limit(limits),
        "max_rows": policy.row_limit(limits),
        "by_tier": serves_by_tier(policy),
        "num_blocks": num_blocks,
        "block_size": block_size,
    }


def idle_snapshot(known: dict[str, Any], now: float = 0.0) -> Snapshot:
    """Of a replica with nothing to do, that has learned nothing. known: see `constant_fields`."""
    counts: dict[str, Any] = dict.fromkeys(
        (
            *("busy", "unfinished", "running", "cached", "waiting", "realtime_tokens"),
            *("best_effort_tokens", "realtime_quad", "best_effort_quad", "realtime_blocks"),
            "best_effort_blocks",
        ),
        0,
    )
    learned = Lately()
    return Snapshot.from_numbers(
        time=now,
        **counts,
        free_blocks=known["num_blocks"],
        tbt=np.inf,
        mean_output=learned.mean_output,
        attainment=learned.attainment,
        pace=learned.pace,
        draining=False,
        **known,
    )


def serves_by_tier(policy: Policy) -> bool:
    """Whether it serves a real-time request before a best-effort one that came earlier, as far as
    it says."""
    with np.errstate(all="ignore"):
        realtime, best_effort = (
            policy.queue_priority(Known.from_request(_request(tier), NOTHING, 1.0, seq, 0), 1.0)
            for tier, seq in ((Tier.REALTIME, 1), (Tier.BEST_EFFORT, 0))
        )
    if realtime is None or best_effort is None:
        return False
    return bool(realtime < best_effort)


def _request(tier: Tier) -> Request:
    return Request("", (0,), tier=tier)


def take_snapshot(
    backlog: Backlog, unfinished: int, known: dict[str, Any], learned: Lately, *, draining: bool
) -> Snapshot:
    """What is before a scheduler, in sums. unfinished: requests that are there and not over, those
    included that have computed all they will. known: as `constant_fields` has it."""
    mine = backlog.known
    pending = ~mine.decoding
    length = mine.prompt_len + mine.generated
    tokens = (length - mine.computed) * pending
    quad = tokens * (tokens + 2 * mine.computed)
    blocks = blocks_for(length, backlog.block_size) * mine.waiting
    late = mine.tier == Tier.BEST_EFFORT
    runs = ~mine.waiting
    return Snapshot.from_numbers(
        time=backlog.time,
        busy=backlog.free_at - backlog.time,
        unfinished=unfinished,
        running=int(np.count_nonzero(runs)),
        cached=int(mine.computed[runs].sum()),
        waiting=int(np.count_nonzero(mine.waiting)),
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
        **known,
    )
