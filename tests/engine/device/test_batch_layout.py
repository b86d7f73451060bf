"""What of a batch goes to the device: all of small block tables, and of large ones what is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.device import batch_layout as module
from jaxserve.engine.device.batch_layout import Layout, Rows, expand
from jaxserve.engine.device.buckets import make_buckets
from tests.engine.harness import SAMPLING, engine, generate, prompts

ROWS, WIDTH, BLOCK = 128, 300, 4
LARGE = Layout(ROWS, ROWS, WIDTH, ROWS, True, block_size=BLOCK)


def decodes(contexts: list[int], width: int) -> Rows:
    """One token each; every id of the tables is another number, and not all rows have a turn."""
    n = len(contexts)
    tables = np.arange(2 * n * 2 * width, dtype=np.int32).reshape(2 * n, 2, width)
    ones = np.ones(n, np.int64)
    return Rows(ones, np.array(contexts), tables, np.arange(n)[::-1] + n // 2, slots=np.arange(n))


def test_one_long_model_does_not_make_short_batches_large() -> None:
    """128 rows of 131,072 positions have tables of 8 MiB, of which contexts of 2,000 use 1.5%."""
    buckets = make_buckets(128, 2048, width=131072 // 16, block_size=16)
    layout = buckets.decode(128)
    assert layout.size * 4 > 8 << 20
    assert layout.pack(decodes([2000] * 128, layout.width)).buffer.nbytes < 600_000
    everything = layout.pack(decodes([131071] * 128, layout.width))
    assert everything.buffer.nbytes == layout.size * 4


def test_small_tables_are_sent_whole() -> None:
    layout = make_buckets(8, 64, width=128, block_size=16).decode(8)
    assert layout.sizes == (layout.size,)


@given(contexts=st.lists(st.integers(0, 80), min_size=1, max_size=ROWS))
def test_a_compact_batch_is_a_whole_one_on_the_device(contexts: list[int]) -> None:
    rows = decodes(contexts, WIDTH)
    packed = LARGE.pack(rows)
    if len(packed.buffer) == LARGE.size:
        assert sum(context // BLOCK + 1 for context in contexts) * 2 > LARGE.sizes[0] // 2
        return
    found = LARGE.views(np.asarray(EXPAND(packed.buffer)))
    whole = Layout(ROWS, ROWS, WIDTH, ROWS, True)
    want = whole.views(whole.pack(rows).buffer)
    for row, context in enumerate(contexts):
        used = context // BLOCK + 1
        np.testing.assert_array_equal(found["tables"][row, :, :used], want["tables"][row, :, :used])
    assert found["tables"].min() >= 0 and found["tables"].max() <= rows.tables.max()
    for name in want.keys() - {"tables"}:
        np.testing.assert_array_equal(found[name], want[name])


EXPAND = jax.jit(partial(expand, layout=LARGE.as_expanded()))


def test_the_text_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
    shapes: dict[str, Path],
    alone: Callable[[str], list[list[int]]],
) -> None:
    """Of an engine, too, whose batches are compact until they are large."""
    want = alone("opt")
    monkeypatch.setattr(module, "_SMALL_TABLES", 0)
    module._places.cache_clear()
    sent = set()
    with engine(shapes["opt"], engine__forbid_compile=True) as made:
        executor: Any = made.executor
        submit = executor.submit

        def noted(layout: Layout, packed: np.ndarray, **options: Any) -> Any:
            sent.add(len(packed) == layout.size)
            return submit(layout, packed, **options)

        executor.submit = noted
        assert generate(made, prompts(), **SAMPLING) == want
    assert sent == {True, False}
    module._places.cache_clear()
