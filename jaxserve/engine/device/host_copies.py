"""Copies of cached tokens in host memory, made by a thread beside the steps (BROS section 5.2).

Tokens that leave the pool are staged on the device, in the order of the steps, so that their slots
can be overwritten at once. A thread then copies them to host memory, like a copy stream. The engine
thread continues, and waits only for copies that it needs back.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.engine.device.device_arrays import local_part

OWN_S = 1.0
"""Seconds for which arrays of other engines may stay where they are."""


class Saved(NamedTuple):
    """A saved array, or one that is being saved."""

    array: np.ndarray
    copied: tuple[Future[None], ...]

    def wait(self, seconds: float) -> np.ndarray:
        """The array, once it is whole. Any thread may wait. Raises TimeoutError, or the error of a
        failed copy."""
        due = time.monotonic() + seconds
        for each in self.copied:
            each.result(max(0.0, due - time.monotonic()))
        return self.array


@dataclass
class _Kept:
    """An array under a key, and the copies to it."""

    array: np.ndarray
    copied: list[Future[None]] = field(default_factory=list)


class HostCopies:
    """Saved arrays [slots, ...] by key; with several hosts, each keeps its own part. Called from
    one thread. `make_room` raises the error of a failed copy once, and so does `get_copy` of its
    key. room: slots that may be staged at a time and are not copied yet."""

    def __init__(self, room: int) -> None:
        self._room, self._staged = room, 0
        self._kept: dict[int, _Kept] = {}
        self._under_way: deque[tuple[Future[None], int]] = deque()  # with their slots
        self._thread = ThreadPoolExecutor(1, "jaxserve-copies")

    @property
    def keys(self) -> tuple[int, ...]:
        """The keys, in the order of `allocate`."""
        return tuple(self._kept)

    def allocate(self, key: int, shape: Sequence[int], dtype: Any) -> None:
        """Allocates the memory for `key`."""
        self._kept[key] = _Kept(np.empty(shape, dtype))

    def make_room(self, slots: int) -> None:
        """Waits, if necessary, until this many more slots may be staged. Raises the first error of
        the copies that have ended since the last call."""
        under_way = self._under_way
        error: BaseException | None = None
        while under_way and (under_way[0][0].done() or self._staged + slots > self._room):
            copied, count = under_way.popleft()
            self._staged -= count
            error = error or copied.exception()
        if error is not None:
            raise error

    def copy_from(self, staged: jax.Array, parts: Iterable[tuple[int, int, int]]) -> None:
        """Starts to copy staged [m, ...]. parts: (key, first, end), one after the other, each for
        the slots [first, end) of its key. m may exceed the room."""
        parts = list(parts)
        targets = [self._kept[key].array[first:end] for key, first, end in parts]
        copied = self._thread.submit(_copy, [staged], targets)
        self._under_way.append((copied, len(staged)))
        self._staged += len(staged)
        for key, _, _ in parts:
            self._kept[key].copied.append(copied)

    def get_copy(self, key: int) -> np.ndarray:
        """The array saved under `key`, read-only. Waits only for its own copies, and raises the
        error of a failed one, since the rest of that cache is useless."""
        kept = self._kept[key]
        for copied in kept.copied:
            copied.result()
        return kept.array

    def keep(self, pages: Mapping[int, np.ndarray]) -> None:
        """Keeps arrays, by key, that another engine has saved and does not change. They may be in
        memory that is not ours, so those that are not discarded within OWN_S are copied. Most are
        loaded at once, and a copy before would be what their reader waits for."""
        new = {key: _Kept(array) for key, array in pages.items()}
        self._kept |= new
        if new:
            later = threading.Timer(OWN_S, _own, [[weakref.ref(one) for one in new.values()]])
            later.daemon = True
            later.start()

    def saved(self, key: int) -> Saved:
        """The array saved under `key`, which stays whole if the key is discarded."""
        kept = self._kept[key]
        return Saved(kept.array, tuple(kept.copied))

    def discard(self, keys: Iterable[int]) -> None:
        """Frees the arrays saved under the keys. Unknown keys are ignored, since a step that failed
        may have saved nothing. An unfinished copy writes to memory that is freed after it."""
        for key in keys:
            self._kept.pop(key, None)

    def close(self) -> None:
        """Ends the thread after its present copy. Idempotent."""
        self._thread.shutdown(cancel_futures=True)


def _own(kept: Sequence[weakref.ref[_Kept]]) -> None:
    """Copies those arrays that are still kept to memory of our own."""
    for one in kept:
        if (there := one()) is not None:
            there.array = there.array.copy()


def _copy(staged: list[jax.Array], targets: list[np.ndarray]) -> None:
    """Copies the only array in the list `staged`, and removes it. Passed in a list, since a
    caller's argument would outlive the call, and the array must be freed before."""
    contents, first = local_part(staged.pop()), 0  # waits for the device
    for target in targets:
        target[:] = contents[first : first + len(target)]
        first += len(target)
