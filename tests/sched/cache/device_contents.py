"""What is in the slots of a pool and in host memory, as the moves and batches of steps leave it."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.block_sizes import PLANES
from jaxserve.sched.cache.cache_kinds import RIGHT
from jaxserve.sched.cache.kv_offload import Segment
from jaxserve.sched.step import CopySlots, Discard, Load, Move, ProjectSlots, Save, Step

_HIDDEN = 1 << 41


class DeviceContents:
    """A slot holds a number that stands for its token, all before it, and what is kept of it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = np.zeros((num_blocks, block_size), np.int64)
        self.host: dict[int, np.ndarray] = {}

    def run(self, step: Step, pool: BlockPool, tokens: dict[int, np.ndarray]) -> None:
        """Carries the step out. AssertionError if a row does not find what it has computed, or
        others with the same tokens. tokens: of each row."""
        for move in step.moves:
            self._carry_out(move, tokens)
        rows = zip(step.rows.tolist(), step.start.tolist(), step.end.tolist(), strict=True)
        for row, start, end in rows:
            assert self.has(pool, row, tokens[row][:start]).all(), f"row {row}"
            block, slot = pool.slots_of(row, start, end).T
            planes = len(pool.blocks_of(row))
            self.slots[block, slot] = _kept(_ids(tokens[row])[start:end], planes)

    def has(self, pool: BlockPool, row: int, tokens: np.ndarray) -> np.ndarray:
        """Whether each of these first tokens of a row is where the pool says, bool [planes, n]."""
        block, slot = pool.slots_of(row, 0, len(tokens)).T
        planes = len(pool.blocks_of(row))
        found: np.ndarray = self.slots[block, slot] == _kept(_ids(tokens), planes)
        return found.reshape(planes, -1)

    def has_on_host(self, segment: Segment, tokens: np.ndarray) -> bool:
        """Whether these tokens of a row are what is kept of it there."""
        planes = int(PLANES[segment.kind])
        kept = _kept(_ids(tokens)[segment.first : segment.end], planes)
        return bool((self.host[segment.key] == kept).all())

    def _carry_out(self, move: Move, tokens: dict[int, np.ndarray]) -> None:
        match move:
            case ProjectSlots():
                for i, row in enumerate(move.rows.tolist()):
                    self._project(tokens[row], int(move.cached[i]), move, i)
            case CopySlots():
                block, slot, to, at = move.places.T
                self.slots[to, at] = self.slots[block, slot]
            case Save():
                block, slot = move.slots.T
                parts = np.split(self.slots[block, slot], np.cumsum(move.counts)[:-1])
                assert not self.host.keys() & set(move.keys), "a key is used twice"
                self.host |= zip(move.keys, parts, strict=True)
            case Load():
                block, slot = move.slots.T
                self.slots[block, slot] = np.concatenate([self.host[key] for key in move.keys])
            case Discard():
                for key in move.keys:
                    del self.host[key]

    def _project(self, tokens: np.ndarray, cached: int, move: ProjectSlots, i: int) -> None:
        index, slot = np.divmod(np.arange(cached), self.slots.shape[1])
        if move.directions[i] == RIGHT:
            slot = self.slots.shape[1] - 1 - slot
        ids = _ids(tokens)[:cached]
        k, v = move.tables[i][:, index]
        assert (self.slots[k, slot] == _kept(ids, 1)).all(), "other vectors are projected"
        self.slots[k, slot], self.slots[v, slot] = ids, -ids


def _ids(tokens: np.ndarray) -> np.ndarray:
    """A number for each token and all before it, int64 [n]."""
    prefixes = [hash(tokens[: end + 1].tobytes()) for end in range(len(tokens))]
    return np.array(prefixes, np.int64) % (_HIDDEN >> 1) + 1


def _kept(ids: np.ndarray, planes: int) -> np.ndarray:
    """What is kept of them, plane by plane."""
    return np.concatenate([ids, -ids]) if planes == 2 else ids + _HIDDEN
