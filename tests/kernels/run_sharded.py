"""Run by test_sharded.py in a process of its own: 4 virtual devices against one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.pallas_kernels import make_pool, paged_attention, write_kv
from tests.kernels.batches import Shape, make_batch, vectors


def step(mesh: Mesh | None, decode_only: bool) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """Write and attend in two scanned layers under jit: (pool, output, the pool as it lies)."""
    shape = Shape(num_heads=8, kv_heads=4, rows=4, tokens=4 if decode_only else 24)
    rng = np.random.default_rng(0)
    rows = [(9, 1), (1, 1), (33, 1)] if decode_only else [(9, 1), (8, 8), (20, 13)]
    batch = make_batch(shape, rows, [0, 1, 1], 3 if decode_only else 1, rng)
    q, k, v = (vectors(shape, heads, rng, jnp.float32) for heads in (8, 4, 4))
    sharding = None if mesh is None else NamedSharding(mesh, P(None, None, "tensor"))
    pool = make_pool(2, shape.blocks, 4, shape.block_size, shape.head_dim, q.dtype, sharding)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pool: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
            pool, x = carry
            pool = write_kv(pool, i, k + x[:, ::2], v, batch, mesh=mesh)
            x = paged_attention(x, pool, i, batch, scale=0.3, decode_only=decode_only, mesh=mesh)
            return (pool, x), None

        return jax.lax.scan(layer, (pool, q), jnp.arange(2))[0]

    pool, out = run(pool, q)
    return np.asarray(pool), np.asarray(out), pool


def refuse(mesh: Mesh) -> None:
    """Print what is said about heads that do not divide over the mesh."""
    shape = Shape(num_heads=8, kv_heads=4, rows=1, tokens=1, width=1)
    rng = np.random.default_rng(0)
    batch = make_batch(shape, [(1, 1)], [0], 1, rng)
    pool = make_pool(1, shape.blocks, 4, shape.block_size, shape.head_dim, jnp.float32)
    q, k = (vectors(shape, heads, rng, jnp.float32) for heads in (8, 4))
    for call in (
        lambda: write_kv(pool, 0, k, k, batch, mesh=mesh),
        lambda: paged_attention(q, pool, 0, batch, scale=1.0, decode_only=True, mesh=mesh),
    ):
        try:
            call()
        except ValueError as error:
            print(error)


def main() -> None:
    for decode_only in (True, False):
        pool, out, _ = step(None, decode_only)
        for shards in (1, 2, 4):
            mesh = Mesh(np.array(jax.devices()[:shards]), ("tensor",))
            sharded_pool, sharded_out, placed = step(mesh, decode_only)
            np.testing.assert_allclose(sharded_pool, pool, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(sharded_out, out, rtol=1e-5, atol=1e-6)
            assert placed.addressable_shards[0].data.shape[2] == 4 // shards
    refuse(Mesh(np.array(jax.devices()[:3]), ("tensor",)))


if __name__ == "__main__":
    main()
