"""The unified scheduler's plan in the case where nothing is contended, with a tenth of the work.

Simulations plan a hundred thousand times over a few dozen requests, where the general algorithm's
time goes into NumPy calls on short arrays. Whenever a decision has to be made that is not obvious,
the policy itself is asked; a test compares the two on random workloads.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.sarathi import DECODE_FIRST
from jaxserve.sched.policies.vllm import PREFILL_FIRST
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.table import State
from jaxserve.sched.unified import Reserve, UnifiedPolicy

WAITING, RUNNING = State.WAITING, State.RUNNING


def shortened(policy: Policy) -> Policy:
    """The policy with a shortcut, or as it is if none applies to it."""
    if type(policy) is not UnifiedPolicy:
        return policy  # what is derived from it may have changed anything
    assert isinstance(policy, UnifiedPolicy)
    if policy.key is not None or policy.requeue or policy.probing:
        return policy
    if policy.groups == DECODE_FIRST and policy.mixed_batches:
        return DecodeFirst(policy)
    whole = not policy.chunked and policy.full_prefill
    plain = policy.reserve is Reserve.PROMPT and policy.max_rows is None
    if policy.groups == PREFILL_FIRST and not policy.mixed_batches and whole and plain:
        return PrefillFirst(policy)
    return policy


class PrefillFirst(Policy):
    """Plans for a unified policy that takes whole prefills first, and decodes where nobody can
    start: vLLM."""

    def __init__(self, policy: UnifiedPolicy) -> None:
        self._policy = policy
        self.chunked, self.hypothetical = policy.chunked, policy.hypothetical
        self.steady = policy.steady

    def plan(self, view: View, now: float) -> BatchPlan:
        """The policy's own plan: straight away where whole prefills start, or all decode and find
        their blocks; else by asking the policy."""
        found = self._short(view)
        return self._policy.plan(view, now) if found is None else found

    def _short(self, view: View) -> BatchPlan | None:
        table, pool, limits = view.table, view.pool, view.limits
        running, waiting = table.in_state(RUNNING), table.in_state(WAITING)
        known = table.prompt_len[running] + table.generated[running]
        if np.count_nonzero(known - table.computed[running] != 1):
            return None  # a prefill goes on
        count = len(running)
        if count + len(waiting) > limits.max_rows or count > limits.max_batch_tokens:
            return None
        starts = self._starts(view, waiting, alone=not count)
        if len(starts):
            tokens = table.prompt_len[starts] + table.generated[starts]
            return _plan(starts, tokens, tokens, np.zeros(len(starts), np.int64))
        growing = known > pool.room(running)
        if np.count_nonzero(growing):
            short = running[growing]
            new = pool.needed(short, known[growing], pool.kind[short])
            if int(np.add.reduce(new)) > pool.num_free:
                return None
        return _plan(running, np.ones(count, np.int64), known, pool.kind[running])

    def _starts(self, view: View, waiting: np.ndarray, alone: bool) -> np.ndarray:
        """As many of the waiting, in order, as C and M leave room for. alone: nobody holds cache,
        so that the first need not mind the watermark."""
        table, pool = view.table, view.pool
        free, room = pool.num_free, view.limits.max_batch_tokens
        keep = int(self._policy.watermark * pool.num_blocks)
        chosen: list[int] = []
        for row in waiting.tolist():
            need = int(table.prompt_len[row] + table.generated[row])
            blocks = int(pool.blocks_for(need))
            if need > room or blocks > free - (0 if alone and not chosen else keep):
                break
            chosen.append(row)
            free -= blocks
            room -= need
        return np.array(chosen, np.int64)


class DecodeFirst(Policy):
    """Plans for a unified policy that takes decodes first, then prefills in their order, in one
    batch: Sarathi and its kin."""

    def __init__(self, policy: UnifiedPolicy) -> None:
        self._policy = policy
        self.chunked, self.hypothetical = policy.chunked, policy.hypothetical
        self.steady = policy.steady

    def plan(self, view: View, now: float) -> BatchPlan:
        """The policy's own plan: straight away where nobody has to be preempted; else by asking
        the policy."""
        found = self._short(view)
        return self._policy.plan(view, now) if found is None else found

    def _short(self, view: View) -> BatchPlan | None:
        policy, table, pool, limits = self._policy, view.table, view.pool, view.limits
        running = table.in_state(RUNNING)
        count = len(running)
        rows_left = limits.max_rows
        if policy.max_rows is not None:
            rows_left = min(rows_left, policy.max_rows)
        prefill_limit = limits.max_prefill_tokens
        if policy.full_prefill:
            prefill_limit = limits.max_batch_tokens
        generated, computed = table.generated[running], table.computed[running]
        known = table.prompt_len[running] + generated
        tokens = known - computed
        decodes = (tokens == 1) & (generated > 0)
        first = int(np.count_nonzero(decodes))
        if count > rows_left or first > limits.max_batch_tokens:
            return None
        reserve = known
        if policy.reserve is Reserve.WHOLE:
            whole = table.prompt_len[running] + view.most_output(running) - 1
            reserve = np.maximum(known, whole)
        room = prefill_limit - first  # batch_left is at least that
        free = pool.num_free
        growing = reserve > pool.room(running)
        if np.count_nonzero(growing):
            short = running[growing]
            new = pool.needed(short, reserve[growing], pool.kind[short])
            free -= int(np.add.reduce(new))
            if free < 0:
                return None
        rows = running
        if first < count:
            if np.count_nonzero(growing & ~decodes):
                return None  # a prefill that has to ask for memory
            if np.count_nonzero(decodes[:first]) < first:
                order = np.argsort(~decodes, kind="stable")
                rows, tokens, reserve = rows[order], tokens[order], reserve[order]
            through = np.cumsum(tokens[first:])
            if through[-1] > max(room, 0):
                return self._cut(rows, tokens, reserve, pool.kind, first, room, through)
            room -= int(through[-1])
        waiting = table.in_state(WAITING)
        if room > 0 and len(waiting):
            keep = int(policy.watermark * pool.num_blocks)
            return self._start(view, rows, tokens, reserve, waiting, room, free, keep, rows_left)
        return _plan(rows, tokens, reserve, pool.kind[rows])

    def _cut(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        reserve: np.ndarray,
        kind: np.ndarray,
        first: int,
        room: int,
        through: np.ndarray,
    ) -> BatchPlan | None:
        """What runs is more than P: the last of the prefills that fit is cut."""
        whole = int(np.searchsorted(through, room, side="right"))
        left = room - (int(through[whole - 1]) if whole else 0)
        end = first + whole
        if self.chunked and left > 0:
            if self._policy.reserve is Reserve.CHUNK:
                return None
            end += 1
            tokens[end - 1] = left
        rows = rows[:end]
        return _plan(rows, tokens[:end], reserve[:end], kind[rows])

    def _start(
        self,
        view: View,
        rows: np.ndarray,
        tokens: np.ndarray,
        reserve: np.ndarray,
        waiting: np.ndarray,
        room: int,
        free: int,
        keep: int,
        rows_left: int,
    ) -> BatchPlan | None:
        """As many of the waiting as P and M leave room for, one by one."""
        table, pool, policy = view.table, view.pool, self._policy
        if policy.reserve is Reserve.CHUNK:
            return None
        new_rows, new_tokens, new_reserve = [], [], []
        holders = len(rows)
        first = waiting[: rows_left - holders]
        outputs = view.most_output(first).tolist()
        for row, output in zip(first.tolist(), outputs, strict=True):
            need = int(table.prompt_len[row] + table.generated[row])
            most = need
            if policy.reserve is Reserve.WHOLE:
                most = max(need, int(table.prompt_len[row]) + output - 1)
            if need > room and not policy.chunked:
                break
            blocks = int(pool.blocks_for(most))
            if blocks > free - (keep if holders else 0):
                break
            new_rows.append(row)
            new_tokens.append(min(need, room))
            new_reserve.append(most)
            free -= blocks
            room -= need
            holders += 1
            if room <= 0:
                break
        else:
            if len(waiting) > rows_left - len(rows):
                return None  # it is the rows that are short
        if new_rows:
            rows = np.concatenate([rows, np.array(new_rows)])
            tokens = np.concatenate([tokens, np.array(new_tokens)])
            reserve = np.concatenate([reserve, np.array(new_reserve)])
        kinds = pool.kind[rows]
        kinds[len(rows) - len(new_rows) :] = 0
        return _plan(rows, tokens, reserve, kinds)


def _plan(
    rows: np.ndarray, tokens: np.ndarray, reserve: np.ndarray, kinds: np.ndarray
) -> BatchPlan:
    return BatchPlan(rows, tokens, reserve, kinds.astype(np.int64))
