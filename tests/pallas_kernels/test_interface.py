"""What the interface refuses, by name and limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    BACKENDS,
    HIDDEN,
    KV,
    KernelShape,
    absorbed_attention,
    backends,
    block_bytes,
    get_backend,
    make_pool,
    move_slots,
    paged_attention,
    projected_attention,
    read_tokens,
    resolve_backend,
    select_backend,
    stage_in,
    stage_out,
    write,
)
from jaxserve.pallas_kernels.backends import deterministic_backend
from jaxserve.pallas_kernels.gpu_mosaic.common import missing
from jaxserve.pallas_kernels.pool import ScaledPool
from tests.pallas_kernels.batches import Shape, make_batch, make_projection, vectors

SHAPE = Shape(num_heads=4, kv_heads=2)
RNG = np.random.default_rng(0)
BATCH = make_batch(SHAPE, [(3, 1)], [0], 1, RNG)
POOL = make_pool(2, SHAPE.blocks, 2, SHAPE.block_size, SHAPE.head_dim, jnp.float32)
Q, K = (jnp.asarray(vectors(SHAPE, heads, RNG, np.float32)) for heads in (4, 2))
QX = jnp.zeros((5, 4, 32))
PROJECTION = make_projection(SHAPE, RNG, jnp.float32)


def attend(**changes: Any) -> jax.Array:
    given = {"q": Q, "pool": POOL, "layer": 0, "batch": BATCH, "scale": 1.0, "decode_only": True}
    return paged_attention(**{**given, **changes})


def changed(**fields: jax.Array) -> dict[str, Any]:
    return {"batch": dataclasses.replace(BATCH, **fields)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[:, :, :8]}, r"q: want .*\(5, \*, 16\)"),
        ({"q": Q[:4]}, "q: want"),
        ({"q": Q[:, :3]}, "q: 3 heads are not a multiple of the pool's 2"),
        ({"pool": POOL[0]}, "pool: want"),
        ({"pool": POOL.astype(jnp.int32)}, "pool: want a floating dtype"),
        ({"layer": 2}, r"layer: must be in \[0, 2\), got 2"),
        ({"layer": 0.0}, "layer: want an integer"),
        ({"sliding_window": 0}, "sliding_window: must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap: must be positive"),
        ({"sinks": jnp.zeros(3)}, r"sinks: want \[num_heads\] = \(4,\), got \(3,\)"),
        ({"backend": "cuda"}, "backend: must be auto or one of .*xla"),
        ({"mesh": jax.make_mesh((1,), ("data",))}, "mesh: needs an axis 'tensor'"),
        (changed(tables=BATCH.tables[:, 0]), "batch.tables: want"),
        (changed(direction=BATCH.direction[:3]), r"batch.direction: want \[5\]"),
        (changed(kind=BATCH.direction[:3]), r"batch.kind: want \[5\]"),
        (changed(num_rows=BATCH.direction), "batch.num_rows: want a scalar"),
        (changed(token_row=BATCH.token_row.astype(jnp.uint8)), "batch.token_row: want int32"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**changes)


def test_decode_only_needs_a_token_a_row() -> None:
    shape = dataclasses.replace(SHAPE, tokens=8)
    batch = make_batch(shape, [(3, 3)], [0], 0, RNG)
    with pytest.raises(ValueError, match="decode_only: needs as many tokens as rows, got 8 and 5"):
        attend(q=vectors(shape, 4, RNG, jnp.float32), batch=batch)


def test_write_refuses_a_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"v: want .*\(5, 2, 16\), got \(5, 4, 16\)"):
        write(POOL, 0, K, Q, BATCH)
    with pytest.raises(ValueError, match=r"x: want .*\(5, 2, 16\), got \(5, 4, 16\)"):
        write(POOL, 0, K, K, BATCH, x=Q)
    with pytest.raises(ValueError, match="backend: must be"):
        write(POOL, 0, K, K, BATCH, backend="none")


def test_pool() -> None:
    assert block_bytes(12, 12, 16, 64, jnp.bfloat16) == 12 * 12 * 16 * 64 * 2
    # A TPU's tiles are of 8 slots by 128 elements.
    assert block_bytes(12, 12, 16, 64, jnp.bfloat16, "tpu") == 12 * 12 * 16 * 128 * 2
    assert block_bytes(12, 12, 16, 128, jnp.bfloat16, "tpu") == 12 * 12 * 16 * 128 * 2
    with pytest.raises(ValueError, match="num_blocks: must be at least 1, got 0"):
        make_pool(1, 0, 1, 1, 1, jnp.float32)
    # And of int8 a scale a slot and head, in tiles of their own.
    assert block_bytes(12, 12, 16, 64, jnp.int8) == 12 * 12 * 16 * (64 + 4)
    assert block_bytes(12, 12, 64, 128, jnp.int8, "tpu") == 12 * (12 * 64 * 128 + 16 * 128 * 4)
    with pytest.raises(ValueError, match=r"dtype: must be one of .*float16.*, got int16"):
        make_pool(1, 1, 1, 1, 1, jnp.int16)
    alone = make_pool(1, 1, 1, 1, 1, jnp.int8).values
    with pytest.raises(ValueError, match=r"pool: want a floating dtype, or int8 with scales, got"):
        move_slots(alone, jnp.zeros((1, 4), jnp.int32), 0)
    with pytest.raises(ValueError, match=r"pool.scales: want float32 \[1, 1, 1, 1\], got int8"):
        move_slots(ScaledPool(alone, alone), jnp.zeros((1, 4), jnp.int32), 0)
    table = np.arange(2)
    with pytest.raises(ValueError, match=r"length: must be in \[0, 16\]"):
        read_tokens(POOL, 0, table, 17, 0)
    with pytest.raises(ValueError, match="direction: must be LEFT"):
        read_tokens(POOL, 0, table, 1, 2)
    with pytest.raises(ValueError, match=r"table_row: block ids must be in"):
        read_tokens(POOL, 0, table - 1, 16, 0)
    assert read_tokens(POOL, 0, table, 0, 0).shape == (0, 2, 16)


def test_auto_is_a_backend() -> None:
    assert resolve_backend("auto") == "numba"


@pytest.mark.slow
def test_what_auto_attends_is_what_its_backend_does() -> None:
    np.testing.assert_array_equal(attend(backend="auto"), attend(backend="numba"))


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str
    compute_capability: str = ""
    device_kind: str = "device"


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        (Device("gpu", "8.0"), "triton"),
        (Device("gpu", "9.0"), "triton"),
        (Device("gpu", "10.0"), "triton"),
        (Device("gpu", "7.5"), "xla"),
        (Device("tpu"), "tpu"),
        (Device("cpu"), "numba"),
    ],
)
def test_auto_goes_by_platform(
    monkeypatch: pytest.MonkeyPatch, device: Device, backend: str
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert resolve_backend("auto") == backend


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ("7.5", "triton needs a gpu of compute capability 8.0 or newer, this one has 7.5"),
        ("gfx942", "triton needs a gpu of NVIDIA's, this is a gfx942"),
    ],
)
def test_a_gpu_without_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: str, reason: str
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", capability)])
    assert select_backend("auto", (KV,), MODEL) == ("xla", reason)
    with pytest.raises(ValueError, match=f"backend: {reason}"):
        select_backend("triton", (KV,), MODEL)


MODEL = KernelShape(4, 2, head_dim=64, block_size=16, dtype="float32")


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_are_imported_when_chosen(name: str) -> None:
    needs = missing() if "mosaic" in name else None
    assert get_backend(name).supports(KV, dataclasses.replace(MODEL, dtype="bfloat16")) == needs


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_mosaic_gpu_is_for_hopper_and_only_a_rival(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    half = dataclasses.replace(MODEL, dtype="bfloat16")
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", "9.0")])
    assert select_backend("mosaic-gpu", (KV,), half) == ("mosaic-gpu", None)
    assert select_backend("auto", (KV,), half) == ("triton", None)
    found = backends.rivals("triton", half)
    assert found is not None and set(found.names) <= set(BACKENDS)
    assert all(deterministic_backend(name) for name in found.names)  # by Triton's kernels
    assert backends.rivals("triton", dataclasses.replace(half, sinks=True)) is None
    assert backends.rivals("tpu", half) is None
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", capability)])
    assert backends.rivals("triton", half) is None
    with pytest.raises(ValueError, match=rf"capability 9\.0, this one has {capability}"):
        select_backend("mosaic-gpu", (KV,), half)


def test_a_model_that_the_platforms_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_backend("auto", (KV, HIDDEN), MODEL) == ("numba", None)
    with pytest.raises(ValueError, match="backend: triton needs a gpu, this is a cpu"):
        select_backend("triton", (KV,), MODEL)
    with pytest.raises(ValueError, match="backend: tpu needs a tpu, this is a cpu"):
        select_backend("tpu", (KV,), MODEL)
    of_two_bytes = dataclasses.replace(MODEL, dtype="float16")
    reason = "numba: the pool must be of one of float32, bfloat16, float8_e4m3fn, int8, got float16"
    assert select_backend("auto", (KV,), of_two_bytes) == ("xla", reason)

    def supports(kind: int, _: KernelShape) -> str | None:
        return "head_dim: too odd" if kind == HIDDEN else None

    odd = dataclasses.replace(get_backend("xla"), supports=supports)
    monkeypatch.setattr(jax, "devices", lambda: [Device("gpu", "8.0")])
    monkeypatch.setattr(backends, "get_backend", lambda _: odd)
    assert select_backend("auto", (KV,), MODEL) == ("triton", None)
    assert select_backend("auto", (KV, HIDDEN), MODEL) == (
        "xla",
        "triton: head_dim: too odd",
    )
    with pytest.raises(ValueError, match="triton cannot serve this model: head_dim: too odd"):
        select_backend("triton", (KV, HIDDEN), MODEL)


def test_a_cpu_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = "numba is not installed: pip install numba"
    assert select_backend("auto", (KV,), MODEL) == ("xla", said)
    assert select_backend("xla", (KV,), MODEL) == ("xla", None)
    with pytest.raises(ValueError, match=r"backend: numba is not installed: pip install numba"):
        select_backend("numba", (KV,), MODEL)


def absorb(**changes: Any) -> jax.Array:
    given = {"qx": QX, "pool": POOL, "layer": 0, "batch": BATCH, "scale": 1.0}
    return absorbed_attention(**{**given, **changes})


def project(**changes: Any) -> jax.Array:
    given = {"q": K, "pool": POOL, "layer": 0, "batch": BATCH, "projection": PROJECTION}
    return projected_attention(**{**given, "scale": 1.0, "decode_only": True, **changes})


def weights(**fields: jax.Array) -> dict[str, Any]:
    return {"projection": dataclasses.replace(PROJECTION, **fields)}


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (absorb, {"qx": Q}, r"qx: want .*\(5, \*, 32\)"),
        (absorb, {"soft_cap": -1.0}, "soft_cap: must be positive"),
        (absorb, {"layer": 9}, r"layer: must be in \[0, 2\)"),
        (project, {"q": Q}, "q: 4 heads, but hidden blocks of 2 want as many"),
        (project, {"sliding_window": 0}, "sliding_window: must be at least 1"),
        (project, weights(wk=jnp.zeros((16, 32))), r"projection.wk: want \[32, 32\]"),
        (project, weights(bv=jnp.zeros(16)), r"projection.bv: want \[32\]"),
        (project, weights(k_norm=jnp.zeros(32)), r"projection.k_norm: want \[16\]"),
        (
            project,
            weights(rotation=jnp.zeros((2, 48, 16))),
            r"projection.rotation: want \[2, max_len, 8\]",
        ),
        (
            project,
            weights(rotation=jnp.zeros((2, 48, 8), jnp.bfloat16)),
            "projection.rotation: want float32",
        ),
    ],
)
def test_hidden_attention_refuses(call: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_moves_refuse() -> None:
    moves, slots = jnp.zeros((3, 4), jnp.int32), jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"moves: want int32 \[M, 4\], got int32 \[3, 2\]"):
        move_slots(POOL, slots, 1)
    with pytest.raises(ValueError, match=r"moves: want int32 \[M, 4\], got int16"):
        move_slots(POOL, moves.astype(jnp.int16), 1)
    with pytest.raises(ValueError, match="count: want an integer scalar"):
        stage_out(POOL, slots, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pool: want"):
        stage_out(POOL[0], slots, 1)
    with pytest.raises(ValueError, match=r"staging: want float32 .* = \(3, 2, 2, 16\)"):
        stage_in(POOL, jnp.zeros((2, 2, 2, 16)), slots, 1)
