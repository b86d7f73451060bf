"""Which adapter (LoRA) is in which of the device's slots, and which requests use it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.config import LORA_NAME
from jaxserve.engine.errors import AdapterError
from jaxserve.sched.request import InvalidRequest

if TYPE_CHECKING:
    from jaxserve.weights.lora import LoadedAdapter


@dataclass(frozen=True)
class Adapter:
    """An adapter that requests may name.

    Attributes:
        name: its name, which requests give as their model.
        path: the folder that it was loaded from.
        slot: its slot.
        columns: its columns on the device.
        rank: its rank.
        digest: digest of its weights; equal adapters share caches.
    """

    name: str
    path: str
    slot: int
    columns: range = range(0)
    rank: int = 0
    digest: bytes = b""

    @property
    def number(self) -> int:
        """Its number in batches; 0 stands for no adapter."""
        return self.slot + 1


class AdapterLoad(NamedTuple):
    """The adapters that requests use.

    Attributes:
        max_loras: adapters that may be loaded at once.
        running: sorted names of the adapters of requests with a cache.
        waiting: sorted names of those of requests without one.
    """

    max_loras: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class UnknownAdapter(InvalidRequest):
    """No adapter of this name is loaded."""

    def __init__(self, name: str) -> None:
        super().__init__("model", f"there is no adapter {name!r:.80} here")


class AdapterSlots:
    """The slots, and the columns, rank for each slot, that adapters share. Any thread may call its
    methods.

    An adapter's columns begin at a multiple of their number, and all numbers are powers of two. So
    an adapter with a free slot always finds columns: with the largest rank, the columns form one
    range per slot, no other adapter lies in two ranges, and there are fewer others than ranges.

    Args:
        count: number of slots.
        rank: most columns of an adapter.
        load: (folder, root) -> the folder's content, see `jaxserve.weights.lora.load_adapter`.
        reserved: a name that no adapter may have, the base model's.

    Attributes:
        count: number of slots.
    """

    def __init__(
        self,
        count: int,
        rank: int,
        load: Callable[[Path, Path | None], LoadedAdapter],
        reserved: str = "",
    ) -> None:
        self._load, self._reserved = load, reserved
        self._lock = threading.Lock()
        self._free = list(range(count - 1, -1, -1))
        self.count, self._columns = count, count * rank
        self._taken: dict[int, range] = {}  # by slot
        self._ready: dict[str, Adapter] = {}
        self._loading: set[str] = set()
        self._used: Counter[int] = Counter()  # by slot, number of requests
        self._leaving: set[int] = set()  # slots of unloaded adapters that are still in use

    def all(self) -> list[Adapter]:
        """The adapters that requests may name, in the order in which they were loaded."""
        with self._lock:
            return list(self._ready.values())

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises UnknownAdapter."""
        with self._lock:
            return self._find(name)

    def _find(self, name: str) -> Adapter:
        found = self._ready.get(name)
        if found is None:
            raise UnknownAdapter(name)
        return found

    def load(
        self,
        name: str,
        path: str,
        root: Path | None,
        put: Callable[[int, int, LoadedAdapter], None],
    ) -> Adapter:
        """Loads an adapter into a free slot; requests may name it once this returns.

        Args:
            name: its name.
            path: its folder.
            root: folder that must contain it; None for any.
            put: (slot, first column, adapter) copies it to the device, and returns once that is
            done.

        Raises:
            AdapterError: the name is taken or invalid, all slots are taken, or `load_adapter`
                fails.
        """
        if not LORA_NAME.fullmatch(name):
            like = "1 to 128 of A-Z a-z 0-9 . _ : @ + -"
            raise AdapterError(f"lora_name: a name has {like}, got {name!r:.80}")
        if name == self._reserved:
            raise AdapterError(f"lora_name: {name!r} is the base model's")
        with self._lock:
            if name in self._ready or name in self._loading:
                raise AdapterError(f"lora_name: an adapter {name!r} is loaded, or being loaded")
            if not self._free:
                busy = f", {len(self._leaving)} of them still used" if self._leaving else ""
                raise AdapterError(
                    f"all {self.count} slots (lora.max_loras) are taken{busy}; unload one first"
                )
            slot = self._free.pop()
            self._loading.add(name)
        try:
            loaded = self._load(Path(path), root)
            columns = self._take(slot, loaded.columns)
            put(slot, columns.start, loaded)
        except BaseException as error:
            with self._lock:
                self._loading.discard(name)
                self._leave(slot)
            if isinstance(error, ValueError):  # a `CheckpointError`, whose module imports JAX
                raise AdapterError(str(error)) from None
            raise
        made = Adapter(name, path, slot, columns, loaded.rank, loaded.digest)
        with self._lock:
            self._loading.discard(name)
            self._ready[name] = made
        return made

    def _take(self, slot: int, count: int) -> range:
        """The first `count` free columns for the slot."""
        with self._lock:
            places = (range(first, first + count) for first in range(0, self._columns, count))
            found = next(
                place
                for place in places
                if all(place.stop <= a.start or a.stop <= place.start for a in self._taken.values())
            )
            self._taken[slot] = found
            return found

    def _leave(self, slot: int) -> None:
        self._taken.pop(slot, None)
        self._free.append(slot)

    def unload(self, name: str) -> None:
        """Stops new requests from naming it. Running ones continue, and its slot becomes free when
        they have ended. Raises UnknownAdapter."""
        with self._lock:
            slot = self._find(name).slot
            del self._ready[name]
            if self._used[slot]:
                self._leaving.add(slot)
            else:
                self._leave(slot)

    def acquire(self, name: str) -> Adapter:
        """Counts a request that uses it until `release`. Raises UnknownAdapter."""
        with self._lock:
            found = self._find(name)
            self._used[found.slot] += 1
            return found

    def release(self, adapter: Adapter) -> None:
        """A request that used it has ended."""
        slot = adapter.slot
        with self._lock:
            self._used[slot] -= 1
            if not self._used[slot] and slot in self._leaving:
                self._leaving.remove(slot)
                self._leave(slot)
