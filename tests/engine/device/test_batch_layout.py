"""What of a batch goes to the device: all of small block tables, and of large ones what is new."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.device import batch_layout as module
from jaxserve.engine.device.batch_layout import Layout, Rows, empty_tables, expand, keep
from jaxserve.engine.device.buckets import make_buckets
from tests.engine.harness import SAMPLING, SCARCE, engine, generate, prompts

ROWS, WIDTH, BLOCK = 128, 300, 4
LARGE = Layout(ROWS, ROWS, WIDTH, ROWS, True, block_size=BLOCK)


def decodes(contexts: list[int], width: int, mirrored: list[int] | None = None) -> Rows:
    """One token each; every id of the tables is another number, and not all rows have a turn."""
    n = len(contexts)
    tables = np.arange(2 * n * 2 * width, dtype=np.int32).reshape(2 * n, 2, width)
    there = None if mirrored is None else np.array(mirrored)
    return Rows(
        np.ones(n, np.int64),
        np.array(contexts),
        tables,
        np.arange(n)[::-1] + n // 2,
        slots=np.arange(n),
        mirrored=there,
    )


@pytest.mark.parametrize("rows", [8, 128])
def test_what_a_step_sends_does_not_grow_with_the_contexts(rows: int) -> None:
    """128 rows of 131,072 positions have tables of 8 MiB."""
    buckets = make_buckets(128, 2048, width=131072 // 16, block_size=16)
    layout = buckets.decode(rows)

    def sent(context: int) -> int:
        there = [context // 16] * rows
        return layout.pack(decodes([context] * rows, layout.width, there)).buffer.nbytes

    assert layout.size * 4 > rows << 16
    assert sent(16) == sent(2000) == sent(131071) < 80 * rows
    anew = layout.pack(decodes([131071] * rows, layout.width, [0] * rows))
    assert anew.buffer.nbytes == layout.size * 4
    few = [131071 // 16] * (rows - 1) + [0]  # one comes that finds a long prefix
    some = layout.pack(decodes([131071] * (rows - 1) + [4000], layout.width, few))
    assert some.buffer.nbytes < layout.size * 4 / 15


def test_a_chunk_sends_its_own_blocks() -> None:
    layout = make_buckets(128, 2048, width=131072 // 16, block_size=16).mixed(512)
    tables = np.arange(2 * layout.width, dtype=np.int32).reshape(1, 2, -1)
    sizes = set()
    for context in (0, 512, 131072 - 512):
        there = np.array([context // 16])
        rows = Rows(np.array([512]), np.array([context]), tables, mirrored=there)
        sizes.add(len(layout.pack(rows).buffer))
    assert len(sizes) == 1 and sizes.pop() < 8000


def test_small_tables_are_sent_whole() -> None:
    layout = make_buckets(8, 64, width=128, block_size=16).decode(8)
    assert layout.sizes == (layout.size,) and not layout.mirrors


class Mirror:
    """The tables of a host, and those of a device that is sent batches."""

    def __init__(self, seed: int, way: str = "cpu") -> None:
        self.expand, self.keep = (WAYS[way, one] for one in (expand, keep))
        self.rng = np.random.default_rng(seed)
        self.tables = self.rng.integers(1, 1 << 20, (2 * ROWS, 2, WIDTH), np.int32)
        self.mirrored = np.zeros(2 * ROWS, np.int64)
        self.contexts = np.zeros(2 * ROWS, np.int64)
        self.row_of = np.arange(ROWS)  # by slot
        self.device = jax.device_put(empty_tables(LARGE))
        self.kinds = set[int]()

    def step(self, count: int) -> None:
        slots = self.rng.permutation(ROWS)[:count]
        for slot in slots.tolist():
            match int(self.rng.integers(8)):
                case 0:  # somebody else gets it
                    row = self.row_of[slot] = (self.row_of[slot] + ROWS) % (2 * ROWS)
                    self.mirrored[row], self.contexts[row] = 0, self.rng.integers(WIDTH * BLOCK)
                case 1:  # it reads another's block instead of its own
                    row = self.row_of[slot]
                    index = int(self.rng.integers(WIDTH))
                    self.tables[row, :, index] += 1
                    self.mirrored[row] = min(self.mirrored[row], index)
        rows = self.row_of[slots]
        batch = Rows(
            np.ones(count, np.int64),
            self.contexts[rows],
            self.tables,
            rows,
            slots=slots,
            mirrored=self.mirrored[rows],
        )
        packed = LARGE.pack(batch)
        self.kinds.add(len(packed.buffer))
        if len(packed.buffer) == LARGE.size:
            self.device, whole = self.keep(packed.buffer, self.device), packed.buffer
        else:
            whole, self.device = self.expand(packed.buffer, self.device)
        found = LARGE.views(np.asarray(whole))
        want = LARGE.views(LARGE.pack(dataclasses.replace(batch, mirrored=None)).buffer)
        used = -(-(self.contexts[rows] + 1) // BLOCK)
        for i, blocks in enumerate(used[packed.order].tolist()):
            got, of = found["tables"][i, :, :blocks], want["tables"][i, :, :blocks]
            np.testing.assert_array_equal(got, of)
        for name in want.keys() - {"tables"}:
            np.testing.assert_array_equal(found[name], want[name])
        self.mirrored[rows] = used
        self.contexts[rows] = np.minimum(self.contexts[rows] + 3, WIDTH * BLOCK - 1)


@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(1, ROWS), max_size=8))
def test_a_compact_batch_is_a_whole_one_on_the_device(seed: int, counts: list[int]) -> None:
    mirror = Mirror(seed)
    for count in counts:
        mirror.step(count)


@pytest.mark.parametrize("way", ["cpu", "default"])
def test_batches_of_all_sizes_occur(way: str) -> None:
    mirror = Mirror(0, way)
    for count in (1, 8, ROWS, 2, ROWS, 1, 8):
        mirror.step(count)
    assert mirror.kinds == set(LARGE.sizes)


def _as_on(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled here as it is for CPUs, or for other devices."""

    def chosen(*arguments: Any, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
        return (cpu if way == "cpu" else default)(*arguments)

    def traced(*arguments: Any) -> Any:
        with mock.patch.object(jax.lax, "platform_dependent", chosen):
            return function(*arguments, layout=LARGE.as_expanded())

    return jax.jit(traced)


WAYS = {(way, one): _as_on(way, one) for way in ("cpu", "default") for one in (expand, keep)}


def test_the_text_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
    shapes: dict[str, Path],
    alone: Callable[[str], list[list[int]]],
) -> None:
    """Of an engine, too, whose rows lose their blocks and read others', and whose slots change
    hands."""
    want = alone("opt")
    monkeypatch.setattr(module, "_SMALL_TABLES", 0)
    module._places.cache_clear()
    sent = set()
    with engine(shapes["opt"], cache__prefix_caching=True, **SCARCE) as made:
        executor: Any = made.executor
        submit = executor.submit

        def noted(layout: Layout, packed: np.ndarray, **options: Any) -> Any:
            sent.add(len(packed) == layout.size)
            return submit(layout, packed, **options)

        executor.submit = noted
        assert generate(made, prompts(), **SAMPLING) == want
        for _ in range(2):
            assert generate(made, prompts()[:1], **SAMPLING) == want[:1]
        stats = made.stats()
        assert stats.preemptions and sum(stats.prefix_cache_hits.values())
    assert False in sent
    module._places.cache_clear()
