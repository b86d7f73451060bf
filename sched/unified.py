"""InferMax Algorithm 1: one scheduler from whose parameters the known ones come (section 3.1).

Order and group the requests (1), skip those whose phase does not match the batch unless hybrid
batching is on (2), check C, P and M (3), and on a lack of M evict lower-priority requests (4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.kinds import CacheKind
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View
from jaxserve.sched.table import State
from jaxserve.sched.trial import Candidates, Trial


@dataclass(frozen=True)
class Group:
    """Candidates of one priority class, most urgent first.

    evicts: on a lack of memory, evict running requests of lower priority, the candidate itself
    last; otherwise the group ends there (head-of-line blocking).
    """

    rows: np.ndarray
    evicts: bool


@dataclass(frozen=True)
class UnifiedPolicy:
    """group: view -> groups in order of priority. hybrid: prefills and decodes may share a batch.
    chunked: a prefill may be cut to what C and P leave. whole_prompt: a prefill gets room for all
    its pending tokens when it starts. watermark: fraction of the pool that an admission leaves
    free while others run, so that the next decodes do not evict at once."""

    group: Callable[[View], Iterable[Group]]
    hybrid: bool
    chunked: bool
    whole_prompt: bool = True
    watermark: float = 0.01

    def plan(self, view: View, now: float) -> BatchPlan:
        del now  # no policy of this family looks at the clock
        trial = Trial(view)
        for group in self.group(view):
            rows = group.rows[~np.isin(group.rows, trial.evicted)] if trial.evicted else group.rows
            if not self.hybrid and trial.chosen:
                in_batch = trial.chosen[0].prefill[0]
                rows = rows[view.table.decoding(rows) != in_batch]
            if len(rows):
                self._fill(trial, self._candidates(view, rows), group.evicts)
        return trial.finish()

    def _candidates(self, view: View, rows: np.ndarray) -> Candidates:
        table = view.table
        tokens = table.pending(rows)
        reserve = table.computed[rows] + tokens
        prefill = ~table.decoding(rows)
        return Candidates(rows, tokens, reserve, np.full(len(rows), CacheKind.KV), prefill)

    def _fill(self, trial: Trial, cands: Candidates, evicts: bool) -> None:
        """Adds candidates in order until one does not fit."""
        while len(cands):
            keep = self._keep_free(trial, cands)
            fits = min(trial.fits_budget(cands), trial.fits_memory(cands, keep))
            trial.add(cands[:fits])
            cands = cands[fits:]
            if not len(cands):
                return
            head = cands[:1]
            if not trial.fits_budget(head):
                cut = self._cut(trial, head)
                if cut is None:
                    return
                cands, head = _replace_head(cands, cut), cut
                if trial.fits_memory(head, self._keep_free(trial, head)):
                    continue
            if not (evicts and _evict_one(trial, int(head.rows[0]))):
                return
            cands = _without(cands, trial.evicted[-1])

    def _keep_free(self, trial: Trial, cands: Candidates) -> int:
        """Blocks to leave free. None for running requests, nor for the only one."""
        view = trial.view
        admission = view.table.state[cands.rows[0]] == State.WAITING
        alone = trial.slots_left == view.limits.max_rows
        return int(self.watermark * view.pool.num_blocks) if admission and not alone else 0

    def _cut(self, trial: Trial, head: Candidates) -> Candidates | None:
        """The prefill `head` shortened to what C and P leave, or None if it cannot be."""
        room = min(trial.batch_left, trial.prefill_left)
        if not (self.chunked and head.prefill[0] and 0 < room < head.tokens[0]):
            return None
        tokens = np.array([room])
        computed = trial.view.table.computed[head.rows]
        reserve = head.reserve if self.whole_prompt else computed + tokens
        cut = Candidates(head.rows, tokens, reserve, head.kinds, head.prefill)
        return cut if trial.fits_budget(cut) else None


def _evict_one(trial: Trial, candidate: int) -> bool:
    """Evicts the running request of lowest priority that is not in the batch: the last to arrive,
    which may be the candidate itself. False if there is none behind a waiting candidate."""
    table = trial.view.table
    running = np.flatnonzero(table.state == State.RUNNING)
    taken = [c.rows for c in trial.chosen]
    gone = np.concatenate([*taken, np.asarray(trial.evicted, np.int64)])
    running = running[~np.isin(running, gone)]
    running = running[table.seq[running] >= table.seq[candidate]]
    if not len(running):
        return False
    trial.evict(int(running[np.argmax(table.seq[running])]))
    return True


def _replace_head(cands: Candidates, head: Candidates) -> Candidates:
    rest = cands[1:]
    return Candidates(
        *(
            np.concatenate([getattr(head, name), getattr(rest, name)])
            for name in ("rows", "tokens", "reserve", "kinds", "prefill")
        )
    )


def _without(cands: Candidates, row: int) -> Candidates:
    keep = cands.rows != row
    return Candidates(
        cands.rows[keep],
        cands.tokens[keep],
        cands.reserve[keep],
        cands.kinds[keep],
        cands.prefill[keep],
    )
