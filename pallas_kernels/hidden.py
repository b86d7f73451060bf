"""How cached hidden vectors become keys and values (Apt-Serve section 4.2)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.pallas_kernels.rowwise.fixed_batches import in_fixed_batches
from jaxserve.pallas_kernels.rowwise.norm import rms_norm
from jaxserve.pallas_kernels.rowwise.rotary import rotate
from jaxserve.pallas_kernels.skinny_matmul import has_skinny_matmul, skinny_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HiddenProjection:
    """One layer's map from a hidden vector x [E] at position p to its K and V.

        K_h = rotate(norm(x @ wk_h + bk_h), p),   V_h = x @ wv_h + bv_h

    E = d_model, N = E // head_dim heads (only multi-head models have hidden caches). Under tensor
    parallelism a shard holds the columns of its own heads: then N is smaller, E is not.

    Attributes:
        wk, wv: [E, N * head_dim], head h in columns [h * head_dim, (h + 1) * head_dim).
        bk, bv: [N * head_dim], or None for no bias.
        k_norm: float32 [head_dim], scale of the RMS norm over each head's K, before the rotation
            (as in Qwen3); None for no norm.
        rotation: float32 [2, max_len, head_dim // 2], cos and sin by position; element i is rotated
            with i + head_dim // 2. max_len is at least the longest context. None for no rotation.
        norm_eps: Added to the mean square; static.
    """

    wk: jax.Array
    wv: jax.Array
    bk: jax.Array | None = None
    bv: jax.Array | None = None
    k_norm: jax.Array | None = None
    rotation: jax.Array | None = None
    norm_eps: float = dataclasses.field(default=1e-6, metadata={"static": True})

    def validate(self, width: int, heads: int, head_dim: int) -> None:
        """Raises ValueError, which names the field, unless this maps [width] to `heads` heads of
        head_dim. Costs nothing at run time: shapes are static."""
        columns = heads * head_dim
        wanted: dict[str, tuple[int, ...]] = {
            "wk": (width, columns),
            "wv": (width, columns),
            "bk": (columns,),
            "bv": (columns,),
            "k_norm": (head_dim,),
        }
        for name, want in wanted.items():
            value = getattr(self, name)
            if value is not None and value.shape != want:
                raise ValueError(f"projection.{name}: want {list(want)}, got {value.shape}")
        for name in ("k_norm", "rotation"):
            value = getattr(self, name)
            if value is not None and value.dtype != jnp.float32:
                raise ValueError(f"projection.{name}: want float32, got {value.dtype}")
        if self.rotation is None:
            return
        shape = self.rotation.shape
        if len(shape) != 3 or shape[0] != 2 or shape[2] * 2 != head_dim:
            raise ValueError(
                f"projection.rotation: want [2, max_len, {head_dim // 2}], got {shape}"
            )


def project(
    x: jax.Array, position: jax.Array, projection: HiddenProjection, heads: int
) -> tuple[jax.Array, jax.Array]:
    """Projects hidden vectors to K and V.

    Args:
        x: [S, E].
        position: int32 [S].
        projection: The layer's map.
        heads: Heads that the projection has columns for.

    Returns:
        K and V, float32 [heads, S, D].
    """

    def by_head(weights: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = _product(x.astype(weights.dtype), weights)
        y = y if bias is None else y + bias.astype(jnp.float32)
        return y.reshape(len(x), heads, -1)

    k, v = by_head(projection.wk, projection.bk), by_head(projection.wv, projection.bv)
    if projection.k_norm is not None:
        k = rms_norm(k, projection.k_norm, projection.norm_eps)
    if projection.rotation is not None:
        cos, sin = projection.rotation.at[:, position].get(mode="clip")
        k = rotate(k, cos[:, None], sin[:, None])
    return k.transpose(1, 0, 2), v.transpose(1, 0, 2)


def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x [S, E] @ weights [E, N] -> float32 [S, N], as in the steps of models."""
    if has_skinny_matmul(len(x), weights, transposed=False):
        return skinny_matmul(x, weights, False)

    def product(x: jax.Array) -> jax.Array:
        return jnp.dot(x, weights, preferred_element_type=jnp.float32)

    return in_fixed_batches(product, x)
