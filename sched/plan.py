"""A schedule for one iteration: what happens to caches, then request -> tokens to compute now."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Preempt:
    """Running requests lose cached tokens, which are computed again when they are next planned
    (InferMax section 2.2, "refill"). Of what a row has on the host beyond the tokens that it keeps,
    only what goes on from there without a gap stays.

    Attributes:
        rows: int64 [k].
        keep: int64 [k], tokens that stay. With 0 a row gives back all its blocks and waits again.
    """

    rows: np.ndarray
    keep: np.ndarray

    @classmethod
    def whole(cls, rows: np.ndarray) -> Preempt:
        """They lose all of it."""
        return cls(rows, np.zeros(len(rows), np.int64))


@dataclass(frozen=True)
class ProjectToKV:
    """rows int64 [k]: planned rows whose hidden caches become K and V in place, with nothing
    recomputed."""

    rows: np.ndarray


@dataclass(frozen=True)
class Copy:
    """Block to block: in every plane, what rows[i] has in its block number index[i] is copied to a
    free one, which takes its place. Others that hold the old one keep it. int64 [k] both."""

    rows: np.ndarray
    index: np.ndarray


@dataclass(frozen=True)
class Checkpoint:
    """Cached tokens go to host memory (BROS section 5.2, "lazy checkpointing"). The request that
    fills their blocks from the other end may then write over them. The row computes nothing until
    they are restored.

    Attributes:
        rows: int64 [k].
        first, end: int64 [k], the tokens of each row, end not included, in all planes. They are the
            last ones that the row still has in their blocks.
    """

    rows: np.ndarray
    first: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Restore:
    """Checkpoints come back from host memory, which is free then. One fills what is missing from
    the row's cache, in order within a block, or goes on where the cache ends. A request that waited
    runs again.

    Attributes:
        rows: int64 [k].
        first: int64 [k], the token at which each checkpoint begins.
    """

    rows: np.ndarray
    first: np.ndarray


@dataclass(frozen=True)
class Join:
    """A row, running or planned to start, takes the other end of blocks int64 [k, planes] that
    somebody else fills, for its next k * block_size tokens (BROS section 5.1). Neither may write
    over what the other has there."""

    row: int
    blocks: np.ndarray


Operation = Preempt | ProjectToKV | Copy | Checkpoint | Restore | Join


@dataclass(frozen=True)
class BatchPlan:
    """What the next iteration does. Arrays are int64; the order of rows does not matter.

    Attributes:
        rows: [n], table rows.
        num_tokens: [n], how many of its pending tokens each computes now, drafted ones included.
        reserve: [n], cache tokens to have room for afterwards: at least computed + num_tokens, and
            more where a policy allocates ahead, as Sarathi does for a whole prompt.
        kinds: [n], the `CacheKind` of each row's cache.
        operations: On the pool, carried out one after the other before the step.
        directions: [n], the `Direction` in which those that start fill their blocks; None for LEFT.
        drafts: [n], how many of a row's tokens are drafted ones behind its newest, which may prove
            false; None where nobody drafts. Policies leave this to the scheduler
            (`sched/speculation/`).
        missed: [k], rows, planned or not, that are not going to meet their targets. Who waits for
            them is told, once. It is not taken back; naming them again changes nothing.
        relegated: [k], rows that are not, and are served with what is left from now on, behind all
            others: predictions of waits, and snapshots for routers, take them for that.
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
    """A policy asked for what the pool or the limits do not allow: a bug in the policy."""
