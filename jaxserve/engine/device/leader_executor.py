"""The leader's executor: sends every call to the other hosts before it makes the call here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.buckets import Buckets
from jaxserve.engine.device.executor import Executor, Handle, PendingSample
from jaxserve.engine.device.host_copies import Saved
from jaxserve.engine.device.pooling_step import Pooled, Wanted
from jaxserve.engine.device.sampling import SampleResult
from jaxserve.engine.device.sampling_state import SlotParams
from jaxserve.engine.errors import HostLost
from jaxserve.hosts.group import Group
from jaxserve.hosts.link import PATIENCE_S
from jaxserve.hosts.messages import Message
from jaxserve.models.lora import Layers


class Calls:
    """Names of the messages for the calls of an `Executor`, equal to those of the methods.
    `jaxserve.engine.startup.follower_executor` makes the calls on the other hosts."""

    ADMIT, PROJECT_TO_KV, COPY_SLOTS = "admit", "project_to_kv", "copy_slots"
    SAVE, LOAD, DISCARD = "save", "load", "discard"
    SUBMIT, COMPUTE, SAMPLE = "submit", "compute", "sample"


@dataclass(frozen=True)
class NumberedPendingSample(PendingSample):
    """A pending sample with a number by which the other hosts know it, too."""

    number: int = 0


@dataclass(frozen=True)
class LeaderHandle:
    """A step of all hosts. Its results are read from this host's devices."""

    _handle: Handle
    _group: Group

    def result(self) -> SampleResult:
        """See `Handle`. Raises HostLost if the step failed because a host is gone."""
        with _blaming(self._group):
            return self._handle.result()

    def prompt(self) -> SampleResult:
        """See `Handle`."""
        with _blaming(self._group):
            return self._handle.prompt()

    def pooled(self) -> Pooled:
        """See `Handle`."""
        with _blaming(self._group):
            return self._handle.pooled()


class LeaderExecutor:
    """An `Executor` for all hosts of a group. `local` is the executor of this host. A call that
    fails because a host is gone raises HostLost."""

    def __init__(self, local: Executor, group: Group) -> None:
        self._local, self._group = local, group
        self._numbers = itertools.count()
        self._together = True  # in step with the other hosts, which make every call that is sent

    @property
    def buckets(self) -> Buckets:
        """See `Executor`."""
        return self._local.buckets

    @property
    def intact(self) -> bool:
        """See `Executor`. False once a call was made on the other hosts only."""
        return self._together and self._local.intact

    @property
    def copies_beside(self) -> bool:
        """See `Executor`."""
        return self._local.copies_beside

    @contextlib.contextmanager
    def _telling(self, name: str, *arrays: np.ndarray | None, **fields: Any) -> Iterator[None]:
        """Sends a call to the other hosts, around this host's own call."""
        given = tuple(array for array in arrays if array is not None)
        self._group.broadcast(Message(name, fields, given))
        self._together = False
        with _blaming(self._group):
            yield
        self._together = True
        self._group.mark()

    def admit(self, slot: int, params: SlotParams) -> None:
        """See `Executor`."""
        with self._telling(Calls.ADMIT, params.packed, params.counts, slot=slot):
            self._local.admit(slot, params)

    def project_to_kv(self, layout: Layout, packed: np.ndarray) -> None:
        """See `Executor`."""
        with self._telling(Calls.PROJECT_TO_KV, packed, layout=_plain(layout)):
            self._local.project_to_kv(layout, packed)

    def copy_slots(self, places: np.ndarray) -> None:
        """See `Executor`."""
        with self._telling(Calls.COPY_SLOTS, places):
            self._local.copy_slots(places)

    def save(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        """See `Executor`. Each host keeps the part of its own devices."""
        with self._telling(Calls.SAVE, slots, **_numbers(keys, counts)):
            self._local.save(keys, counts, slots)

    def load(self, keys: Sequence[int], counts: Sequence[int], slots: np.ndarray) -> None:
        """See `Executor`."""
        with self._telling(Calls.LOAD, slots, **_numbers(keys, counts)):
            self._local.load(keys, counts, slots)

    def discard(self, keys: Sequence[int]) -> None:
        """See `Executor`."""
        with self._telling(Calls.DISCARD, keys=[int(key) for key in keys]):
            self._local.discard(keys)

    sends, page_bytes = False, 0  # each host has its own part

    def saved(self, key: int) -> Saved:
        """See `Executor`. Never called."""
        raise RuntimeError("caches are not sent by several hosts")

    def fits(self, page: np.ndarray) -> bool:
        """See `Executor`."""
        return False

    def keep(self, pages: Mapping[int, np.ndarray]) -> None:
        """See `Executor`. Never called."""
        raise RuntimeError("caches are not sent to several hosts")

    def put_adapter(self, slot: int, first: int, adapter: Layers) -> None:
        """See `Executor`. Never called, since the start refuses adapters with several hosts."""
        raise RuntimeError("adapters are not served over several hosts")

    def submit(
        self,
        layout: Layout,
        packed: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None = None,
        wanted: Wanted | None = None,
    ) -> LeaderHandle:
        """See `Executor`."""
        fields = {"layout": _plain(layout), "full": bool(full), **_asked(targets, wanted)}
        with self._telling(Calls.SUBMIT, packed, targets, *(wanted or ()), **fields):
            handle = self._local.submit(layout, packed, full=full, targets=targets, wanted=wanted)
        return LeaderHandle(handle, self._group)

    def compute(
        self,
        layout: Layout,
        packed: np.ndarray,
        *,
        targets: np.ndarray | None = None,
        wanted: Wanted | None = None,
    ) -> NumberedPendingSample:
        """See `Executor`."""
        number = next(self._numbers)
        fields = {"layout": _plain(layout), "number": number, **_asked(targets, wanted)}
        with self._telling(Calls.COMPUTE, packed, targets, *(wanted or ()), **fields):
            step = self._local.compute(layout, packed, targets=targets, wanted=wanted)
        return NumberedPendingSample(**vars(step), number=number)

    def sample(self, pending: PendingSample, masks: np.ndarray) -> LeaderHandle:
        """See `Executor`."""
        assert isinstance(pending, NumberedPendingSample)
        with self._telling(Calls.SAMPLE, masks, number=pending.number):
            handle = self._local.sample(pending, masks)
        return LeaderHandle(handle, self._group)

    def close(self) -> None:
        """See `Executor`. Ends the other hosts, too."""
        self._group.close()
        self._local.close()


@contextlib.contextmanager
def _blaming(group: Group) -> Iterator[None]:
    """Raises HostLost for a device error caused by a lost host, which the group detects soon."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        why = group.lost(PATIENCE_S + 1)
        if why is None:
            raise
        raise HostLost(why) from error


def _plain(layout: Layout) -> dict[str, Any]:
    return dataclasses.asdict(layout)


def _asked(targets: np.ndarray | None, wanted: Wanted | None) -> dict[str, bool]:
    """Which of the two follow the batch, in this order."""
    return {"targets": targets is not None, "wanted": wanted is not None}


def _numbers(keys: Sequence[int], counts: Sequence[int]) -> dict[str, list[int]]:
    return {"keys": [int(key) for key in keys], "counts": [int(count) for count in counts]}
