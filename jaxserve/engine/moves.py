"""Blocks copied on the device, and slots of the pool to and from host memory (BROS section 5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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
"""Slots that go at once: the one compiled size."""

ON_THE_WAY = 4
"""Pieces that are on the device beside the pool at once, each way."""

STAGED_SLOTS = 2 * ON_THE_WAY * PIECE
"""Slots for whose contents there has to be room beside the pool."""


class Mover:
    """pool_format: the pool's own, see `row_major`; place: where its arguments go.

    What is saved stays in buffers on the device until its copy has reached the host, which is
    looked after at the next moves; what is loaded, until it is in the pool. Nothing waits but for
    room: where more than ON_THE_WAY pieces would be there.
    """

    def __init__(self, model: StepModel, pool_format: Format, place: Any) -> None:
        self._place = place
        self._staging = place if model.mesh is None else NamedSharding(model.mesh, STAGING)
        self._move, self._out, self._in = _functions(model.backend, model.mesh, pool_format)
        self._saved: dict[int, list[Any]] = {}  # pieces: whole on the device, cut on the host
        self._leaving: deque[tuple[int, int, int]] = deque()  # key, number of the piece, its slots
        self._arriving = 0  # pieces that may be on the device, not yet in the pool

    def copy_slots(self, pool: jax.Array, places: np.ndarray) -> jax.Array:
        """The pool with what is in slot places[i, :2], (block, slot), in slot places[i, 2:] too, in
        all layers; places: int32 [m, 4], no target a source."""
        for piece, count in _pieces(places):
            pool = self._move(pool, *self._put(piece, count))
        return pool

    def save(
        self, pool: jax.Array, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray
    ) -> None:
        """Keeps what is in slots int32 [sum of counts, 2], (block, slot): of the first counts[0] of
        them under keys[0], and so on."""
        for key, own in zip(keys, _split(slots, counts), strict=True):
            pieces = self._saved[key] = []
            for number, (piece, count) in enumerate(_pieces(own)):
                self._to_host()
                pieces.append(self._out(pool, *self._put(piece, count)))
                pieces[-1].copy_to_host_async()
                self._leaving.append((key, number, count))

    def load(
        self, pool: jax.Array, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray
    ) -> jax.Array:
        """The pool with what is kept under keys[0] in the first counts[0] of these slots, and so
        on."""
        self._to_host()
        for key, own in zip(keys, _split(slots, counts), strict=True):
            for kept, (piece, count) in zip(self._saved[key], _pieces(own), strict=True):
                if self._arriving == ON_THE_WAY:
                    pool.block_until_ready()
                    self._arriving = 0
                staged = jax.device_put(_whole(kept), self._staging)
                pool = self._in(pool, staged, *self._put(piece, count))
                self._arriving += 1
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
        """Keeps what has reached the host there alone, no more of it than was saved, and sees to it
        that there is room for one more piece on the device."""
        while self._leaving:
            key, number, count = self._leaving[0]
            if key in self._saved:
                pieces = self._saved[key]
                if len(self._leaving) < ON_THE_WAY and not pieces[number].is_ready():
                    return
                pieces[number] = np.asarray(pieces[number])[:count].copy()
            self._leaving.popleft()

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


def _split(slots: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    return np.split(slots, np.cumsum(counts)[:-1])


def _pieces(places: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """int32 [m, k] in pieces of [PIECE, k], and how many of each count."""
    for first in range(0, len(places), PIECE):
        piece = places[first : first + PIECE]
        yield _padded(piece), len(piece)


def _whole(kept: Any) -> Any:
    """What is kept of a piece, as long as a piece; the rest may hold anything."""
    if len(kept) == PIECE:
        return kept
    whole = np.empty((PIECE, *kept.shape[1:]), kept.dtype)
    whole[: len(kept)] = kept
    return whole


def _padded(piece: np.ndarray) -> np.ndarray:
    padded = np.zeros((PIECE, piece.shape[1]), np.int32)
    padded[: len(piece)] = piece
    return padded
