"""The Triton backend's tuned sizes, its limits, and that its kernels lower for real models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    AttentionBatch,
    HiddenProjection,
    KernelShape,
    absorbed_attention,
    paged_attention,
    projected_attention,
)
from jaxserve.pallas_kernels.gpu_triton import tuning
from jaxserve.pallas_kernels.gpu_triton.backend import BACKEND
from jaxserve.pallas_kernels.gpu_triton.common import Geometry
from jaxserve.pallas_kernels.gpu_triton.tiles import query_tiles
from jaxserve_lab.compile_check.analysis import indices
from jaxserve_lab.compile_check.analysis.indices import narrow_indices

# Pools of 6 and 9 GiB, which 32 bits do not reach to the end of.
OPT_13B = Geometry(40, 1024, 40, 16, 128)
LLAMA_3_8B = Geometry(32, 9216, 8, 16, 128)
ROWS, WIDTH, TOKENS = 64, 128, 512


def test_every_size_is_a_power_of_two() -> None:
    for kernel, entries in tuning._TABLE.items():
        for key, launch in entries.items():
            sizes = (launch.tile, launch.queries, launch.warps, launch.chunk)
            assert all(size & (size - 1) == 0 for size in sizes), (kernel, key)
            assert launch.tile >= 16 and launch.queries >= 16 and launch.stages >= 1, (kernel, key)


def test_sizes_by_capability() -> None:
    for gpu in (tuning.A100, tuning.H100, tuning.Gpu(86, 84), tuning.Gpu(100, 148)):
        with tuning.compiling_for(gpu):
            for kernel in tuning._TABLE:
                for itemsize in (1, 2, 4):
                    for head_dim in (64, 128, 256):
                        assert tuning.launch(kernel, itemsize, head_dim).tile
    table = tuning._TABLE["decode"]
    with tuning.compiling_for(tuning.A100):
        assert tuning.launch("decode", 2, 128) == table[80, 2, 0]
    with tuning.compiling_for(tuning.H100):
        assert tuning.launch("decode", 2, 128) == table[90, 2, 0]
        assert tuning.launch("decode", 4, 256) == table[80, 4, 256]
        assert tuning.launch("decode", 1, 256) == table[90, 1, 256]


def test_shares_fill_the_gpu() -> None:
    launch = tuning.Launch(32, resident=4)
    with tuning.compiling_for(tuning.A100):
        assert tuning.cutting(launch, 1) == tuning.Cutting(1, 2, 432, 1)
        assert tuning.cutting(launch, 100).programs == 50
        assert tuning.cutting(launch, 10**5).programs == 432
        assert tuning.cutting(launch, 10**5, tokens=512) == tuning.Cutting(6250, 2, 432, 16)
        assert tuning.cutting(launch, 100, least=1) == tuning.Cutting(100, 1, 432, 100)


def test_gpus_with_less_shared_memory_get_less_to_hold() -> None:
    for kernel in tuning._TABLE:
        with tuning.compiling_for(tuning.A100):
            large = tuning.launch(kernel, 2, 128)
        with tuning.compiling_for(tuning.Gpu(89, 142)):
            small = tuning.launch(kernel, 2, 128)
        assert small.tile <= large.tile and small.stages <= 2, kernel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": jnp.int16}, "dtype: must be one of"),
        ({"head_dim": 512}, "head_dim: must be a multiple of 8 up to 256, got 512"),
        ({"head_dim": 60}, "head_dim: must be a multiple of 8 up to 256, got 60"),
        ({"kind": HIDDEN, "num_heads": 160, "kv_heads": 160}, "num_heads: must be at most 128"),
        ({"num_heads": 512, "kv_heads": 2}, "num_heads: must be at most 128 a kv head, got 256"),
    ],
)
def test_supports_says_why_not(change: dict[str, Any], message: str) -> None:
    shape = KernelShape(40, 40, head_dim=128, block_size=16, dtype=jnp.bfloat16)
    assert BACKEND.supports(KV, shape) is None
    kind, fields = change.get("kind", KV), {n: v for n, v in change.items() if n != "kind"}
    assert message in (BACKEND.supports(kind, dataclasses.replace(shape, **fields)) or "")


def test_query_tiles_cover_every_query_once() -> None:
    lengths = np.array([0, 5, 16, 0, 17, 1], np.int32)
    tiles = query_tiles(jnp.asarray(lengths), 40, 8)
    covered = [
        (int(row), query)
        for row, first in zip(*tiles, strict=True)
        if row < len(lengths)
        for query in range(int(first), min(int(first) + 8, lengths[row]))
    ]
    assert covered == [(row, q) for row, length in enumerate(lengths) for q in range(length)]


def abstract_batch(tokens: int) -> AttentionBatch:
    shapes = {
        "tables": (ROWS, 2, WIDTH),
        "token_row": (tokens,),
        "num_decodes": (),
        "num_rows": (),
    }
    return AttentionBatch(
        **{
            field.name: jax.ShapeDtypeStruct(shapes.get(field.name, (ROWS,)), jnp.int32)
            for field in dataclasses.fields(AttentionBatch)
            if not field.metadata.get("static")
        }
    )


def lower(call: Callable[..., Any], geometry: Geometry, *arguments: Any) -> str:
    """The program with its Triton kernels, as text. They index the pool in 64 bits."""
    pool = jax.ShapeDtypeStruct(geometry[:5], jnp.bfloat16)
    lowered = jax.jit(call).trace(pool, *arguments).lower(lowering_platforms=("cuda",))
    assert pool.size > 2**31 and narrow_indices(lowered) == []
    return lowered.as_text()


def kernels_in(text: str) -> int:
    return text.count("@__gpu$xla.gpu.triton(")


IN_PLACE = "output_operand_aliases = [#stablehlo"


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


LAYER = jax.ShapeDtypeStruct((), jnp.int32)
OPTIONS: dict[str, Any] = {"scale": 0.1, "backend": "triton"}


def skip_without_compiler() -> None:
    """Newer jaxlibs compile Triton code while lowering, with the CUDA plugin that CPU machines do
    not have; there `jaxserve compile-check` does all of this."""
    if tuple(int(part) for part in jax.lib.__version__.split(".")[:3]) > (0, 10, 2):
        pytest.skip("this jaxlib lowers Triton kernels only with its CUDA plugin")


@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(OPT_13B, id="opt-13b"),
        pytest.param(LLAMA_3_8B, id="llama-3-8b", marks=pytest.mark.slow),
    ],
)
def test_attention_and_writes_lower(geometry: Geometry) -> None:
    skip_without_compiler()
    heads = 40 if geometry is OPT_13B else 32
    kv_heads = geometry.kv_heads
    for tokens, kernels in ((ROWS, 2), (TOKENS, 4)):
        q, batch = array(tokens, heads, 128), abstract_batch(tokens)

        def attend(pool, q, layer, batch, only=tokens == ROWS):  # type: ignore[no-untyped-def]
            return paged_attention(q, pool, layer, batch, decode_only=only, **OPTIONS)

        # Each with one that merges parts.
        assert kernels_in(lower(attend, geometry, q, LAYER, batch)) == kernels
        k = array(tokens, kv_heads, 128)
        text = lower(BACKEND.write, geometry, LAYER, k, k, k, batch)
        assert kernels_in(text) == 1 and IN_PLACE in text


def test_hidden_attention_lowers() -> None:
    skip_without_compiler()
    width = 40 * 128
    batch = abstract_batch(ROWS)

    def absorbed(pool, qx, layer, batch):  # type: ignore[no-untyped-def]
        return absorbed_attention(qx, pool, layer, batch, **OPTIONS)

    text = lower(absorbed, OPT_13B, array(ROWS, 40, width), LAYER, batch)
    assert kernels_in(text) == 3
    projection = HiddenProjection(
        wk=array(width, width),
        wv=array(width, width),
        bk=array(width),
        bv=array(width),
        k_norm=jax.ShapeDtypeStruct((128,), jnp.float32),
        rotation=jax.ShapeDtypeStruct((2, 2048, 64), jnp.float32),
    )

    def projected(pool, q, layer, batch, projection):  # type: ignore[no-untyped-def]
        given = (q, pool, layer, batch, projection)
        return projected_attention(*given, decode_only=True, **OPTIONS)

    text = lower(projected, OPT_13B, array(ROWS, 40, 128), LAYER, batch, projection)
    assert kernels_in(text) == 2


def test_an_index_of_32_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pool gets one, which counts once the pool is said to be beyond its reach."""
    skip_without_compiler()
    pool, slots = array(2, 64, 4, 16, 128), jax.ShapeDtypeStruct((8, 2), jnp.int32)
    traced = jax.jit(BACKEND.stage_out).trace(pool, slots, LAYER)
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert narrow_indices(lowered) == []
    monkeypatch.setattr(indices, "_REACH", 1 << 10)
    assert "pool_stage_out: operand 2" in narrow_indices(lowered)  # the pool's


def test_pools_of_8_bits_are_reached_to_their_ends_or_refused() -> None:
    skip_without_compiler()
    slots = jax.ShapeDtypeStruct((8, 2), jnp.int32)

    def indices(geometry: Geometry) -> list[str]:
        pool = jax.ShapeDtypeStruct(geometry[:5], jnp.int8)
        traced = jax.jit(BACKEND.stage_out).trace(pool, slots, LAYER)
        return narrow_indices(traced.lower(lowering_platforms=("cuda",)))

    assert indices(LLAMA_3_8B) == []  # beyond 4 GiB
    assert indices(OPT_13B._replace(blocks=640)) == []  # below 2
    with pytest.raises(ValueError, match="these kernels reach 2147483648, or more than 4294967296"):
        indices(OPT_13B)


def test_moves_lower_to_one_launch_in_place() -> None:
    skip_without_compiler()
    moves = jax.ShapeDtypeStruct((1024, 4), jnp.int32)
    slots = jax.ShapeDtypeStruct((1024, 2), jnp.int32)
    text = lower(BACKEND.move, OPT_13B, moves, LAYER)
    assert kernels_in(text) == 1 and IN_PLACE in text
    assert kernels_in(lower(BACKEND.stage_out, OPT_13B, slots, LAYER)) == 1
    text = lower(BACKEND.stage_in, OPT_13B, array(1024, 40, 40, 128), slots, LAYER)
    assert kernels_in(text) == 1 and IN_PLACE in text
