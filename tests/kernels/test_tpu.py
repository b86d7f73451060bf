"""What is only the TPU's: a fallback for little VMEM, and what its kernels do not take."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import KV, LEFT, get_backend, tuned_tpu
from tests.kernels import edges
from tests.kernels.batches import Shape, make_batch
from tests.kernels.cases import Case
from tests.kernels.conformance import ABSORBED, PAGED, call
from tests.kernels.edges import Edge

TPU = get_backend("tpu-interpret")
NARROW = Shape(2, 2, head_dim=64, rows=4, width=6, tokens=24)
TWO_PASSES = Case("two-passes", NARROW, window=13, cap=2.0)


@pytest.mark.parametrize(
    "edge", [edges.between_others, edges.edges_of_blocks, edges.far, edges.chunks_between_others]
)
def test_absorbed_in_two_passes_where_vmem_is_small(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(tuned_tpu.INTERPRET, vmem=1 << 10)
    monkeypatch.setattr(tuned_tpu, "INTERPRET", small)
    ABSORBED.check("tpu-interpret", TWO_PASSES, edge(NARROW, ABSORBED.kind), 2)


def test_what_the_kernels_take() -> None:
    shape = {"num_heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16, "dtype": "bfloat16"}
    assert TPU.supports(KV, **shape) is None
    for change, reason in (
        ({"dtype": "float16"}, "dtype float16"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"block_size": 12}, "block_size 12"),
        ({"kv_heads": 3}, "num_heads 8"),
    ):
        assert reason in str(TPU.supports(KV, **{**shape, **change}))


def test_tables_that_scalar_memory_cannot_hold() -> None:
    case = Case("wide-tables", Shape(3, 1, head_dim=128, rows=4, tokens=4))
    shape = case.shape
    batch = make_batch(shape, [(5, 1)], [LEFT], 1, np.random.default_rng(0))
    batch = dataclasses.replace(batch, tables=jnp.zeros((shape.rows, 2, 40_000), jnp.int32))
    pool = jnp.zeros((1, 3, 1, shape.block_size, shape.head_dim))
    q = jnp.zeros((shape.tokens, 3, shape.head_dim))
    with pytest.raises(ValueError, match="scalar memory"):
        call(PAGED, "tpu-interpret", case, q, pool, jnp.int32(0), batch)
