"""Decodes and prompts on Mosaic GPU, interpreted: shared memory, barriers and copies are simulated
one by one, what nobody has written there is NaN, and a race between them is an error."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.pallas_kernels import HIDDEN, KV, KernelShape, get_backend, plan_attention
from jaxserve.pallas_kernels.gpu_mosaic import common
from jaxserve.pallas_kernels.gpu_triton import tuning
from jaxserve.pallas_kernels.pool import FLOAT8
from tests.pallas_kernels import edges
from tests.pallas_kernels.batches import Shape
from tests.pallas_kernels.cases import Case
from tests.pallas_kernels.conformance import PAGED

BACKEND = "mosaic-gpu-interpret"
MODEL = KernelShape(8, 2, head_dim=128, block_size=16, dtype="bfloat16")

# Four tiles of context, of two blocks each, or two in a block; groups of no power of two.
PAGES = Case("pages", Shape(6, 2, head_dim=64, block_size=32, width=7, tokens=5), "bfloat16")
LARGE = Case(
    "large-blocks",
    Shape(6, 2, head_dim=128, block_size=128, width=2, tokens=5),
    "float16",
    window=70,
    cap=3.0,
)


NARROW = (
    Case("int8", dataclasses.replace(PAGES.shape, width=4), "bfloat16", cache="int8", window=70),
    Case("float8", dataclasses.replace(PAGES.shape, width=4), "float16", cache=FLOAT8),
)


@pytest.mark.skipif(common.missing() is not None, reason=f"{common.missing()}")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("case", "programs"), [(PAGES, 1), (LARGE, 5), *((case, 2) for case in NARROW)]
)
def test_decodes(case: Case, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a context in one program, and programs that begin inside of one."""
    cutting = tuning.Cutting(programs, 1, programs, 1 << 20)
    monkeypatch.setattr(tuning, "cutting", lambda launch, tiles: cutting)
    options = {**PAGED.options(case), "decode_only": True, "backend": BACKEND}
    run = jax.jit(lambda *given: PAGED.function(*given, **options))
    for edge in edges.edges_of(case):
        PAGED.check_run(run, case, edge(case.shape, KV), 1)


# Two tiles of queries, of which the second has a few for one warpgroup and none for the other; ends
# of contexts inside of a block; blocks past them.
PROMPTS = Case(
    "prompts", Shape(2, 1, head_dim=64, block_size=32, rows=4, width=9, tokens=150), "bfloat16"
)
WIDE_PROMPTS = Case(
    "wide-prompts",
    Shape(2, 2, head_dim=128, block_size=16, rows=4, width=12, tokens=132),
    "float16",
    cap=3.0,
)


@pytest.mark.skipif(common.missing() is not None, reason=f"{common.missing()}")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("case", "programs", "chosen"),
    [
        (PROMPTS, 3, (edges.prompt, edges.any_order, edges.chunks_of_two_owners)),
        (WIDE_PROMPTS, 1, (edges.chunks_between_others,)),
    ],
)
def test_chunks(
    case: Case, programs: int, chosen: tuple[edges.Edge, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that begin inside of a query tile, and one that has all of them."""
    cutting = tuning.Cutting(programs, 1, programs, 1 << 20)
    monkeypatch.setattr(tuning, "cutting", lambda launch, tiles, **more: cutting)
    options = {**PAGED.options(case), "decode_only": False, "backend": BACKEND}
    run = jax.jit(lambda *given: PAGED.function(*given, **options))
    for edge in chosen:
        PAGED.check_run(run, case, edge(case.shape, KV), 1)


@pytest.mark.parametrize(
    ("tokens", "window", "drafts", "ours"),
    [
        (128, None, False, (True,)),
        (64, None, False, (False,)),  # would fill half of a tile
        (128, 33, False, (False,)),
        (512, None, True, (False, True)),  # chunks of a few tokens, longer ones
    ],
)
def test_which_chunks_it_takes(
    tokens: int, window: int | None, drafts: bool, ours: tuple[bool, ...]
) -> None:
    """Triton's kernel has the others: the plan says who, by the tokens of a tile of queries."""
    shape = dataclasses.replace(PROMPTS.shape, tokens=tokens)
    batch = dataclasses.replace(edges.prompt(shape, KV), drafts=drafts)
    pool = jax.ShapeDtypeStruct((1, shape.blocks, 1, 32, 64), "bfloat16")
    options: dict[str, Any] = {"sliding_window": window, "decode_only": False}
    plans = [
        jax.eval_shape(partial(plan_attention, pool, batch, 2, backend=name, **options)).chunks
        for name in (BACKEND, "triton-interpret")
    ]
    sizes = [jax.tree.map(jax.numpy.shape, both) for both in zip(*plans, strict=True)]
    assert tuple(mine != theirs for mine, theirs in sizes) == ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("mosaic-gpu", (True, True)),
        ("mosaic-gpu-decodes", (True, False)),
        ("mosaic-gpu-prompts", (False, True)),
    ],
)
def test_either_kind_of_step_can_be_tritons(name: str, ours: tuple[bool, bool]) -> None:
    shape = dataclasses.replace(PROMPTS.shape, tokens=128)
    pool = jax.ShapeDtypeStruct((1, shape.blocks, 1, 32, 64), "bfloat16")
    steps = (PAGES.shape, True), (shape, False)
    for (sized, decode_only), mine in zip(steps, ours, strict=True):
        batch = (edges.edges_of_blocks if decode_only else edges.prompt)(sized, KV)
        options: dict[str, Any] = {"decode_only": decode_only}
        plans = [
            jax.eval_shape(partial(plan_attention, pool, batch, 2, backend=one, **options))
            for one in (name, "triton")
        ]
        same = jax.tree.map(jax.numpy.shape, plans[0]) == jax.tree.map(jax.numpy.shape, plans[1])
        assert same is not mine


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": "float32"}, "dtype: must be one of .*'bfloat16', 'float16'.*, got float32"),
        ({"head_dim": 96}, r"head_dim: must be one of \(64, 128\), got 96"),
        ({"block_size": 24}, "block_size: must be one of .* or a multiple of 64, got 24"),
        ({"num_heads": 130}, "num_heads: must be at most 64 a kv head, got 65"),
        ({"sinks": True}, "its kernels know no attention sinks"),
    ],
)
def test_a_shape_that_it_does_not_take_is_explained(wrong: dict[str, Any], said: str) -> None:
    reason = get_backend(BACKEND).supports(KV, dataclasses.replace(MODEL, **wrong))
    assert re.fullmatch(said, str(reason))


def test_it_wants_a_jax_that_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    supports = get_backend(BACKEND).supports
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert supports(KV, MODEL) is None
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert str(supports(KV, MODEL)).startswith("jax: must be 0.12 or newer (Python 3.12)")
    assert supports(HIDDEN, MODEL) is None  # by Triton's kernels, as ever


@pytest.mark.parametrize("window", [None, 100])
def test_every_multiprocessor_has_an_equal_share(window: int | None) -> None:
    shape = Shape(4, 2, head_dim=64, block_size=16, rows=8, width=512, tokens=8)
    batch = edges.edges_of_blocks(shape, KV)
    pool = jax.ShapeDtypeStruct((1, shape.blocks, 2, 16, 64), "bfloat16")
    with tuning.compiling_for(tuning.H100):
        shares = plan_attention(
            pool, batch, 4, sliding_window=window, decode_only=True, backend=BACKEND
        )
    lengths = np.asarray(batch.context_lens) * (np.asarray(batch.query_lens) > 0)
    first = 0 if window is None else np.maximum(lengths - window, 0) // common.TILE
    tiles = np.maximum(-(-lengths // common.TILE) - first, 1)  # zeros take one too
    np.testing.assert_array_equal(np.diff(shares.starts), tiles)
    assert shares.first.shape == (tuning.H100.processors,)
    assert shares.size[0] == max(2, -(-2 * tiles.sum() // tuning.H100.processors))
