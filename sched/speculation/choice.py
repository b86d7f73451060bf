"""Who drafts how much: as many tokens as the step-time model says that they pay for.

A decode step reads all weights for one token a row. A draft that is right saves its row one such
step, of which it has a share; computing the draft makes this step longer, and the next one is not
planned until it is known what was right. The first is compared with the second for every size of
step that is compiled (`padding.tokens`). So a batch that fills the device drafts nothing, and one
row alone drafts wherever it repeats itself.

Who waits for a first token gains nothing and waits as much longer as who decodes. Where it has a
target that can still be met, it counts as one more row whose share drafts have to save.

Time between tokens: nobody's step is made so long that a row misses its target that would meet it
otherwise, nor the next one planned so late. Rows that are about to miss it draft first, and while
there are any, rows with a target that are ahead of it draft nothing (AdaServe and SLOs-Serve have
such a rule, with a model that drafts).
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

MOST = 7  # drafts of a row in a step
MARGIN = 0.02  # of the step's time, which drafts have to save at least
FIRST_TRIAL = 8  # steps that could have drafted, before one does against the model's advice
LIKELY = 0.8  # how likely its first token is right, of a draft that is tried
LEFT_OUT = 63  # chances to wait, at most, for tokens in flight that brought no drafts before
EVERY = 16  # choices for as many decodes, before what steps take is asked again
URGENT = 2.0  # what a token counts for of a row that is about to miss its target


class _Batch(NamedTuple):
    """What is planned without drafts.

    Attributes:
        features: Of all of it, before padding.
        rows: int64 [n], those that decode.
        num_rows: How many rows there are.
        prompts: Whether there are prompts to compute, in this step or one that comes.
    """

    features: BatchFeatures
    rows: np.ndarray
    num_rows: int
    prompts: bool


def with_drafts(
    plan: BatchPlan, view: View, now: float, prices: DraftPrices, *, trial: bool = False
) -> BatchPlan:
    """The plan, with drafts behind those of its decodes for which they pay. Plans that move or
    preempt caches stay as they are: memory is short then.

    Args:
        plan: Of the policy.
        view: What it was made from.
        now: Seconds.
        prices: What steps take.
        trial: Whether they are taken even if they do not pay (`Trials`).
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
    more = int(pool.needed(rows, reserve, plan.kinds).sum())
    if more > pool.num_free:
        counts = np.minimum(counts, np.maximum(pool.room(mine) - end, 0))
        reserve[at] = np.maximum(plan.reserve[at], end + counts)
    drafts = np.zeros(len(rows), np.int64)
    drafts[at] = counts
    if not np.count_nonzero(drafts):
        return plan
    return dataclasses.replace(
        plan, num_tokens=plan.num_tokens + drafts, reserve=reserve, drafts=drafts
    )


def expects_drafts(view: View, now: float, prices: DraftPrices) -> bool:
    """Whether a plan of all decodes would draft once the tokens in flight are known. The first of
    what is offered is one of those then, if it is right."""
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
    """Drafts that are most likely right, and do not pay by the step-time model, are tried all the
    same now and then, ever more seldom: a model that learns has to see such steps to know them."""

    def __init__(self) -> None:
        self._left_out, self._wait = 0, FIRST_TRIAL

    def due(self, view: View) -> bool:
        """Drafts do not pay now: whether to try some."""
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
    """Whether to wait for tokens that are expected to bring drafts. What a policy plans beside the
    decodes may leave no time for any, so after each wait in vain that many more chances are left
    out, up to LEFT_OUT in a row."""

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
    """Whether others than so many that decode have something to compute."""
    return len(table.in_state(WAITING)) > 0 or len(table.in_state(RUNNING)) > decodes


def _due(table: RequestTable, now: float) -> int:
    """How many wait for a first token, and may have it within their target."""
    rows = np.concatenate([table.in_state(WAITING), table.in_state(RUNNING)])
    deadline = table.arrival[rows] + table.ttft[rows]
    due = (table.generated[rows] == 0) & (now < deadline) & (deadline < np.inf)
    return int(np.count_nonzero(due))


def _most(view: View, rows: np.ndarray, offered: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Drafts that each row may have at most, int64 [n], of those that are offered. end: its cached
    tokens without any."""
    table, pool = view.table, view.pool
    left = table.max_tokens[rows] - table.generated[rows] - 1
    most = np.minimum(np.minimum(offered, MOST), left)
    both = pool.both_ends()
    if len(both):  # where somebody comes from the other end there may be no room for what is wrong
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
        batch: What they are added to.
        rows: int64 [n], of decodes.
        most: int64 [n], drafts that each may have.
        view: The step-time model and the limits.
        now: Seconds.
        prices: What steps take.
        flying: int64 [n], offered tokens of each row that have to be right before its first draft.
        trial: As in `with_drafts`.
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
    # The next step begins so much later. If it has a prompt beside the decodes, it may have no time
    # to spare.
    following = max(plain, prices.with_prompts if batch.prompts else 0.0) * overrun
    targets = table.tbt[batch.rows]
    if np.count_nonzero((following <= targets) & (targets < following + host_gap_s * overrun)):
        return none
    # Who has a token in flight gets it when this step begins.
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
    """What each draft is worth in tokens, row by row, one after the other, float64 [n * MOST]: the
    chance that it and all before it are right, more where the row is late.

    Args:
        acceptance: float64 [n], how likely the first one is right.
        most: int64 [n], drafts that each row may have.
        flying: As in `_choose`.
        late: bool [n], rows that are about to miss their target.
    """
    depth = np.arange(1, MOST + 1)
    chance = np.minimum(acceptance, 1.0)[:, None] ** (depth + np.reshape(flying, (-1, 1)))
    gains = chance * np.where(late, URGENT, 1.0)[:, None]
    return np.where(depth <= most[:, None], gains, 0.0).ravel()


class _Times:
    """What steps with drafts take.

    Attributes:
        sizes: int64 [m], numbers of drafts: none, those that fill a step of some size, and as many
            as there is room for.
        seconds: float64 [m], of the step with at most so many.
        share: What a decode of one row takes of a step in which all of them decode, seconds.
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
    """What steps with drafts take. Where all rows decode, it is asked anew only now and then: from
    one plan to the next, each cache has grown by a token.

    Attributes:
        with_prompts: Seconds of the last plan in which a prompt was computed, without drafts.
    """

    def __init__(self) -> None:
        self._batch, self._read, self._left = (0, 0), 0, 0
        self._times: _Times | None = None
        self.with_prompts = 0.0

    def of(self, batch: _Batch, view: View, room: int) -> _Times:
        """Of the batch, with up to `room` drafts."""
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
    """How many times their predictions steps of so many tokens take lately, float64 [n]."""
    ratios, padding = view.device.ratios, view.padding
    padded = tokens if padding is None else padding.padded(tokens, singles)
    found = zip(padded.tolist(), singles.tolist(), strict=True)
    return np.array([ratios.of(size, singles=one) for size, one in found])
