"""How much each row drafts: as many tokens as pay off by the step-time model.

A decode step reads all weights for one token per row. A correct draft saves its row's share of one
such step; computing the draft makes this step longer, and delays planning the next one until
results are known. The saving is compared with the cost for every compiled size of step
(`padding.tokens`). So a batch that fills the device drafts nothing, and a single row drafts
wherever its text repeats itself.

A request that waits for its first token gains nothing, and waits longer like the decoding rows. If
its target can still be met, it counts as one more row whose share drafts have to save.

Time between tokens: no step is made so long that a row misses a target that it would meet
otherwise, nor is the next one planned so late. Rows that are about to miss it draft first, and
while there are any, rows that are ahead of their target draft nothing (AdaServe and SLOs-Serve have
such a rule, with a draft model).

A row whose layers keep a state computes the right drafts again after a wrong one. That costs it no
token: it says one more in that step, as without drafts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cache.cache_kinds import HIDDEN, KV
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING, WAITING, RequestTable

MOST = 7  # drafts per row in a step
MARGIN = 0.02  # least share of the step's time that drafts have to save
FIRST_TRIAL = 8  # first of these steps without drafts until a trial
LIKELY = 0.8  # least probability of its first token, for a draft to be tried
LEFT_OUT = 63  # most chances to skip after drafts did not come
EVERY = 16  # choices for as many decodes until step times are updated
URGENT = 2.0  # weight of tokens of a row that is about to miss its target


class _Batch(NamedTuple):
    """The plan without drafts.

    Attributes:
        features: Features of the whole batch, before padding.
        rows: int64 [n], rows that decode.
        num_rows: Number of rows.
        prompts: Whether there are prompts to compute, in this step or a later one.
    """

    features: BatchFeatures
    rows: np.ndarray
    num_rows: int
    prompts: bool


def with_drafts(
    plan: BatchPlan, view: View, now: float, prices: DraftPrices, *, trial: bool = False
) -> BatchPlan:
    """The plan, with drafts for its decodes if they pay off. Plans that move or preempt caches stay
    as they are: memory is short then.

    Args:
        plan: The policy's plan.
        view: The view that it was made from.
        now: Seconds.
        prices: Step times.
        trial: Whether drafts are used even if they do not pay off (`Trials`).
    """
    table, pool, rows = view.table, view.pool, plan.rows
    if not len(rows) or plan.operations:
        return plan
    start, known = table.computed[rows], table.prompt_len[rows] + table.generated[rows]
    emits = start + plan.num_tokens == known
    decodes = emits & (table.generated[rows] > 0) & (plan.num_tokens == 1)
    num_decodes = int(np.count_nonzero(decodes))
    if num_decodes == len(rows) and not np.count_nonzero(table.offered[rows]):
        return plan
    features = BatchFeatures.from_rows(
        plan.num_tokens,
        start,
        decodes,
        hidden=plan.kinds == HIDDEN,
        sampling=table.num_sampling > 0,
    )
    if num_decodes < len(rows):
        prices.with_prompts = float(view.step_time(features))
    at = np.flatnonzero(decodes & (table.generated[rows] == table.received[rows]))
    at = at[(table.offered[rows[at]] > 0) & (plan.kinds[at] == KV)]
    if not len(at):
        return plan
    prompts = num_decodes < len(rows) or _prompts(table, num_decodes)
    batch = _Batch(features, rows[decodes], len(rows), prompts)
    mine = rows[at]
    end = start[at] + 1
    most = _most(view, mine, table.offered[mine], end)
    counts = _choose(batch, mine, most, view, now, prices, trial=trial)
    if not np.count_nonzero(counts):
        return plan
    reserve = plan.reserve.copy()
    reserve[at] = np.maximum(reserve[at], end + counts)
    beside = pool.needed_to_draft(mine) * (counts > 0)
    more = int(pool.needed(rows, reserve, plan.kinds).sum() + beside.sum())
    if more > pool.num_free:
        counts = np.minimum(counts, np.maximum(pool.room(mine) - end, 0)) * (beside == 0)
        reserve[at] = np.maximum(plan.reserve[at], end + counts)
    drafts = np.zeros(len(rows), np.int64)
    drafts[at] = counts
    if not np.count_nonzero(drafts):
        return plan
    return dataclasses.replace(
        plan, num_tokens=plan.num_tokens + drafts, reserve=reserve, drafts=drafts
    )


def expects_drafts(view: View, now: float, prices: DraftPrices) -> bool:
    """Whether a plan of all decodes would draft once the tokens in flight are known. The first
    offered token is one of those, if it is right."""
    table = view.table
    rows = table.in_state(RUNNING)
    rows = rows[(table.generated[rows] > 0) & (table.pending(rows) == 1)]
    flying = table.generated[rows] - table.received[rows]
    mine = (table.offered[rows] > flying) & (view.pool.kind[rows] == KV) & (flying < 2)
    if not np.count_nonzero(mine):
        return False
    computed = table.computed[rows]
    features = BatchFeatures.from_rows(
        np.ones(len(rows), np.int64),
        computed,
        np.ones(len(rows), bool),
        hidden=view.pool.kind[rows] == HIDDEN,
        sampling=table.num_sampling > 0,
    )
    able = rows[mine]
    most = _most(view, able, table.offered[able] - flying[mine], computed[mine] + 1)
    batch = _Batch(features, rows, len(rows), _prompts(table, len(rows)))
    return bool(_choose(batch, able, most, view, now, prices, flying=flying[mine]).any())


class Trials:
    """Drafts that are probably right, but do not pay off by the step-time model, are still tried
    now and then, ever more rarely: a model that learns has to see such steps."""

    def __init__(self) -> None:
        self._left_out, self._wait = 0, FIRST_TRIAL

    def due(self, view: View) -> bool:
        """Drafts do not pay off now: whether to try some."""
        if not isinstance(view.cost_model, OnlineCostModel):
            return False
        rows = view.table.in_state(RUNNING)
        likely = (view.table.acceptance[rows] >= LIKELY) & (view.table.offered[rows] > MOST // 2)
        self._left_out += bool(np.count_nonzero(likely))
        if self._left_out < self._wait:
            return False
        self._left_out, self._wait = 0, 2 * self._wait
        return True


class Patience:
    """Whether to wait for tokens that are expected to bring drafts. The rest of a policy's plan may
    leave no time for drafts, so after each wait in vain more and more chances are skipped, up to
    LEFT_OUT in a row."""

    def __init__(self) -> None:
        self._to_leave = self._left = 0
        self._waited = False

    def waits(self) -> bool:
        """Drafts are expected: whether to wait for the tokens in flight."""
        self._waited = self._left >= self._to_leave
        self._left += 1
        return self._waited

    def planned(self, drafts: bool) -> None:
        """A plan was made. drafts: whether it has any."""
        if self._waited:
            self._to_leave = 0 if drafts else min(2 * self._to_leave + 1, LEFT_OUT)
            self._left, self._waited = 0, False


def _prompts(table: RequestTable, decodes: int) -> bool:
    """Whether any request has something to compute besides these decodes."""
    return len(table.in_state(WAITING)) > 0 or len(table.in_state(RUNNING)) > decodes


def _due(table: RequestTable, now: float) -> int:
    """How many requests wait for a first token that can still be in time."""
    rows = np.concatenate([table.in_state(WAITING), table.in_state(RUNNING)])
    deadline = table.arrival[rows] + table.ttft[rows]
    due = (table.generated[rows] == 0) & (now < deadline) & (deadline < np.inf)
    return int(np.count_nonzero(due))


def _most(view: View, rows: np.ndarray, offered: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Most drafts of each row, int64 [n], among the offered ones. end: its cached tokens without
    drafts."""
    table, pool = view.table, view.pool
    left = table.max_tokens[rows] - table.generated[rows] - 1
    most = np.minimum(np.minimum(offered, MOST), left)
    both = pool.both_ends()
    if len(both):  # if another row fills the block, wrong drafts may have no room
        most[np.isin(rows, pool.owners[both])] = 0
    return np.asarray(np.clip(most, 0, pool.width * pool.block_size - end))


def _choose(
    batch: _Batch,
    rows: np.ndarray,
    most: np.ndarray,
    view: View,
    now: float,
    prices: DraftPrices,
    *,
    flying: np.ndarray | int = 0,
    trial: bool = False,
) -> np.ndarray:
    """How many drafts each row computes, int64 [n].

    Args:
        batch: The plan without drafts.
        rows: int64 [n], rows that decode.
        most: int64 [n], most drafts of each row.
        view: The step-time model and the limits.
        now: Seconds.
        prices: Step times.
        flying: int64 [n], offered tokens of each row that must be right before its first draft.
        trial: See `with_drafts`.
    """
    table, limits, none = view.table, view.limits, np.zeros(len(rows), np.int64)
    widest = limits.max_rows if view.padding is None else view.padding.rows[-1]
    room = min(widest - batch.num_rows, limits.max_batch_tokens - int(batch.features.num_tokens))
    if room < 1 or not np.count_nonzero(most):
        return none
    times = prices.of(batch, view, room)
    plain, host_gap_s, overrun = (
        float(times.seconds[0]),
        view.device.host_gap_s,
        view.device.overrun,
    )
    # The next step begins this much later. With a prompt beside the decodes, it may have no time to
    # spare.
    following = max(plain, prices.with_prompts if batch.prompts else 0.0) * overrun
    targets = table.tbt[batch.rows]
    if np.count_nonzero((following <= targets) & (targets < following + host_gap_s * overrun)):
        return none
    # A row with a token in flight gets it when this step begins.
    begin = view.step_end(now)
    came = np.where(table.generated > table.received, begin, table.last_token)
    slack = came + table.tbt - begin
    late = slack[rows] < plain * overrun
    if np.count_nonzero(late):
        most = np.where(late | (table.tbt[rows] == np.inf), most, 0)
    gains = _gains(table.acceptance[rows], most, flying, late)
    order = np.argsort(-gains, kind="stable")[: times.sizes[-1]]
    order = order[gains[order] > 0]
    share = times.share * len(batch.rows) / (len(batch.rows) + _due(table, now))
    saved = np.concatenate([[0.0], np.cumsum(gains[order])]) * share
    sizes = np.minimum(times.sizes, len(order))
    longer = times.seconds - plain + host_gap_s * (sizes > 0)
    pays = saved[sizes] - longer
    pays[sizes == 0] = 0.0
    mine = slack[batch.rows]
    in_time = mine[mine >= plain * overrun]
    if len(in_time):
        pays[(plain + longer) * overrun > in_time.min()] = -np.inf
    if trial:
        pays[sizes == 0] = -np.inf
    best = int(np.argmax(pays))
    if pays[best] <= (-np.inf if trial else MARGIN * plain):
        return none
    return np.bincount(order[: sizes[best]] // MOST, minlength=len(rows))


def _gains(
    acceptance: np.ndarray, most: np.ndarray, flying: np.ndarray | int, late: np.ndarray
) -> np.ndarray:
    """The value of each draft in tokens, row by row, float64 [n * MOST]: the probability that it
    and all before it are right, weighted if the row is late.

    Args:
        acceptance: float64 [n], probability that the first one is right.
        most: int64 [n], most drafts of each row.
        flying: See `_choose`.
        late: bool [n], rows that are about to miss their target.
    """
    depth = np.arange(1, MOST + 1)
    chance = np.minimum(acceptance, 1.0)[:, None] ** (depth + np.reshape(flying, (-1, 1)))
    gains = chance * np.where(late, URGENT, 1.0)[:, None]
    return np.where(depth <= most[:, None], gains, 0.0).ravel()


class _Times:
    """Times of steps with drafts.

    Attributes:
        sizes: int64 [m], numbers of drafts: none, those that fill a step of some size, and the most
        that there is room for.
        seconds: float64 [m], of the step with at most that many.
        share: One row's share of a step in which all rows decode, seconds.
    """

    def __init__(self, batch: _Batch, view: View, room: int) -> None:
        tokens = int(batch.features.num_tokens)
        buckets = 2 ** np.arange(1, 12) if view.padding is None else np.array(view.padding.tokens)
        fill = buckets - tokens
        self.sizes = np.concatenate([[0], fill[(fill > 0) & (fill < room)], [room]])
        all_of_it = tokens + self.sizes
        grown = batch.features._replace(num_tokens=all_of_it, padded_tokens=all_of_it)
        singles = (self.sizes == 0) & (tokens == batch.num_rows)
        decodes = len(batch.rows)
        self.seconds = view.step_time(grown) * _ratios(view, all_of_it, singles)
        alone = BatchFeatures.of_decodes(np.array(decodes), batch.features.decode_kv)
        ratio = _ratios(view, np.array([decodes]), np.array([True]))
        self.share = float(view.step_time(alone) * ratio[0]) / decodes


class DraftPrices:
    """Times of steps with drafts. If all rows decode, they are updated only now and then: from one
    plan to the next, each cache has grown by one token.

    Attributes:
        with_prompts: Seconds of the last plan in which a prompt was computed, without drafts.
    """

    def __init__(self) -> None:
        self._batch, self._read, self._left = (0, 0), 0, 0
        self._times: _Times | None = None
        self.with_prompts = 0.0

    def of(self, batch: _Batch, view: View, room: int) -> _Times:
        """Times of the batch with up to `room` drafts."""
        if len(batch.rows) < batch.num_rows:
            return _Times(batch, view, room)
        size, read = (batch.num_rows, room), int(batch.features.decode_kv)
        other = self._batch != size or abs(read - self._read) > self._read // 8
        if self._times is None or other or not self._left:
            self._times = _Times(batch, view, room)
            self._batch, self._read, self._left = size, read, EVERY
        self._left -= 1
        return self._times


def _ratios(view: View, tokens: np.ndarray, singles: np.ndarray) -> np.ndarray:
    """Recent ratios of measured to predicted time of steps with these tokens, float64 [n]."""
    ratios, padding = view.device.ratios, view.padding
    padded = tokens if padding is None else padding.padded(tokens, singles)
    found = zip(padded.tolist(), singles.tolist(), strict=True)
    return np.array([ratios.of(size, singles=one) for size, one in found])
