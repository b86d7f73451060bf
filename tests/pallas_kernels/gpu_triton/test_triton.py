"""What is only Triton's: work in equal shares, whoever takes which, and what its tests count on."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels import KV, LEFT, RIGHT, plan_absorbed, plan_attention
from jaxserve.pallas_kernels.backends import Scoring
from jaxserve.pallas_kernels.gpu_triton import absorbed, decode, merge, tuning
from jaxserve.pallas_kernels.gpu_triton.common import Geometry
from tests.pallas_kernels import edges
from tests.pallas_kernels.batches import Shape, make_batch, tokens_of
from tests.pallas_kernels.cases import Case
from tests.pallas_kernels.conformance import ABSORBED, ATTENTION, PAGED, Attention, close

BACKEND = "triton-interpret"
# Five tiles of context for decodes and chunks, ten for projections; a head_dim that is padded.
DECODES = Case("decodes", Shape(6, 2, head_dim=40, rows=3, width=20, tokens=3), parts=("rotary",))
CHUNKS = Case(
    "chunks", dataclasses.replace(DECODES.shape, rows=4, tokens=40), window=50, sinks=True
)
WHICH = [
    pytest.param(attention, case, id=f"{attention.name}-{case.name}")
    for attention in ATTENTION
    for case in (DECODES, CHUNKS)
    if attention is not ABSORBED or case is DECODES  # chunks are never absorbed
]
CUTS = {
    # Some tiles a program, which begin and end anywhere; one tile each; all tiles in one program.
    "three-tiles": lambda tiles: tuning.Cutting(-(-tiles // 3), 3, 1, 3),
    "one-tile": lambda tiles: tuning.Cutting(tiles, 1, 1, 1),
    "one-program": lambda tiles: tuning.Cutting(1, 1, 1, tiles),
}
CUT = [
    pytest.param(*which.values, shares, id=f"{which.id}-{shares}")
    for number, which in enumerate(WHICH)
    for shares in ("three-tiles", ("one-tile", "one-program")[number % 2])
]


def mostly_slow(found: list[ParameterSet], *kept: str) -> list[ParameterSet]:
    """Those that end so, and the others where there is time."""
    return [
        one
        if str(one.id).endswith(kept)
        else pytest.param(*one.values, id=one.id, marks=pytest.mark.slow)
        for one in found
    ]


def test_what_a_kernel_does_not_write_is_nan_here() -> None:
    """All tests here count on it: outputs are poisoned before the kernel runs."""

    def half(out_ref: jax.Array) -> None:
        out_ref[0] = 1.0

    out = pl.pallas_call(half, out_shape=jax.ShapeDtypeStruct((2,), jnp.float32), interpret=True)()
    assert out[0] == 1 and np.isnan(out[1])


def run_of(attention: Attention, case: Case):  # type: ignore[no-untyped-def]
    """The function by this backend, traced anew: how work is cut may have changed since."""
    options = attention.step_options(case)

    def run(*arguments):  # type: ignore[no-untyped-def]
        return attention.function(*arguments, backend=BACKEND, **options)

    return jax.jit(run)


@pytest.mark.parametrize(("attention", "case", "shares"), mostly_slow(CUT, "three-tiles"))
def test_however_work_is_cut_the_result_is_the_same(
    attention: Attention, case: Case, shares: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "cutting", lambda launch, tiles, **_: CUTS[shares](tiles))
    monkeypatch.setattr(merge, "TOGETHER", 4)  # parts of one context merge in several turns
    monkeypatch.setattr(absorbed, "MAX_SLICE", case.shape.head_dim // 2)
    run = run_of(attention, case)
    for edge in edges.edges_of(case):
        attention.check_run(run, case, edge(case.shape, attention.kind), 1)


def test_decodes_leave_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's other tokens: those of chunks are left to the kernel for chunks, which writes all
    of them; for those of nobody there are zeros."""
    monkeypatch.setattr(tuning, "cutting", lambda launch, tiles, **_: CUTS["three-tiles"](tiles))
    case = Case("whole", Shape(6, 2, rows=4, width=12, tokens=30))
    batch = edges.chunks_between_others(case.shape, KV)
    queries, pool, layer, _ = PAGED.arguments(case, batch, 1)
    masks = {"sliding_window": None, "decode_only": False}
    plan = decode.plan(batch, Geometry(*pool.shape), 4, **masks)
    scoring = Scoring(**PAGED.options(case))
    options = {"scoring": scoring, "decode_only": False, "interpret": True}
    got = decode.paged_decode(queries, jnp.asarray(pool), layer, batch, plan, **options)
    want = PAGED.reference(queries, pool, int(layer), batch, **PAGED.options(case))
    decodes = tokens_of(batch, KV, decodes=True)
    chunks = tokens_of(batch, KV) & ~decodes
    assert decodes.any() and chunks.any() and not tokens_of(batch, KV).all()
    assert np.isnan(np.asarray(got)[chunks]).all()
    want[~decodes] = 0
    close(jnp.where(chunks[:, None, None], 0, got), want, decodes, case)


@pytest.mark.parametrize(
    ("attention", "head_dim"),
    mostly_slow(
        [
            pytest.param(one, size, id=one.name)
            for one, size in zip(ATTENTION, (80, 96, 80), strict=True)
        ],
        PAGED.name,
    ),
)
def test_one_long_context_among_short_ones(attention: Attention, head_dim: int) -> None:
    """Decodes and chunks of both kinds, with as many programs as the sizes have it."""
    shape = Shape(8, 4, head_dim=head_dim, block_size=16, rows=6, width=30, tokens=30)
    rows = [(480, 1), (3, 1), (17, 1), (1, 1), (21, 20), (40, 5)]
    kinds = [attention.kind] * 3 + [1 - attention.kind] + [attention.kind] * 2
    rng = np.random.default_rng(0)
    batch = make_batch(shape, rows, [LEFT, RIGHT] * 3, 4, rng, kinds=kinds)
    case = Case("mixed", shape, "bfloat16", parts=("norm",))
    attention.check_run(run_of(attention, case), case, batch, 3)


@pytest.mark.parametrize(
    ("tokens", "kernels", "window"),
    [
        (50, [{1, 2, 3}, {4, 5}], None),
        pytest.param(46, [{1, 2, 3, 4, 5}], 50, marks=pytest.mark.slow),
    ],
)
def test_rows_with_drafts_beside_decodes_and_chunks(
    tokens: int, kernels: list[set[int]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a kernel of their own, or share one where there is little room; wherever work is
    cut."""
    monkeypatch.setattr(tuning, "cutting", lambda launch, tiles, **_: CUTS["three-tiles"](tiles))
    shape = dataclasses.replace(CHUNKS.shape, rows=6, tokens=tokens)
    rows = [(150, 1), (155, 2), (9, 8), (33, 3), (90, 9), (60, 21)]
    rng = np.random.default_rng(0)
    batch = make_batch(shape, rows, [LEFT, RIGHT] * 3, 1, rng)
    batch = dataclasses.replace(batch, drafts=True)
    case = dataclasses.replace(CHUNKS, shape=shape, window=window)
    plan = plan_attention(
        PAGED.arguments(case, batch, 1)[1],
        batch,
        shape.num_heads,
        sliding_window=window,
        decode_only=False,
        backend=BACKEND,
    )
    assert [set(np.asarray(work.tiles.row).tolist()) - {6} for work in plan.chunks] == kernels
    PAGED.check_run(run_of(PAGED, case), case, batch, 1)


@pytest.mark.parametrize(("attention", "case"), [(PAGED, CHUNKS), (ABSORBED, DECODES)])
def test_a_plan_made_once_serves_every_layer(attention: Attention, case: Case) -> None:
    """It depends on the batch alone; the function would make the same."""
    batch = edges.edges_of(case)[3](case.shape, attention.kind)
    queries, pool, _, *rest = attention.arguments(case, batch, 1)
    given = {"sliding_window": case.window, "backend": BACKEND}
    if attention is ABSORBED:
        plans = functools.partial(plan_absorbed, num_heads=queries.shape[1], **given)
    else:
        given |= {"kind": attention.kind, "decode_only": case.shape.decode_only}
        plans = functools.partial(plan_attention, num_heads=queries.shape[1], **given)
    plan = jax.jit(plans)(pool, batch)
    options = attention.step_options(case) | {"backend": BACKEND}
    planned = jax.jit(lambda plan, *given: attention.function(*given, plan=plan, **options))
    alone = jax.jit(lambda *given: attention.function(*given, **options))
    for index in range(case.shape.layers):
        arguments = (queries, pool, jnp.int32(index), *rest)
        np.testing.assert_array_equal(planned(plan, *arguments), alone(*arguments))


@pytest.mark.parametrize(
    "attention", mostly_slow([pytest.param(one, id=one.name) for one in ATTENTION], PAGED.name)
)
def test_float16_near_the_end_of_its_range(attention: Attention) -> None:
    """Keys and values are; products of queries and keys are far outside: float32 has them."""
    case = Case("range", Shape(2, 2, head_dim=96, rows=4, width=8, tokens=4), "float16")
    batch = edges.edges_of_blocks(case.shape, attention.kind)
    queries, pool, layer, *rest = attention.arguments(case, batch, 1)
    big = np.float16(2.0**13)  # of what is drawn nothing is above 5
    queries, pool = queries * np.float16(8), pool * big
    scale = case.scale / (8 * float(big))
    want = attention.reference(queries, pool, int(layer), *rest, scale=scale)
    assert np.abs(want).max() > 2.0**14
    options = attention.step_options(case) | {"scale": scale, "backend": BACKEND}
    got = attention.function(queries, pool, layer, *rest, **options)
    assert np.linalg.norm(got - want) <= case.limit * np.linalg.norm(want)
