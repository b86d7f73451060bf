"""Fills a batch: decodes, urgent prompts, and a selection of the others."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cost.batch_feature_sums import prefix
from jaxserve.sched.policies.accelgen.batch import AccelGenBatch, AccelGenWork
from jaxserve.sched.policies.accelgen.memory_budget import AccelGenBudget
from jaxserve.sched.policies.accelgen.pivot import Pivot


class AccelGenFilling:
    """Fills one batch.

    Args:
        batch: The batch, empty at first.
        room: Its memory budget.
        pivot: Gives the number of tokens that fit into a time.
        chunked: Whether prompts may be cut.

    Attributes:
        limit: SLO_min, the longest time that the batch may take for its requests, seconds.
    """

    def __init__(
        self, batch: AccelGenBatch, room: AccelGenBudget, pivot: Pivot, *, chunked: bool
    ) -> None:
        self.batch, self.room, self.limit = batch, room, np.inf
        self._view, self._pivot, self._chunked = room.view, pivot, chunked

    def retain(self, work: AccelGenWork) -> None:
        """Adds decodes, the most urgent first, while the batch meets the strictest of their limits;
        at least one is added."""
        limit = np.minimum.accumulate(work.limit)
        ok = (self.batch.times(work) <= limit) & (
            np.arange(1, len(work) + 1) <= self._pivot.budget(limit)
        )
        work = self.room.grow(work[: max(prefix(ok), 1)])
        self.batch.add(work)
        self.limit = float(work.limit.min(initial=np.inf))

    def fill(self, work: AccelGenWork, savable: np.ndarray | None = None) -> bool:
        """Adds prompts in order; the last one is cut to the rest of the budget.

        Args:
            work: The prompts.
            savable: bool [n], which prompts may preempt others; None for none.

        Returns:
            False if a waiting prompt found no memory, so that no other may start after it.
        """
        starts = True
        savable = np.zeros(len(work), bool) if savable is None else savable
        while len(work):
            limit = np.minimum(self.limit, np.minimum.accumulate(work.limit))
            left = self._pivot.budget(limit) - self.batch.tokens
            whole = prefix((np.cumsum(work.tokens) <= left) & (self.batch.times(work) <= limit))
            count = self.room.fit(work[:whole])
            self._take(work[:count])
            work, savable = work[count:], savable[count:]
            if not len(work):
                break
            piece = self._piece(work[:1])
            if piece is None:
                break
            if not self.room.fit(piece):
                if savable[0] and self.room.make_room(piece):
                    stays = ~self.room.is_out(work.rows)
                    work, savable = work[stays], savable[stays]
                    continue
                piece = self._in_memory(piece)
            if piece is not None:
                self._take(piece)
                work, savable = work[1:], savable[1:]
            else:
                starts = starts and not work.starts[0]
                others = np.arange(len(work)) > 0
                others &= starts | ~work.starts
                work, savable = work[others], savable[others]
        return starts

    def choose(self, work: AccelGenWork, gamma: float) -> None:
        """Adds prompts that start: from each window of `gamma` seconds of their keys, those that
        best use the tokens and blocks left (Algorithm 2)."""
        while len(work):
            whole = work.new <= self.room.startable
            cut = work.long & self._chunked & (self.room.tokens(work) > 0)
            work = work[whole | cut]
            window = int(np.searchsorted(work.key, work.key[:1] + gamma, side="right")[:1].sum())
            part, work = work[:window], work[window:]
            before = self.limit
            self.limit = min(before, float(part.limit.min(initial=np.inf)))
            left = self.batch.longest(0, self.limit, self._left(self.limit))
            if not len(part) or left <= 0 or self.room.slots <= 0:
                self.limit = before
                return
            pieces = self._pieces(part, left)
            room = self.room
            order = nearest(pieces.tokens, pieces.new, left, room.startable, room.slots)
            timely = order[: prefix(self.batch.times(pieces[order]) <= self.limit)]
            self._take(pieces[timely])
            rest = np.ones(len(part), bool)
            rest[timely] = False
            self._fill_up(part[rest])

    def force(self, work: AccelGenWork) -> None:
        """Adds the first prompt that finds memory, however long it takes, so that some work is
        done."""
        for i in range(len(work)):
            one = work[i : i + 1]
            if self._chunked:
                one = one.cut(self._view, np.minimum(one.tokens, self._left(self.limit)))
            piece = one if self.room.fit(one) else self._in_memory(one)
            if piece is not None:
                self._take(piece)
                return

    def _fill_up(self, rest: AccelGenWork) -> None:
        """Cuts the first prompt that finds memory to the tokens left, and adds it."""
        if self._chunked:
            for i in np.flatnonzero(rest.new <= self.room.startable)[:1].tolist():
                piece = self._piece(rest[i : i + 1])
                if piece is not None and self.room.fit(piece):
                    self._take(piece)

    def _left(self, limit: float) -> int:
        """Tokens that Eq. 6 leaves if the batch may take `limit` seconds."""
        return int(self._pivot.budget(limit)) - self.batch.tokens

    def _piece(self, one: AccelGenWork) -> AccelGenWork | None:
        """As much of a prompt as tokens and time allow; None if that is nothing, or not all of a
        prompt that must be whole."""
        want, limit = int(one.tokens[0]), min(self.limit, float(one.limit[0]))
        most = min(want, self._left(limit))
        tokens = self.batch.longest(int(one.start[0]), limit, most)
        if tokens < (1 if self._chunked else want):
            return None
        return one.cut(self._view, np.array([tokens]))

    def _pieces(self, work: AccelGenWork, left: int) -> AccelGenWork:
        """Each prompt cut to the tokens left, and if it is long, to the blocks."""
        if not self._chunked:
            return work
        tokens = np.minimum(work.tokens, left)
        if work.long.any():
            tokens = np.where(work.long, np.minimum(tokens, self.room.tokens(work)), tokens)
        return work.cut(self._view, tokens)

    def _in_memory(self, piece: AccelGenWork) -> AccelGenWork | None:
        """As much of a long prompt's piece as there are blocks for; None if there are none."""
        if not (self._chunked and piece.long[0]):
            return None
        tokens = np.minimum(piece.tokens, self.room.tokens(piece))
        less = piece.cut(self._view, tokens)
        return less if tokens[0] > 0 and self.room.fit(less) else None

    def _take(self, work: AccelGenWork) -> None:
        self.room.allocate(work)
        self.batch.add(work)
        self.limit = min(self.limit, float(work.limit.min(initial=np.inf)))


def nearest(
    tokens: np.ndarray, blocks: np.ndarray, left_tokens: int, left_blocks: int, places: int
) -> np.ndarray:
    """Chooses requests whose demands best match what is left (AccelGen section 4.4, Algorithm 2,
    lines 7 to 13).

    It repeatedly takes the fitting request whose demand is nearest to what is left of both tokens
    and blocks, the first of equal ones. Both are divided by what was left at the beginning, so that
    they weigh the same.

    Args:
        tokens: int64 [n], tokens that each request takes.
        blocks: int64 [n], blocks that each request takes.
        left_tokens: Tokens left in the batch.
        left_blocks: Free blocks.
        places: Most requests to choose.

    Returns:
        Indices of the chosen, in order.
    """
    index = np.flatnonzero((tokens <= left_tokens) & (blocks <= left_blocks))
    tokens, blocks = tokens[index], blocks[index]
    total = int(tokens.sum()), int(blocks.sum())
    if total[0] <= left_tokens and total[1] <= left_blocks and len(index) <= places:
        return index
    unit = np.array([max(left_tokens, 1), max(left_blocks, 1)], np.float64)
    demand = np.stack([tokens, blocks], axis=1) / unit
    # |A - D|^2 is |A|^2 - 2 A.D + |D|^2, and |A|^2 is the same for all.
    terms = np.column_stack([-2 * demand, (demand**2).sum(axis=1)])
    chosen: list[int] = []
    while len(index) and len(chosen) < places:
        distance = terms @ np.array([left_tokens / unit[0], left_blocks / unit[1], 1.0])
        i = int(distance.argmin())
        if distance[i] == np.inf:
            break
        if tokens[i] > left_tokens or blocks[i] > left_blocks:
            fits = (tokens <= left_tokens) & (blocks <= left_blocks) & (terms[:, 2] < np.inf)
            index, tokens, blocks, terms = (part[fits] for part in (index, tokens, blocks, terms))
            continue
        chosen.append(int(index[i]))
        left_tokens -= int(tokens[i])
        left_blocks -= int(blocks[i])
        terms[i] = 0.0, 0.0, np.inf
    return np.array(chosen, np.int64)
