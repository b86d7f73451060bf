"""What is only the TPU's: a fallback for little VMEM, and what its kernels do not take."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    LEFT,
    RIGHT,
    KernelShape,
    get_backend,
    move_slots,
    plan_absorbed,
    plan_attention,
    plan_write,
    reference,
)
from jaxserve.pallas_kernels.pool import FLOAT8
from jaxserve.pallas_kernels.tpu import granules, move, scales, tuning
from jaxserve.pallas_kernels.tpu.common import BEGIN, END
from tests.pallas_kernels import edges
from tests.pallas_kernels.batches import Shape, make_batch, make_pool, vectors
from tests.pallas_kernels.cases import Case, compiled, takes
from tests.pallas_kernels.conformance import (
    ABSORBED,
    ATTENTION,
    PAGED,
    Attention,
    call,
    check_write,
    close,
    put,
    same,
)
from tests.pallas_kernels.edges import Edge

TPU = get_backend("tpu-interpret")
NARROW = Shape(2, 2, head_dim=64, rows=4, width=6, tokens=24)
TWO_PASSES = Case("two-passes", NARROW, window=13, cap=2.0)


@pytest.mark.parametrize(
    "edge", [edges.between_others, edges.edges_of_blocks, edges.far, edges.chunks_between_others]
)
def test_absorbed_in_two_passes_where_vmem_is_small(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(tuning.INTERPRET, vmem=1 << 10)
    monkeypatch.setattr(tuning, "INTERPRET", small)
    ABSORBED.check("tpu-interpret", TWO_PASSES, edge(NARROW, ABSORBED.kind), 2)


@pytest.mark.parametrize("longest", [move.LONGEST_STRIDE, 0])
def test_layers_are_moved_together_or_one_by_one(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several of them at once, in each of several programs; one by one where a pool is so large
    that their distance is too long for a copy."""
    monkeypatch.setattr(move, "LONGEST_STRIDE", longest)
    values = np.random.default_rng(0).standard_normal((8, 5, 2, 8, 128), dtype=np.float32)
    pool = values.astype(jnp.bfloat16)
    moves = np.int32([[0, 1, 2, 3], [1, 7, 2, 4], [0, 2, 3, 2], [0, 3, 4, 0], [9, 9, 9, 9]])
    assert granules.layers_at_once(jnp.asarray(pool), len(pool), True) == 2
    # Not TPU.move itself, of which jit keeps what it has traced.
    got = jax.jit(partial(move_slots, backend="tpu-interpret"))(pool, moves, 4)
    same(got, reference.move(pool, moves, 4))


def test_a_write_looks_at_no_more_slots_than_it_fills() -> None:
    """One for a decode, and of a chunk's first granule the last ones; the other way round where
    blocks are filled from the right."""
    shape = Shape(2, 2, head_dim=64, rows=3, tokens=24)
    rows, sides = [(9, 1), (16, 10), (10, 1)], [LEFT, LEFT, RIGHT]
    batch = make_batch(shape, rows, sides, 0, np.random.default_rng(0))
    pool = jnp.zeros((1, shape.blocks, 2, shape.block_size, 64))
    plan = jax.jit(partial(plan_write, hidden=False, backend="tpu-interpret"))(pool, batch).values
    spans = plan.span.T[: int(plan.number)].tolist()
    assert sorted(spans) == sorted([[0, 1], [6, 8], [0, 8], [6, 7]] * 2)


@pytest.mark.parametrize("cache", ["int8", pytest.param(FLOAT8, marks=pytest.mark.slow)])
def test_what_memory_has_no_room_for_is_written_in_pieces(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granules as scalar memory has room for 5 of them, blocks of scales 2 at a time. Some pieces
    have nothing."""
    shape = Shape(1, 1, head_dim=64, block_size=32, rows=3, width=3, tokens=50)
    monkeypatch.setattr(granules, "SMEM_LIMIT", 5 * 4 * (4 + shape.block_size))
    monkeypatch.setattr(scales, "MOST_BYTES", 2 * 8 * 128 * 4)
    rows, sides = [(40, 1), (60, 30), (96, 19)], [LEFT, RIGHT, LEFT]
    batch = make_batch(shape, rows, sides, 1, np.random.default_rng(0))
    check_write("tpu-interpret", Case("pieces", shape, cache=cache), batch, 1)


def test_what_the_kernels_take() -> None:
    shape = KernelShape(8, 2, head_dim=128, block_size=16, dtype="bfloat16")
    assert TPU.supports(KV, shape) is None
    for change, reason in (
        ({"dtype": "float16"}, "dtype float16"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim": 48}, "head_dim 48"),
        ({"block_size": 12}, "block_size 12"),
        ({"kv_heads": 3}, "num_heads 8"),
    ):
        assert reason in str(TPU.supports(KV, dataclasses.replace(shape, **change)))


@pytest.mark.parametrize("attention", ATTENTION, ids=lambda attention: attention.name)
@pytest.mark.parametrize("head_dim", [80, pytest.param(96, marks=pytest.mark.slow)])
def test_heads_that_are_padded(attention: Attention, head_dim: int) -> None:
    shape = Shape(2, 2, head_dim=head_dim, rows=3, width=3, tokens=3)
    case = Case("padded", shape, "bfloat16", parts=("norm", "rotary"))
    assert takes("tpu-interpret", case, attention.kind)
    rng = np.random.default_rng(0)
    rows, sides, kinds = [(20, 1), (9, 1), (1, 1)], [LEFT, RIGHT, LEFT], [attention.kind] * 3
    batch = make_batch(shape, rows, sides, 3, rng, kinds=kinds)
    attention.check("tpu-interpret", case, batch, 1)
    if attention is PAGED:
        check_write("tpu-interpret", case, batch, 1)


def test_tables_that_scalar_memory_cannot_hold() -> None:
    case = Case("wide-tables", Shape(3, 1, head_dim=128, rows=4, tokens=4))
    shape = case.shape
    batch = make_batch(shape, [(5, 1)], [LEFT], 1, np.random.default_rng(0))
    batch = dataclasses.replace(batch, tables=jnp.zeros((shape.rows, 2, 80_000), jnp.int32))
    pool = jnp.zeros((1, 3, 1, shape.block_size, shape.head_dim))
    q = jnp.zeros((shape.tokens, 3, shape.head_dim))
    with pytest.raises(ValueError, match="scalar memory"):
        call(PAGED, "tpu-interpret", case, q, pool, jnp.int32(0), batch)


PLANNED = Case("planned", Shape(2, 2, head_dim=64, rows=3, width=5, tokens=20), window=9)


@pytest.mark.parametrize("attention", ATTENTION, ids=lambda attention: attention.name)
def test_attention_does_what_its_plan_says(attention: Attention) -> None:
    """Not what it could find out by itself: made for a batch and given with another, whose rows are
    half as long, it attends over the first one's contexts, in any layer."""
    rng, kinds = np.random.default_rng(0), [attention.kind] * 2
    batch = make_batch(PLANNED.shape, [(20, 1), (33, 17)], [LEFT, RIGHT], 1, rng, kinds=kinds)
    queries, pool, layer, _, *rest = attention.arguments(PLANNED, batch, 1)
    options: dict[str, Any] = {"sliding_window": 9, "backend": "tpu-interpret"}
    if attention is ABSORBED:
        plans = partial(plan_absorbed, num_heads=2, **options)
    else:
        options |= {"kind": attention.kind, "decode_only": False}
        plans = partial(plan_attention, num_heads=2, **options)
    plan = jax.jit(plans)(pool, batch)
    other = dataclasses.replace(batch, context_lens=batch.context_lens // 2)
    function = partial(attention.function, **attention.step_options(PLANNED))
    options = attention.options(PLANNED)
    want = attention.reference(queries, pool, int(layer), batch, *rest, **options)
    got = compiled(function, "tpu-interpret")(queries, pool, layer, other, *rest, plan=plan)
    close(got, want, attention.used(batch), PLANNED)


def test_a_write_does_what_its_plan_says() -> None:
    shape = PLANNED.shape
    rng = np.random.default_rng(0)
    kinds = [KV, HIDDEN]
    batch = make_batch(shape, [(20, 1), (33, 17)], [LEFT, RIGHT], 1, rng, kinds=kinds)
    pool = make_pool(shape, batch, rng, "bfloat16")
    plan = jax.jit(partial(plan_write, hidden=True, backend="tpu-interpret"))(pool, batch)
    other = dataclasses.replace(batch, tables=jnp.zeros_like(batch.tables))
    k, v, x = (vectors(shape, 2, rng, np.float32) for _ in range(3))
    got = put("tpu-interpret", pool, jnp.int32(1), k, v, other, x=x, plan=plan)
    same(got, reference.write(pool, 1, k, v, x, batch))


@pytest.mark.parametrize("contexts", [[1, 150, 9, 40, 33, 160], [160, 1, 1], [7, 0, 0]])
def test_two_cores_absorb_about_as_much_context(contexts: list[int]) -> None:
    """Rows are cut between them, never within one; a core without any has one that does not count
    to look at."""
    shape = Shape(2, 2, head_dim=64, rows=8, width=10, tokens=8)
    rows = [(context, 1) for context in contexts if context]
    rng, kinds = np.random.default_rng(0), [HIDDEN] * len(rows)
    batch = make_batch(shape, rows, [LEFT] * len(rows), len(rows), rng, kinds=kinds)
    pool = jnp.zeros((1, shape.blocks, 2, shape.block_size, 64))
    plan = jax.jit(partial(plan_absorbed, num_heads=2, backend="tpu-interpret"))(pool, batch)
    items = np.asarray(plan.rows.work.items)[:, : len(rows)]
    chunks = (items[END] - items[BEGIN]).tolist()
    of_rows, of_chunks = (np.asarray(shares.cuts) for shares in (plan.rows, plan.chunks))
    assert of_rows[0] == 0 and of_rows[-1] == len(rows)
    assert of_chunks.tolist() == [sum(chunks[:cut]) for cut in of_rows]
    sums = np.diff(of_chunks)
    assert sums.max() <= sums.mean() + max(chunks) / 2
    assert [plan.rows.steps, plan.chunks.steps] == [np.diff(of_rows).max(), sums.max()]
    for shares in (plan.rows, plan.chunks):
        last = int(shares.work.items[0, -1])
        assert last >= len(rows), "the row of the last item counts"
