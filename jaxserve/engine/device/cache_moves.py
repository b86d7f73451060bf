"""Moves cached tokens to other blocks of the pool, and to and from host memory (BROS section
5.2)."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxserve.engine.device.device_arrays import (
    local_part,
    local_shape,
    put_local_part,
    put_replicated,
)
from jaxserve.engine.device.host_copies import HostCopies, Saved
from jaxserve.engine.device.step_model import StepModel
from jaxserve.pallas_kernels import Pool, move_slots, stage_in, stage_out, staging_shape
from jaxserve.pallas_kernels.move import STAGING

SIZES = (32, 256)
"""Slots copied at once: the compiled sizes, ascending."""

ROOM = 1024
"""Most slots whose contents are on the device beside the pool, in each direction."""

STAGED_SLOTS = 2 * ROOM
"""Slots for whose contents the device needs room beside the pool."""

PINNED = "pinned_host"
_ALIGNMENT = 64  # bytes, of what XLA need not copy


class Mover:
    """Copies slots of the pool. Keeps saved slots in host memory.

    A save is staged on the device and copied to the host from there, see `HostCopies`. A load
    starts on its way to the device at once and enters the pool in the order of the steps. A call
    waits only if more than ROOM slots would be staged, and a load also waits for the save of its
    slots.

    Args:
        model: gives the kernels and the mesh.
        pool_format: format of the pool, see `pallas_kernels.pool_format`.
        place: device or sharding of the kernels' arguments.
        pinned: whether saves go through pinned host memory; None decides by `has_pinned`.
    """

    def __init__(
        self, model: StepModel, pool_format: Any, place: Any, *, pinned: bool | None = None
    ) -> None:
        mesh = model.mesh
        self._place = place
        self._staging: Sharding = (
            SingleDeviceSharding(place) if mesh is None else NamedSharding(mesh, STAGING)
        )
        device = next(iter(self._staging.addressable_devices))
        pinned = has_pinned(device) if pinned is None else pinned
        self._pinned = self._staging.with_memory_kind(PINNED) if pinned else None
        self._move, self._out, self._in = _functions(model.backend, mesh, pool_format)
        self._host = HostCopies(ROOM)
        # Ready once in the pool; slots; and our array that they come from, if it is one of these.
        self._arriving: deque[tuple[Any, int, np.ndarray | None]] = deque()
        self._buffers: list[np.ndarray] = []  # free ones, for loads of the largest size

    @property
    def pinned(self) -> bool:
        """Whether saves go through pinned host memory, to which the device copies by itself."""
        return self._pinned is not None

    def copy_slots(self, pool: Pool, places: np.ndarray) -> Pool:
        """Copies cached tokens within the pool, in all layers. places: int32 [m, 4], from (block,
        slot) to (block, slot). Returns the pool."""
        for piece, count in _pieces(places):
            pool = self._move(pool, *self._put(piece, count))
        return pool

    def save(
        self, pool: Pool, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray
    ) -> None:
        """Copies cached tokens to host memory.

        Args:
            pool: the pool.
            keys: keys to find them by.
            counts: tokens of each key.
            slots: int32 [sum(counts), 2], (block, slot): those of keys[0] first.
        """
        for key, count in zip(keys, counts, strict=True):
            self._host.allocate(key, self.shape(pool, count), pool.dtype)
        first, ends = 0, [*itertools.accumulate(counts)]
        for piece, count in _pieces(slots):
            self._host.make_room(len(piece))
            staged = self._out(pool, *self._put(piece, count))
            if self._pinned is None:
                staged.copy_to_host_async()
            else:
                staged = jax.device_put(staged, self._pinned)
            self._host.copy_from(staged, _parts(keys, ends, first, first + count))
            first += count

    def load(
        self, pool: Pool, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray
    ) -> Pool:
        """Copies saved tokens to slots of the pool.

        Args:
            pool: the pool, which is donated.
            keys: keys of the saved tokens.
            counts: tokens of each key.
            slots: see `save`.

        Returns:
            The pool with them.
        """
        kept = {key: self._host.get_copy(key) for key in keys}
        first, ends = 0, [*itertools.accumulate(counts)]
        for piece, count in _pieces(slots):
            parts = [kept[key][a:b] for key, a, b in _parts(keys, ends, first, first + count)]
            self._make_room(len(piece))
            mine = self._joined(parts, len(piece))
            staged = put_local_part(mine, self._staging, staging_shape(pool, len(piece)))
            pool, there = self._in(pool, staged, *self._put(piece, count))
            ours = mine if len(mine) == SIZES[-1] and mine is not parts[0] else None
            self._arriving.append((there, len(piece), ours))
            first += count
        return pool

    def saved(self, key: int) -> Saved:
        """See `HostCopies.saved`."""
        return self._host.saved(key)

    def shape(self, pool: Pool, slots: int) -> tuple[int, ...]:
        """The shape in which so many slots of the pool are saved here."""
        return local_shape(self._staging, staging_shape(pool, slots))

    def keep(self, pages: Mapping[int, np.ndarray]) -> None:
        """Keeps slots that another engine has saved, by key, for `load`."""
        self._host.keep(pages)

    def discard(self, keys: Sequence[int]) -> None:
        """Frees the tokens saved under these keys."""
        self._host.discard(keys)

    def check(self) -> None:
        """Raises the error of a copy to the host, if one has failed."""
        self._host.make_room(0)

    def close(self) -> None:
        """Ends the copies and their thread. Idempotent."""
        self._host.close()

    def warm_up(self, pool: Pool) -> Pool:
        """Compiles all copies, without copying anything."""
        nothing = np.zeros((0, 4), np.int32)
        for size in SIZES:
            moves, slots = _padded(nothing, size), _padded(nothing[:, :2], size)
            pool = self._move(pool, *self._put(moves, 0))
            staged = self._out(pool, *self._put(slots, 0))
            if self._pinned is not None:
                staged = jax.device_put(staged, self._pinned)
            back = put_local_part(local_part(staged), self._staging, staged.shape)
            pool, _ = self._in(pool, back, *self._put(slots, 0))
        shape = self.shape(pool, SIZES[-1])
        self._buffers = [_aligned(shape, pool.dtype) for _ in range(ROOM // SIZES[-1])]
        for each in self._buffers:
            each[:] = 0  # so that it is there
        return pool

    def _make_room(self, slots: int) -> None:
        """Waits until this many more slots may be on their way to the pool."""
        arriving = self._arriving
        while arriving and (
            arriving[0][0].is_ready() or sum(count for _, count, _ in arriving) + slots > ROOM
        ):
            there, _, buffer = arriving.popleft()
            there.block_until_ready()
            if buffer is not None:
                self._buffers.append(buffer)

    def _joined(self, parts: list[np.ndarray], size: int) -> np.ndarray:
        """The parts concatenated, [size, ...]. The rest is arbitrary."""
        if len(parts) == 1 and len(parts[0]) == size:
            return parts[0]
        if size == SIZES[-1] and self._buffers:  # new memory takes longer than the copy
            whole = self._buffers.pop()
        else:
            whole = _aligned((size, *parts[0].shape[1:]), parts[0].dtype)
        np.concatenate(parts, out=whole[: sum(map(len, parts))])
        return whole

    def _put(self, places: np.ndarray, count: int) -> tuple[jax.Array, jax.Array]:
        placed: tuple[jax.Array, jax.Array] = put_replicated((places, np.int32(count)), self._place)
        return placed


def has_pinned(device: jax.Device) -> bool:
    """Whether the device can copy to pinned host memory while steps run. A CPU lists such memory,
    too, but it is ordinary memory."""
    return device.platform != "cpu" and PINNED in {m.kind for m in device.addressable_memories()}


@lru_cache(maxsize=8)
def _functions(backend: str, mesh: Mesh | None, pool_format: Any) -> tuple[Any, Any, Any]:
    """move_slots, stage_out and stage_in, jitted. They donate the pool if they change it, and keep
    its layout. stage_in also returns a number that is ready when the pool is."""
    options: dict[str, Any] = {"backend": backend, "mesh": mesh}

    def come_in(pool: Pool, staging: Any, slots: Any, count: Any) -> tuple[Pool, Any]:
        return stage_in(pool, staging, slots, count, **options), count + 1

    def changes(out: Any) -> dict[str, Any]:
        return {"donate_argnums": 0, "out_shardings": out}

    return (
        jax.jit(partial(move_slots, **options), **changes(pool_format)),
        jax.jit(partial(stage_out, **options)),
        jax.jit(come_in, **changes((pool_format, None))),
    )


def _pieces(places: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """int32 [m, k] cut into padded pieces of [one of SIZES, k], and how many entries of each are
    real."""
    most = SIZES[-1]
    for first in range(0, len(places), most):
        piece = places[first : first + most]
        yield _padded(piece, next(size for size in SIZES if size >= len(piece))), len(piece)


def _parts(
    keys: Sequence[int], ends: Sequence[int], first: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Which keys the entries [first, end) belong to, if those of keys[i] end at ends[i]: (key,
    first, end) within the key's own entries."""
    at = bisect.bisect_right(ends, first)
    while first < end:
        begin = ends[at - 1] if at else 0
        until = min(end, ends[at])
        if first < until:
            yield keys[at], first - begin, until - begin
        first, at = until, at + 1


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that a CPU device reads where it lies."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def _padded(piece: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros((size, piece.shape[1]), np.int32)
    padded[: len(piece)] = piece
    return padded
