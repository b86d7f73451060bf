"""A schedule for one iteration: what happens to caches, then request -> tokens to compute now."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Preempt:
    """These running requests lose cached tokens. rows, keep int64 [k]: keep[i] tokens stay, and the
    rest is computed again when it is next planned (InferMax section 2.2, "refill"). With 0 all its
    blocks are given back and it waits again. Of what it has on the host beyond keep[i], only what
    goes on there without a gap stays: it may be restored, until it is computed again."""

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
    """Cached tokens first[i] to end[i] (not included) of rows[i] go to host memory, all of their
    planes (BROS section 5.2, "lazy checkpointing"). In each block they are the last that the row
    still has there. Who fills the block from the other end may write over them; the row is not
    planned before they are restored. int64 [k] each."""

    rows: np.ndarray
    first: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class Restore:
    """The checkpoints of rows[i] that begin at token first[i] come back from host memory, which is
    free then: what is missing from its cache, a block's in order, or what goes on where it ends.
    A request that waited runs again. int64 [k] both."""

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

    rows [n]: table rows. num_tokens [n]: how many of its pending tokens each computes now. reserve
    [n]: cache tokens to have room for afterwards (at least computed + num_tokens; more where a
    policy allocates ahead, as Sarathi does for a whole prompt). kinds [n]: `CacheKind` of each
    row's cache. operations: on the pool, carried out one after the other before the step.
    directions [n]: `Direction` in which those that start fill their blocks; None for LEFT.
    """

    rows: np.ndarray = field(default_factory=_none)
    num_tokens: np.ndarray = field(default_factory=_none)
    reserve: np.ndarray = field(default_factory=_none)
    kinds: np.ndarray = field(default_factory=_none)
    operations: tuple[Operation, ...] = ()
    directions: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_tokens(self) -> int:
        """Tokens of the batch."""
        return int(self.num_tokens.sum())

    @property
    def preempted(self) -> np.ndarray:
        """Rows that lose all of their cache, in order."""
        found = [op.rows[op.keep == 0] for op in self.operations if isinstance(op, Preempt)]
        return np.concatenate(found) if found else _none()

    @property
    def to_kv(self) -> np.ndarray:
        """Rows whose hidden caches become K and V, in order."""
        found = [op.rows for op in self.operations if isinstance(op, ProjectToKV)]
        return np.concatenate(found) if found else _none()


class InvalidPlan(RuntimeError):
    """A policy asked for what the pool or the limits do not allow: a bug in the policy."""
