"""A plan for one step: operations on caches, then the tokens to compute for each request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Preempt:
    """Running requests lose cached tokens, which are computed again when they are next planned
    (InferMax section 2.2, "refill"). A row's tokens on the host beyond those that it keeps are
    dropped, except for segments that continue there without a gap.

    Attributes:
        rows: int64 [k].
        keep: int64 [k], tokens that stay. With 0 a row gives back all its blocks and waits again.
    """

    rows: np.ndarray
    keep: np.ndarray

    @classmethod
    def whole(cls, rows: np.ndarray) -> Preempt:
        """A preemption in which the rows lose all of their cache."""
        return cls(rows, np.zeros(len(rows), np.int64))


@dataclass(frozen=True)
class ProjectToKV:
    """rows int64 [k]: planned rows whose hidden caches become K and V in place, without
    recomputation."""

    rows: np.ndarray


@dataclass(frozen=True)
class Copy:
    """Copies block to block: in every plane, row rows[i] gets a copy of its block number index[i]
    in a free block, which replaces it. Other holders keep the old block. int64 [k] both."""

    rows: np.ndarray
    index: np.ndarray


@dataclass(frozen=True)
class Checkpoint:
    """Cached tokens go to host memory (BROS section 5.2, "lazy checkpointing"). The request that
    fills their blocks from the other end may then overwrite them. The row computes nothing until
    they are restored.

    Attributes:
        rows: int64 [k].
        first, end: int64 [k], the tokens of each row, end exclusive, in all planes. They are the
            last tokens that the row still has in their blocks.
    """

    rows: np.ndarray
    first: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Restore:
    """Checkpoints come back from host memory, where their room becomes free. A checkpoint fills a
    gap in the row's cache, in order within a block, or continues at the end of the cache. A waiting
    request runs again.

    Attributes:
        rows: int64 [k].
        first: int64 [k], the token at which each checkpoint begins.
    """

    rows: np.ndarray
    first: np.ndarray


@dataclass(frozen=True)
class Join:
    """A row, running or planned to start, takes the other end of blocks int64 [k, planes] that
    another row fills, for its next k * block_size tokens (BROS section 5.1). Neither row may
    overwrite tokens of the other."""

    row: int
    blocks: np.ndarray


Operation = Preempt | ProjectToKV | Copy | Checkpoint | Restore | Join


@dataclass(frozen=True)
class BatchPlan:
    """What the next step does. Arrays are int64; the order of rows does not matter.

    Attributes:
        rows: [n], table rows.
        num_tokens: [n], pending tokens that each row computes now, including drafts.
        reserve: [n], cache tokens to have room for afterwards: at least computed + num_tokens, and
        more if a policy allocates ahead, as Sarathi does for a whole prompt.
        kinds: [n], the `CacheKind` of each row's cache.
        operations: Operations on the pool, carried out in order before the step.
        directions: [n], the `Direction` in which starting rows fill their blocks; None for LEFT.
        drafts: [n], how many of a row's tokens are drafts behind its newest token, which may be
        rejected; None if there are no drafts. Policies leave this to the scheduler
        (`sched/speculation/`).
        missed: [k], rows, planned or not, that will miss their targets. Their clients are told,
        once. This is final; naming a row again changes nothing.
        relegated: [k], rows that are served only with what is left from now on, behind all others,
        because they will miss their targets. Predictions of waits and snapshots for routers rely on
        this.
    """

    rows: np.ndarray = field(default_factory=_none)
    num_tokens: np.ndarray = field(default_factory=_none)
    reserve: np.ndarray = field(default_factory=_none)
    kinds: np.ndarray = field(default_factory=_none)
    operations: tuple[Operation, ...] = ()
    directions: np.ndarray | None = None
    drafts: np.ndarray | None = None
    missed: np.ndarray = field(default_factory=_none)
    relegated: np.ndarray = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_tokens(self) -> int:
        """Tokens of the batch."""
        return int(self.num_tokens.sum())

    @property
    def preempted(self) -> np.ndarray:
        """Rows that lose all of their cache, in order."""
        whole = (op.rows[op.keep == 0] for op in self.operations if isinstance(op, Preempt))
        return np.concatenate([_none(), *whole])

    @property
    def projected(self) -> np.ndarray:
        """Rows whose hidden caches become K and V, in order."""
        rows = (op.rows for op in self.operations if isinstance(op, ProjectToKV))
        return np.concatenate([_none(), *rows])


class InvalidPlan(RuntimeError):
    """A policy asked for something that the pool or the limits do not allow: a bug in the
    policy."""
