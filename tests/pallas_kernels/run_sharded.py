"""Run by test_sharded.py in a process of its own, with virtual devices: `run_sharded BACKEND
HEAD_DIM SHARDS:TOKENS ...` compares a step of that many tokens, on that many shards, with one of
XLA's on a single device."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels import (
    HIDDEN,
    KV,
    LEFT,
    RIGHT,
    absorbed_attention,
    make_pool,
    move_slots,
    paged_attention,
    projected_attention,
    stage_in,
    stage_out,
    write,
)
from tests.pallas_kernels.batches import Shape, make_batch, make_projection, vectors
from tests.pallas_kernels.conformance import wide

HEADS = 4
MOVES = [[0, 1, 2, 3], [1, 0, 3, 7], [9, 9, 9, 9]]  # the last one is not made


def step(shape: Shape, mesh: Mesh | None, backend: str) -> tuple[dict[str, np.ndarray], jax.Array]:
    """Write and attend in two scanned layers under jit, then move slots: (results by name, the
    pool as it lies)."""
    rng = np.random.default_rng(0)
    rows = [(9, 1), (1, 1), (41, 1)] if shape.tokens == shape.rows else [(42, 1), (8, 8), (20, 13)]
    kinds = [HIDDEN, KV, HIDDEN]
    decodes = sum(length == 1 for _, length in rows)
    batch = make_batch(shape, rows, [LEFT, RIGHT, RIGHT], decodes, rng, kinds=kinds)
    q, k, v, x = (jnp.asarray(vectors(shape, HEADS, rng, np.float32)) for _ in range(4))
    qx = jnp.asarray(vectors(wide(shape), HEADS, rng, np.float32))
    projection = make_projection(shape, rng, jnp.float32, bias=True, norm=True, rotary=True)
    sharding = None if mesh is None else NamedSharding(mesh, P(None, None, "tensor"))
    pool = make_pool(2, shape.blocks, HEADS, shape.block_size, shape.head_dim, q.dtype, sharding)
    place = {"backend": backend, "mesh": mesh}
    only = {"decode_only": shape.tokens == shape.rows, "scale": 0.3, **place}

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pool: jax.Array, q: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def layer(pool: jax.Array, i: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            pool = write(pool, i, k + i, v, batch, x=x, **place)
            out = paged_attention(q, pool, i, batch, **only)
            out += projected_attention(q, pool, i, batch, projection, **only)
            # A cap tells scores that were summed over shards from sums of capped ones.
            mixed = absorbed_attention(qx, pool, i, batch, scale=0.1, soft_cap=2.0, **place)
            return pool, {"out": out, "mixed": mixed}

        pool, found = jax.lax.scan(layer, pool, jnp.arange(2))
        moves = jnp.asarray(MOVES, jnp.int32)
        pool = move_slots(pool, moves, 2, **place)
        staged = stage_out(pool, moves[:, :2], 2, **place)
        pool = stage_in(pool, staged * 2, moves[:, :2], 2, **place)
        return pool, {**found, "staged": staged}

    pool, found = run(pool, q)
    return {name: np.asarray(a) for name, a in {**found, "pool": pool}.items()}, pool


def refuse(mesh: Mesh) -> None:
    """Print what is said about heads that do not divide over the mesh."""
    shape = Shape(8, 4, rows=1, tokens=1, width=1)
    rng = np.random.default_rng(0)
    batch = make_batch(shape, [(1, 1)], [0], 1, rng)
    pool = make_pool(1, shape.blocks, 4, shape.block_size, shape.head_dim, jnp.float32)
    q, k = (vectors(shape, heads, rng, np.float32) for heads in (8, 4))
    for call in (
        lambda: write(pool, 0, k, k, batch, mesh=mesh),
        lambda: paged_attention(q, pool, 0, batch, scale=1.0, decode_only=True, mesh=mesh),
        lambda: move_slots(pool, jnp.zeros((1, 4), jnp.int32), 1, mesh=mesh),
    ):
        try:
            call()
        except ValueError as error:
            print(error)


def main(backend: str, head_dim: int, pairs: list[tuple[int, int]]) -> None:
    """pairs: (shards, tokens) of each comparison. AssertionError for a difference."""
    for shards, tokens in pairs:
        shape = Shape(HEADS, HEADS, head_dim=head_dim, rows=4, width=6, tokens=tokens)
        want, _ = step(shape, None, "xla")
        mesh = Mesh(np.array(jax.devices()[:shards]), ("tensor",))
        found, pool = step(shape, mesh, backend)
        for name, value in want.items():
            scale = np.abs(value).max()
            np.testing.assert_allclose(found[name], value, atol=1e-5 * scale, err_msg=name)
        assert pool.addressable_shards[0].data.shape[2] == HEADS // shards
    refuse(Mesh(np.array(jax.devices()[:3]), ("tensor",)))


if __name__ == "__main__":
    given = [pair.split(":") for pair in sys.argv[3:]]
    main(sys.argv[1], int(sys.argv[2]), [(int(shards), int(tokens)) for shards, tokens in given])
