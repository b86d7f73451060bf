"""Moves host arrays to devices and back, where some devices may belong to other hosts.

Each process of a group can access only its own host's devices. It puts its own part of an array
there and reads that part back.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def put_replicated(values: Any, place: Sharding | jax.Device) -> Any:
    """A tree of NumPy arrays, the same in every process, replicated on each device of `place`."""
    if isinstance(place, jax.Device) or place.is_fully_addressable:
        return jax.device_put(values, place)
    # Not `device_put` onto all devices: it asks the other hosts each time whether values agree.
    leaves, tree = jax.tree.flatten(values)
    devices = list(place.addressable_devices)
    copies = jax.device_put([[leaf] * len(devices) for leaf in leaves], [devices] * len(leaves))
    arrays = [
        jax.make_array_from_single_device_arrays(np.shape(leaf), place, parts)
        for leaf, parts in zip(leaves, copies, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def local_part(array: jax.Array) -> np.ndarray:
    """The part on this host of an array that is sharded along at most one axis; all of it if there
    is one host. Waits for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    shards = {_starts(shard.index): shard.data for shard in array.addressable_shards}
    parts = [np.asarray(shards[start]) for start in sorted(shards)]
    first, last = min(shards), max(shards)
    cut = next((axis for axis, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), 0)
    return np.concatenate(parts, axis=cut)


def put_local_part(part: np.ndarray, place: Sharding, shape: tuple[int, ...]) -> jax.Array:
    """The array of this shape, of which each host passes the part that `local_part` gave it."""
    if place.is_fully_addressable:
        return jax.device_put(part, place)
    indices = place.addressable_devices_indices_map(shape)
    first = min(_starts(index) for index in indices.values())
    pieces, devices = [], []
    for device, index in indices.items():
        starts, sizes = _starts(index), place.shard_shape(shape)
        within = zip(starts, first, sizes, strict=True)
        pieces.append(part[tuple(slice(a - b, a - b + size) for a, b, size in within)])
        devices.append(device)
    copies = jax.device_put(pieces, devices)
    return jax.make_array_from_single_device_arrays(shape, place, copies)


def local_shape(place: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of this host's part of such an array."""
    indices = place.addressable_devices_indices_map(shape).values()
    distinct = {_starts(index) for index in indices}
    shard = place.shard_shape(shape)
    return tuple(size * len({start[axis] for start in distinct}) for axis, size in enumerate(shard))


def _starts(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    assert index is not None
    return tuple(part.start or 0 for part in index)
