"""Work in equal shares: every tile is somebody's, and nobody has more than the others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels import HIDDEN, KV, AttentionBatch
from jaxserve.pallas_kernels.gpu_triton import absorbed, decode, prefill, tuning
from jaxserve.pallas_kernels.gpu_triton.common import Geometry
from jaxserve.pallas_kernels.gpu_triton.stream_k import Segment, Shares, cut, for_each_segment

OPT_13B, LLAMA_3_8B = Geometry(40, 7112, 40, 16, 128), Geometry(32, 53582, 8, 16, 128)
ITEMS, MOST = 6, 9  # of the tests that run a kernel, and tiles of an item


@functools.cache
def takers(heads: int, cutting: tuning.Cutting) -> Callable[[jax.Array], list[jax.Array]]:
    """tiles int32 [ITEMS] -> (how often each tile of each head is taken [heads, room], the items'
    parts by their place [2 * programs], -1 where there is none), as a kernel sees it."""

    def kernel(*refs: Any) -> None:
        shares, outputs = Shares(*refs[:5]), refs[-2:]

        def one_segment(segment: Segment) -> None:
            def one_tile(tile: jax.Array, _: None) -> None:
                outputs[0][segment.head, shares.starts[segment.item] + tile] += 1

            jax.lax.fori_loop(segment.begin, segment.end, one_tile, None)

            @pl.when(~segment.whole)
            def _() -> None:
                outputs[1][segment.place] = segment.item

        for_each_segment(shares, one_segment)

    def run(tiles: jax.Array) -> list[jax.Array]:
        counts = jnp.zeros((heads, ITEMS * MOST), jnp.int32)
        places = jnp.full(2 * cutting.programs, -1, jnp.int32)
        found: list[jax.Array] = pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (counts, places)],
            grid=(cutting.programs,),
            input_output_aliases={5: 0, 6: 1},
            interpret=True,
        )(*cut(tiles, heads, cutting), counts, places)
        return found

    return jax.jit(run)


@pytest.mark.parametrize(
    ("heads", "cutting"),
    [
        pytest.param(3, tuning.Cutting(6, 1, 6, 3), id="more only where needed"),
        pytest.param(3, tuning.Cutting(5, 2, 3, 90), id="a wave"),
        pytest.param(1, tuning.Cutting(1, 1, 1, 1), id="one program"),
    ],
)
def test_every_tile_is_taken_once(heads: int, cutting: tuning.Cutting) -> None:
    """However few programs there are."""

    @settings(max_examples=15)
    @given(st.lists(st.integers(0, MOST), min_size=ITEMS, max_size=ITEMS))
    def check(tiles: list[int]) -> None:
        taken, parts = takers(heads, cutting)(jnp.asarray(tiles, jnp.int32))
        assert np.all(np.asarray(taken)[:, : sum(tiles)] == 1)
        assert np.all(np.asarray(taken)[:, sum(tiles) :] == 0)
        found = np.asarray(parts)
        found = found[found >= 0]
        # Nobody has a part of what is nothing, or the only part of an item.
        assert all(tiles[item] > 1 and np.count_nonzero(found == item) > 1 for item in found)

    check()


def batch_of(contexts: list[int], rows: int, width: int, kind: int = KV) -> AttentionBatch:
    """Decodes of these contexts; tables are not looked at."""
    used = np.arange(rows) < len(contexts)
    field = functools.partial(np.zeros, rows, np.int32)
    context, length = field(), field()
    context[: len(contexts)], length[: len(contexts)] = contexts, 1
    return AttentionBatch(
        tables=jnp.zeros((rows, 2, width), jnp.int32),
        context_lens=jnp.asarray(context),
        query_start=jnp.arange(rows, dtype=jnp.int32),
        query_lens=jnp.asarray(length),
        direction=jnp.zeros(rows, jnp.int32),
        kind=jnp.full(rows, kind, jnp.int32),
        token_row=jnp.asarray(np.where(used, np.arange(rows), rows), jnp.int32),
        num_decodes=jnp.int32(len(contexts)),
        num_rows=jnp.int32(len(contexts)),
    )


def tiles_by_program(
    contexts: list[int], rows: int, geometry: Geometry, gpu: tuning.Gpu
) -> np.ndarray:
    """Tiles of each program that has any."""
    batch = batch_of(contexts, rows, -(-max(8192, *contexts) // geometry.block_size))
    with tuning.compiling_for(gpu):
        shares = decode.plan(batch, geometry, 2, sliding_window=None, decode_only=True)
    return tiles_of(shares, geometry.kv_heads)


def tiles_of(shares: Shares, heads: int) -> np.ndarray:
    """Tiles of each program that has any."""
    total, size = int(shares.starts[-1]) * heads, int(shares.size[0])
    begin = np.arange(shares.first.shape[0]) * size
    found = np.clip(total - begin, 0, size)
    assert found.sum() == total, "some tiles are nobody's"
    return found[found > 0]


MIXED = {
    "one long among short": [8192, *([100] * 63)],
    "all lengths": [2 ** (3 + i % 10) + i for i in range(64)],
    "few": [8192, 20],
}


@pytest.mark.parametrize(
    ("geometry", "gpu"),
    [(OPT_13B, tuning.A100), (LLAMA_3_8B, tuning.H100)],
    ids=["opt-13b-a100", "llama-3-8b-h100"],
)
@pytest.mark.parametrize("contexts", MIXED.values(), ids=MIXED.keys())
def test_no_program_has_more_to_read_than_the_others(
    contexts: list[int], geometry: Geometry, gpu: tuning.Gpu
) -> None:
    with tuning.compiling_for(gpu):
        launch = tuning.launch("decode", 2, geometry.head_dim)
    found = tiles_by_program(contexts, 64, geometry, gpu)
    assert found.max() <= 1.1 * found.mean()
    in_one_wave = -(-found.sum() // (gpu.processors * launch.resident))
    assert found.max() == min(in_one_wave, tuning.DECODE_TOKENS // launch.tile)


@pytest.mark.parametrize("gpu", [tuning.A100, tuning.H100], ids=["a100", "h100"])
@pytest.mark.parametrize("contexts", MIXED.values(), ids=MIXED.keys())
def test_absorbed_reads_are_as_equal(contexts: list[int], gpu: tuning.Gpu) -> None:
    """Of both passes: the scores, and the sums of each head's slice of x."""
    batch = batch_of(contexts, 64, 8192 // OPT_13B.block_size, HIDDEN)
    with tuning.compiling_for(gpu):
        plan = absorbed.plan(batch, OPT_13B, 2, 40, sliding_window=None)
        launches = [tuning.launch(f"absorbed_{name}", 2, 128) for name in plan._fields]
    for shares, heads, launch in zip(plan, (1, OPT_13B.kv_heads), launches, strict=True):
        found = tiles_of(shares, heads)
        assert found.sum() == heads * sum(-(-context // launch.tile) for context in contexts)
        assert found.max() <= 1.1 * found.mean()
        assert found.max() == -(-found.sum() // (gpu.processors * launch.resident))


def test_a_short_context_is_not_cut_into_single_tiles() -> None:
    found = tiles_by_program([130], 1, LLAMA_3_8B, tuning.A100)
    assert found.tolist() == [2] * 20  # five tiles for each of eight heads


def test_more_than_the_pool_should_hold_is_still_all_taken() -> None:
    """Programs are as many as the pool's tokens want; should rows ever share slots, each takes
    more."""
    small = Geometry(1, 64, 40, 16, 128)
    assert tiles_by_program([8192] * 64, 64, small, tuning.A100).max() > 16


@pytest.mark.parametrize(
    ("geometry", "context"),
    [(OPT_13B, 2048), (LLAMA_3_8B, 8192)],
    ids=["opt-13b", "llama-3-8b"],
)
def test_a_chunk_of_128_tokens_is_work_for_every_multiprocessor(
    geometry: Geometry, context: int
) -> None:
    """One tile of queries for each head of OPT-13B, four for each of Llama-3-8B's KV heads."""
    heads, rows = 40 if geometry is OPT_13B else 32, 4
    batch = batch_of([context], rows, context // geometry.block_size)
    batch = dataclasses.replace(
        batch,
        query_lens=batch.query_lens * 128,
        token_row=jnp.zeros(128, jnp.int32),
        num_decodes=jnp.int32(0),
    )
    with tuning.compiling_for(tuning.A100):
        launch = tuning.launch("prefill", 2, geometry.head_dim)
        work = prefill.plan(batch, geometry, 2, heads, sliding_window=None)
    tiles = int(work.shares.starts[-1]) * geometry.kv_heads
    programs = -(-tiles // int(work.shares.size[0]))
    assert 0.9 * tuning.A100.processors <= programs <= tuning.A100.processors
    # Every tile of queries reads all of its context.
    queries = int(work.shares.used[0]) * geometry.kv_heads
    assert tiles * launch.tile >= queries * (context - 128)
