"""Blocks copied on the device, and slots of the pool to and from host memory (BROS section 5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding

from jaxserve.engine.step_model import StepModel
from jaxserve.pallas_kernels import move_slots, stage_in, stage_out
from jaxserve.pallas_kernels.move import STAGING

PIECE = 256
"""Slots that go at once: the one compiled size, and what has to fit beside the pool."""


class Mover:
    """pool_format: the pool's own, see `row_major`; place: where its arguments go.

    What is saved stays in a buffer on the device until its copy to the host has been started and
    the next save is asked for: by then a step has run between, and nothing waits.
    """

    def __init__(self, model: StepModel, pool_format: Format, place: Any) -> None:
        self._place = place
        self._staging = place if model.mesh is None else NamedSharding(model.mesh, STAGING)
        self._move, self._out, self._in = _functions(model.backend, model.mesh, pool_format)
        self._saved: dict[int, list[Any]] = {}
        self._leaving: list[int] = []  # keys whose pieces may still be on the device

    def copy_blocks(self, pool: jax.Array, pairs: np.ndarray) -> jax.Array:
        """The pool with what is in block pairs[i, 0] in block pairs[i, 1] too, in all layers."""
        size = pool.shape[3]
        slot = np.tile(np.arange(size, dtype=np.int32), len(pairs))
        source, target = (np.repeat(pairs[:, i], size) for i in (0, 1))
        for piece, count in _pieces(np.stack([source, slot, target, slot], axis=1)):
            pool = self._move(pool, *self._put(piece, count))
        return pool

    def save(self, pool: jax.Array, key: int, slots: np.ndarray) -> None:
        """Keeps what is in slots int32 [m, 2], (block, slot), under `key`."""
        self._to_host()
        pieces = [self._out(pool, *self._put(piece, count)) for piece, count in _pieces(slots)]
        for piece in pieces:
            piece.copy_to_host_async()
        self._saved[key] = pieces
        self._leaving.append(key)

    def load(self, pool: jax.Array, key: int, slots: np.ndarray) -> jax.Array:
        """The pool with what is kept under `key` in these slots."""
        for kept, (piece, count) in zip(self._saved[key], _pieces(slots), strict=True):
            pool = self._in(pool, jax.device_put(kept, self._staging), *self._put(piece, count))
        return pool

    def discard(self, keys: tuple[int, ...]) -> None:
        """Forgets what is kept under them."""
        for key in keys:
            del self._saved[key]

    def warm_up(self, pool: jax.Array) -> jax.Array:
        """Compiles all of it, on nothing."""
        nothing = np.zeros((0, 4), np.int32)
        moves, slots = _padded(nothing), _padded(nothing[:, :2])
        pool = self._move(pool, *self._put(moves, 0))
        staged = np.asarray(self._out(pool, *self._put(slots, 0)))
        return self._in(pool, jax.device_put(staged, self._staging), *self._put(slots, 0))

    def _to_host(self) -> None:
        """What was saved before is on the host by now, or nearly: the device need not keep it."""
        for key in self._leaving:
            if key in self._saved:
                self._saved[key] = [np.asarray(piece) for piece in self._saved[key]]
        self._leaving = []

    def _put(self, places: np.ndarray, count: int) -> tuple[jax.Array, jax.Array]:
        return jax.device_put((places, np.int32(count)), self._place)


@lru_cache(maxsize=8)
def _functions(backend: str, mesh: Mesh | None, pool_format: Format) -> tuple[Any, Any, Any]:
    """move_slots, stage_out and stage_in, jitted; the pool is donated where it changes, and stays
    as it lies."""
    options: dict[str, Any] = {"backend": backend, "mesh": mesh}
    changes: dict[str, Any] = {"donate_argnums": 0, "out_shardings": pool_format}
    return (
        jax.jit(partial(move_slots, **options), **changes),
        jax.jit(partial(stage_out, **options)),
        jax.jit(partial(stage_in, **options), **changes),
    )


def _pieces(places: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """int32 [m, k] in pieces of [PIECE, k], and how many of each count."""
    for first in range(0, len(places), PIECE):
        piece = places[first : first + PIECE]
        yield _padded(piece), len(piece)


def _padded(piece: np.ndarray) -> np.ndarray:
    padded = np.zeros((PIECE, piece.shape[1]), np.int32)
    padded[: len(piece)] = piece
    return padded
