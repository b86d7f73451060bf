"""Apt-Serve: who has waited longest for what memory it takes, in a cache of either kind.

A step is one of prefills or one of decodes, whichever queue has waited longer in all (section 5).
Of those that wait, the greedy of `sched/hybrid.py` picks who starts in the free blocks, with K and
V or with a hidden cache. Those that run go on as they are. Only when the pool lacks the blocks
into which they grow does the greedy decide, over the whole pool, whom to evict; the paper also
recomputes caches to change their kind, here a hidden one becomes KV in place when there is memory
to spare. `aptserve_s` puts the same on Sarathi's batches (section 6.7).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.adaptive import Worth, go_on, in_flight, start, start_in_turn, to_kv, weigh
from jaxserve.sched.kinds import CacheKind
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View, register
from jaxserve.sched.table import RUNNING, WAITING


@register(
    "aptserve",
    summary="hybrid cache; prefill or decode by pending time, requests by pending time a block",
    source="Apt-Serve 4, 5",
)
@dataclass(frozen=True)
class AptServe:
    """hybrid_cache: hidden caches where the view offers them. adaptive: by value; otherwise first
    come, first served, and prefills first, as in vLLM. chunked: Sarathi's batches, decodes first,
    then chunks of prompts within P, and no types of steps; otherwise whole prompts, P = C.

    slo_decay: share of its value that a request keeps while it misses its target (section 6.6); 0:
    next to nothing. watermark: share of the pool that starts leave free while others run.
    headroom: share that must be free besides before a hidden cache becomes KV.
    """

    hybrid_cache: bool = True
    adaptive: bool = True
    chunked: bool = False
    slo_decay: float = 0.0
    watermark: float = 0.01
    headroom: float = 0.1
    hypothetical: bool = False
    steady = True  # whom nobody waits for goes on, a token a step; see `simulator.coasts`

    def __post_init__(self) -> None:
        for name in ("slo_decay", "watermark", "headroom"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")

    @property
    def full_prefill(self) -> bool:
        """P = C, whatever the limits say."""
        return not self.chunked

    def plan(self, view: View, now: float) -> BatchPlan:
        waiting, running = view.table.in_state(WAITING), view.table.in_state(RUNNING)
        rho = view.rho if self.hybrid_cache else None
        clock = now
        if not self.chunked and self.adaptive and len(waiting):
            clock += in_flight(view, running)
        ran = weigh(view, running, clock, rho, self.slo_decay)
        if not len(waiting):
            return self._go_on(view, running, ran, waiting)
        worth = weigh(view, waiting, clock, rho, self.slo_decay)
        if self.chunked:
            return self._go_on(view, running, ran, waiting, worth)
        if not self.adaptive or worth.pending.sum() >= ran.pending.sum() or not len(running):
            started = self._start(view, waiting, worth, view.pool.num_free, len(running))
            if len(started[0]):
                return _plan(view, *started)
        return self._go_on(view, running, ran, waiting)

    def _start(
        self,
        view: View,
        waiting: np.ndarray,
        worth: Worth,
        free: int,
        holders: int,
        used: int = 0,
        tokens: int = 0,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, tokens and kinds of those who start. used, tokens: rows and tokens of the batch
        already."""
        limits = view.limits
        c = limits.max_prefill_tokens if self.chunked else limits.max_batch_tokens
        if holders:
            free -= int(self.watermark * view.pool.num_blocks)
        return (start if self.adaptive else start_in_turn)(
            view,
            waiting,
            worth,
            free=free,
            room=c - tokens,
            slots=limits.max_rows - max(holders, used),
            chunked=self.chunked,
        )

    def _go_on(
        self,
        view: View,
        rows: np.ndarray,
        ran: Worth,
        waiting: np.ndarray,
        worth: Worth | None = None,
    ) -> BatchPlan:
        """A step of those that run; worth: of those that wait, who may start in it."""
        table = view.table
        goes, evict, left = go_on(view, rows, ran, in_turn=not self.adaptive)
        ran, rows = ran.of(goes), rows[goes]
        tokens = self._share(view, rows, ran)
        kinds = table.kind[rows].astype(np.int64)
        wider = np.zeros(len(rows), bool)
        if view.rho is not None and view.rho > 0:
            spare = int(self.headroom * view.pool.num_blocks)
            wider = to_kv(view, rows, ran.tokens, waiting, left, spare) & (tokens > 0)
            kinds[wider] = CacheKind.KV
        project = rows[wider]
        here = tokens > 0
        parts = [(rows[here], tokens[here], kinds[here])]
        if worth is not None and not len(evict):
            holders, total = len(table.in_state(RUNNING)), int(tokens.sum())
            left -= int((-(-ran.tokens[wider] // view.pool.block_size)).sum())
            more = self._start(view, waiting, worth, left, holders, int(here.sum()), total)
            parts.append(more)
        rows, tokens, kinds = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _plan(view, rows, tokens, kinds, evict, project)

    def _share(self, view: View, rows: np.ndarray, ran: Worth) -> np.ndarray:
        """Tokens that each of those who go on computes: decodes first, then prompts by worth."""
        table, limits = view.table, view.limits
        tokens = table.pending(rows)
        decodes = table.decoding(rows)
        if int(tokens.sum()) <= limits.max_prefill_tokens or (
            decodes.all() and len(rows) <= limits.max_batch_tokens
        ):
            return tokens
        by = -ran.value / ran.tokens if self.adaptive else np.arange(len(rows))
        order = np.lexsort((by, ~decodes))
        ordered = tokens[order]
        before = np.cumsum(ordered) - ordered
        p = limits.max_prefill_tokens if self.chunked else limits.max_batch_tokens
        room = np.where(decodes[order], limits.max_batch_tokens, p)
        shared = np.zeros_like(tokens)
        shared[order] = np.clip(room - before, 0, ordered)
        return shared


@register(
    "aptserve_s",
    summary="aptserve on chunked prefill and mixed batches, as sarathi",
    source="Apt-Serve 6.7",
)
def aptserve_s() -> AptServe:
    return AptServe(chunked=True)


@register("aptserve_kv", summary="aptserve with K and V only", source="Apt-Serve 6.5, Table 4")
def aptserve_kv() -> AptServe:
    return AptServe(hybrid_cache=False)


@register(
    "aptserve_fcfs",
    summary="hybrid cache, but first come, first served, and prefill first as vllm",
    source="Apt-Serve 6.5, Table 5",
)
def aptserve_fcfs() -> AptServe:
    return AptServe(adaptive=False)


def _plan(
    view: View,
    rows: np.ndarray,
    tokens: np.ndarray,
    kinds: np.ndarray,
    evict: np.ndarray | None = None,
    project: np.ndarray | None = None,
) -> BatchPlan:
    """Single tokens first, with room for all that a request knows."""
    table = view.table
    longer = tokens != 1
    if longer.any():
        order = np.argsort(longer, kind="stable")
        rows, tokens, kinds = rows[order], tokens[order], kinds[order]
    reserve = table.prompt_len[rows] + table.generated[rows]
    none = rows[:0]
    return BatchPlan(
        rows,
        tokens,
        reserve,
        kinds,
        none if evict is None else evict,
        none if project is None else project,
    )
