"""Slots of adapters, whatever is loaded, used and unloaded in which order."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.adapters import Adapter, AdapterSlots, UnknownAdapter
from jaxserve.engine.errors import AdapterError
from jaxserve.models.lora import bucket
from jaxserve.weights.lora import LoadedAdapter

COUNT, NAMES, RANK = 3, "abcde", 32
RANKS = (3, 8, 16, 17, 32)
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["load", "unload", "acquire", "release", "spoil"]), st.sampled_from(NAMES)
    ),
    max_size=60,
)


def read(folder: Path, root: Path | None) -> LoadedAdapter:
    """A rank for each name."""
    rank = RANKS[ord(str(folder)[-1]) % len(RANKS)]
    return LoadedAdapter((), rank, bucket(rank), str(folder).encode())


@given(ACTS)
def test_no_slot_has_two(acts: list[tuple[str, str]]) -> None:
    slots = AdapterSlots(COUNT, RANK, read, "base")
    named: dict[str, Adapter] = {}
    held: list[Adapter] = []  # one a request

    def taken() -> set[int]:
        return {one.slot for one in (*named.values(), *held)}

    def spoilt(slot: int, first: int, adapter: LoadedAdapter) -> None:
        raise RuntimeError("it does not fit")

    def put(slot: int, first: int, adapter: LoadedAdapter) -> None:
        mine = set(range(first, first + adapter.columns))
        assert adapter.columns >= adapter.rank and max(mine) < COUNT * RANK
        for one in (*named.values(), *held):
            assert slot != one.slot and mine.isdisjoint(one.columns), "somebody has what is there"

    for act, name in acts:
        if act == "load" and name not in named and len(taken()) < COUNT:
            named[name] = slots.load(name, name, None, put)
        elif act == "load":
            with pytest.raises(AdapterError):
                slots.load(name, name, None, put)
        elif act == "spoil" and name not in named and len(taken()) < COUNT:
            with pytest.raises(RuntimeError):
                slots.load(name, name, None, spoilt)
        elif act == "release" and held:
            slots.release(held.pop(0))
        elif act == "unload" and name in named:
            slots.unload(name)
            del named[name]
        elif act == "acquire" and name in named:
            held.append(slots.acquire(name))
            assert held[-1] == named[name]
        elif act in ("unload", "acquire"):
            with pytest.raises(UnknownAdapter):
                slots.unload(name) if act == "unload" else slots.acquire(name)
        assert {one.name: one for one in slots.all()} == named
    for one in held:
        slots.release(one)
    for name in named:
        slots.unload(name)
    held.clear()
    named.clear()
    for number in range(COUNT):
        slots.load(f"n{number}", "c", None, put)
    assert len({one.slot for one in slots.all()}) == COUNT, "all are free again"


def test_twice_at_once() -> None:
    """Of several that load by one name, or into the last slot, one does."""
    slots, both, told = AdapterSlots(1, RANK, read), threading.Barrier(4), Counter[str]()

    def slow(slot: int, first: int, adapter: LoadedAdapter) -> None:
        refused.wait(60)

    refused = threading.Event()

    def load(name: str) -> None:
        both.wait(60)
        try:
            slots.load(name, "", None, slow)
            told["loaded"] += 1
        except AdapterError:
            told["refused"] += 1
            if told["refused"] == 3:
                refused.set()

    threads = [threading.Thread(target=load, args=(name,)) for name in ("a", "a", "b", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {"loaded": 1, "refused": 3}


def test_the_base_keeps_its_name() -> None:
    with pytest.raises(AdapterError, match="is the base model's"):
        AdapterSlots(1, RANK, read, "base").load("base", "", None, lambda *given: None)
