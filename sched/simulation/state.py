"""The scheduler's state in a simulation: as many rows as live requests, and blocks that are counted
but have no names. Policies cannot tell it from the engine's."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.sched.blocks import BlockPool, OutOfBlocks
from jaxserve.sched.cost_model import CostModel
from jaxserve.sched.kinds import PLANES, CacheKind, Direction
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Limits, Policy
from jaxserve.sched.request import Request
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.table import RequestTable

FIRST_ROWS = 64
_PLANES = np.asarray(PLANES)


def _columns() -> frozenset[str]:
    """The attributes of a table that have one entry a row."""
    small, large = vars(RequestTable(3)), vars(RequestTable(5))
    return frozenset(
        name
        for name, value in small.items()
        if isinstance(value, np.ndarray) and value.shape[:1] != large[name].shape[:1]
    )


class GrowingTable(RequestTable):
    """A request table that doubles when it is full, so that its size follows the live requests.
    Rows are given out in the order in which a table of fixed size gives them."""

    def add(self, request: Request) -> int:
        if not self.num_free:
            self._double()
        return super().add(request)

    def _double(self) -> None:
        old, self.capacity = self.capacity, 2 * self.capacity
        for name in _columns():
            column = getattr(self, name)
            more = np.zeros((old, *column.shape[1:]), column.dtype)
            setattr(self, name, np.concatenate([column, more]))
        self._free.extend(range(self.capacity - 1, old - 1, -1))


class CountingPool(BlockPool):
    """A block pool without tables: every block has one owner, so counts are all there is to know.

    What needs to know blocks by name (`join`, `share`) is refused.
    """

    def __init__(self, num_blocks: int, block_size: int, max_owners: int, width: int) -> None:
        super().__init__(0, block_size, max_owners, 0)
        self.num_blocks = num_blocks
        self.width = width
        self.num_used = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def follow(self, rows: int) -> None:
        """Makes room for owners up to `rows`."""
        more = rows - len(self.held)
        if more > 0:
            self.held = np.concatenate([self.held, np.zeros(more, self.held.dtype)])
            self.kind = np.concatenate([self.kind, np.zeros(more, self.kind.dtype)])
            self.direction = np.concatenate([self.direction, np.zeros(more, self.direction.dtype)])

    def returned_by(self, row: int) -> int:
        return int(self.held[row]) * PLANES[self.kind[row]]

    def grow_all(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        held = self.held[rows]
        short = tokens > held * self.block_size
        if not np.count_nonzero(short):
            return
        rows, held, tokens = rows[short], held[short], tokens[short]
        want = -(-tokens // self.block_size)
        total = int(np.add.reduce((want - held) * _PLANES[self.kind[rows]]))
        if int(want.max()) > self.width:
            worst = int(np.argmax(want))
            raise ValueError(
                f"row {rows[worst]}: {tokens[worst]} tokens need {want[worst]} blocks, limit "
                f"{self.width}"
            )
        if total > self.num_free:
            raise OutOfBlocks(f"{total} blocks wanted, {self.num_free} free")
        self.held[rows] = want
        self.num_used += total

    def widen(self, rows: np.ndarray) -> None:
        for row in rows[self.kind[rows] != CacheKind.HIDDEN].tolist():
            raise ValueError(f"row {row} has no hidden cache")
        total = int(self.held[rows].sum())
        if total > self.num_free:
            raise OutOfBlocks(f"{total} blocks wanted, {self.num_free} free")
        self.kind[rows] = CacheKind.KV
        self.num_used += total

    def release(self, row: int) -> None:
        self.num_used -= self.returned_by(row)
        self.held[row] = 0

    def join(self, row: int, blocks: tuple[int, ...]) -> None:
        raise NotImplementedError("a counting pool does not name blocks")

    def share(self, source: int, row: int, blocks: int) -> None:
        raise NotImplementedError("a counting pool does not name blocks")

    def check(self) -> None:
        used = int((self.held * _PLANES[self.kind]).sum())
        assert used == self.num_used, f"{used} blocks are held, {self.num_used} counted"
        assert 0 <= used <= self.num_blocks, f"{used} blocks used of {self.num_blocks}"
        assert (self.held >= 0).all(), "a row holds fewer than no blocks"
        assert ((self.direction == Direction.LEFT) | (self.direction == Direction.RIGHT)).all()
        assert ((self.kind == CacheKind.KV) | (self.kind == CacheKind.HIDDEN)).all()


class SimulatedScheduler(Scheduler):
    """A scheduler over a growing table and a counting pool. checked: whether every plan is checked
    against the limits, as the engine's are."""

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        cost_model: CostModel,
        seed: int = 0,
        rho: float | None = None,
        checked: bool = False,
    ) -> None:
        super().__init__(
            policy,
            limits,
            num_blocks=0,
            block_size=block_size,
            max_model_len=max_model_len,
            capacity=FIRST_ROWS,
            cost_model=cost_model,
            seed=seed,
            rho=rho,
        )
        width = -(-max_model_len // block_size)
        self.table = GrowingTable(FIRST_ROWS)
        self.counts = CountingPool(num_blocks, block_size, FIRST_ROWS, width)
        self.pool = self.counts
        self.view = dataclasses.replace(self.view, table=self.table, pool=self.pool)
        self.checked = checked

    def add(self, request: Request) -> int:
        row = super().add(request)
        self.counts.follow(self.table.capacity)
        return row

    def advance(self, rows: np.ndarray, steps: np.ndarray) -> None:
        """Books steps[i] decodes of each row at once, all of them in the latest of the batches that
        they stand for. Makes no room for them."""
        table = self.table
        table.computed[rows] += steps
        table.generated[rows] += steps
        latest = rows[steps == steps.max()]
        table.last_batch_order[latest] = np.arange(self._served, self._served + len(latest))
        self._served += len(latest)

    def _check(self, plan: BatchPlan) -> None:
        if self.checked:
            super()._check(plan)
