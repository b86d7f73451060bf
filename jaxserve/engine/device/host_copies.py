"""Contents of slots in host memory, copied there by a thread beside the steps (BROS section 5.2).

What leaves the pool is staged on the device, in the order of the steps, so that its slots can be
written at once. From there a thread takes it into memory of the host's own. It stands where a copy
stream would: the engine's thread goes on, and waits only for what it wants back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxserve.engine.device.device_arrays import local_part


class HostCopies:
    """What is kept by key: arrays [slots, ...], of several hosts each one's own part. One thread
    calls; what a copy raised `make_room` raises once, and whoever wants that key back hears of it
    too. room: slots that may be staged at a time, not yet copied.
    """

    def __init__(self, room: int) -> None:
        self._room, self._staged = room, 0
        self._kept: dict[int, np.ndarray] = {}
        self._copied: dict[int, list[Future[None]]] = {}  # the copies to each
        self._under_way: deque[tuple[Future[None], int]] = deque()  # with its slots
        self._thread = ThreadPoolExecutor(1, "jaxserve-copies")

    @property
    def keys(self) -> tuple[int, ...]:
        """Of all that is kept, in the order of `allocate`."""
        return tuple(self._kept)

    def allocate(self, key: int, shape: Sequence[int], dtype: Any) -> None:
        """Memory for what comes under `key`."""
        self._kept[key], self._copied[key] = np.empty(shape, dtype), []

    def make_room(self, slots: int) -> None:
        """Waits until so many more may be staged; not at all where they may. Raises what the first
        of the copies has raised that are done since."""
        under_way = self._under_way
        error: BaseException | None = None
        while under_way and (under_way[0][0].done() or self._staged + slots > self._room):
            copied, count = under_way.popleft()
            self._staged -= count
            error = error or copied.exception()
        if error is not None:
            raise error

    def copy_from(self, staged: jax.Array, parts: Iterable[tuple[int, int, int]]) -> None:
        """Begins to copy staged [m, ...]: one part after the other, (key, first, end), to the slots
        [first, end) of what is kept under the key. Whatever m is, there is room for it."""
        parts = list(parts)
        targets = [self._kept[key][first:end] for key, first, end in parts]
        copied = self._thread.submit(_copy, [staged], targets)
        self._under_way.append((copied, len(staged)))
        self._staged += len(staged)
        for key, _, _ in parts:
            self._copied[key].append(copied)

    def get_copy(self, key: int) -> np.ndarray:
        """What is kept under `key`; waits for its own copies alone, and raises what one of them has
        raised: the rest of it is nobody's cache. Nobody writes to it."""
        for copied in self._copied[key]:
            copied.result()
        return self._kept[key]

    def discard(self, keys: Iterable[int]) -> None:
        """Forgets what is kept under them, if anything is: a step that failed may have saved
        nothing. A copy under way ends in memory that nobody has."""
        for key in keys:
            self._kept.pop(key, None)
            self._copied.pop(key, None)

    def close(self) -> None:
        """Ends the thread, when the copy that it makes is done. Idempotent."""
        self._thread.shutdown(cancel_futures=True)


def _copy(staged: list[jax.Array], targets: list[np.ndarray]) -> None:
    """staged: the one array, taken out of the list, for whoever calls keeps its arguments until
    after it has said that this is done: then the array is to be gone."""
    contents, first = local_part(staged.pop()), 0  # waits for the device
    for target in targets:
        target[:] = contents[first : first + len(target)]
        first += len(target)
