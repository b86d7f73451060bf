"""What is only Triton's: contexts split into parts, and what its tests count on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels import KV
from jaxserve.pallas_kernels.triton_decode import paged_decode
from jaxserve.pallas_kernels.triton_projected import projected
from tests.kernels import edges
from tests.kernels.batches import Shape, tokens_of
from tests.kernels.cases import Case
from tests.kernels.conformance import PAGED, PROJECTED, Attention, close

# Five tiles of context for decodes, ten for projections; a head_dim that is padded.
CASE = Case("split", Shape(6, 2, head_dim=40, rows=3, width=20, tokens=3), parts=("rotary",))
KERNELS = {PAGED: paged_decode, PROJECTED: projected}


def test_what_a_kernel_does_not_write_is_nan_here() -> None:
    """All tests here count on it: outputs are poisoned before the kernel runs."""

    def half(out_ref: jax.Array) -> None:
        out_ref[0] = 1.0

    out = pl.pallas_call(half, out_shape=jax.ShapeDtypeStruct((2,), jnp.float32), interpret=True)()
    assert out[0] == 1 and np.isnan(out[1])


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("attention", KERNELS, ids=lambda attention: attention.name)
def test_contexts_in_one_part_and_in_more_than_there_are_tiles(
    attention: Attention, splits: int
) -> None:
    options = {"decode_only": True, "splits": splits, "interpret": True}
    kernel = functools.partial(KERNELS[attention], **attention.options(CASE), **options)
    run = jax.jit(kernel)
    for edge in edges.edges_of(CASE):
        attention.check_run(run, CASE, edge(CASE.shape, attention.kind), 1)


@pytest.mark.parametrize("splits", [1, 8])
def test_decodes_beside_chunks(splits: int) -> None:
    """A batch's other tokens: those of chunks are left to the kernel for chunks, which writes all
    of them; for those of nobody there are zeros."""
    case = Case("whole", Shape(6, 2, rows=4, width=12, tokens=30))
    options = {"decode_only": False, "splits": splits, "interpret": True}
    run = jax.jit(functools.partial(paged_decode, **PAGED.options(case), **options))
    batch = edges.chunks_between_others(case.shape, KV)
    queries, pool, layer, _ = given = PAGED.arguments(case, batch, 1)
    want = PAGED.reference(queries, pool, int(layer), batch, **PAGED.options(case))
    decodes = tokens_of(batch, KV, decodes=True)
    chunks = tokens_of(batch, KV) & ~decodes
    assert decodes.any() and chunks.any() and not tokens_of(batch, KV).all()
    got = run(*given)
    assert np.isnan(np.asarray(got)[chunks]).all()
    want[~decodes] = 0
    close(jnp.where(chunks[:, None, None], 0, got), want, decodes, case)
