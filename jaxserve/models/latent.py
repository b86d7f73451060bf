"""Latent projections of one layer's attention (multi-head latent attention, DeepSeek-AI 2024,
section 2.1): K and V of a token are computed from a small latent vector, and from a rotated part of
K that all heads share. Queries may also be computed from a latent vector.

The cache holds the latent vector, normalised, which is key and value of all heads, and the rotated
part, which is a part of their keys. Half of each lies where other models have K, the other half
where they have V. Attention reads them as they are, and K and V of a head are never made
(section 2.1.2): with K_h = W_h c and V_h = U_h c for the latent vector c, scores are
(W_h^T q_h) . c plus those of the rotated part, and the result is U_h times the weighted sum of the
latent vectors. So `kv_b` is applied to queries and results.

Prompts are read in the same way. That is 3.4 times the arithmetic of attention over K and V made
whole (V2-Lite: 1,088 numbers a head and pair of tokens, not 320), which is little of a prompt's
time up to some thousand tokens. In return a token has the same bits wherever it is computed: in a
prompt, in a chunk, or by itself.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.models.base import AttentionInput, LayerKind, ModelConfig, ParamSpec
from jaxserve.models.layers import Linear, Norm, linear, linear_leaves, norm_leaves
from jaxserve.models.lora import Lora
from jaxserve.models.quantized import Quantized, dequantize
from jaxserve.models.rope import rotate_pairs
from jaxserve.models.sharding import constrain, pool_kv_heads
from jaxserve.pallas_kernels import head_matmul, in_fixed_batches, rms_norm

NORM_EPS = 1e-6  # of the norms of latent vectors, whatever the others'


@flax.struct.dataclass
class ByHead:
    """`kv_b` as steps have it: the matrices of each head, which are not quantised.

    Attributes:
        k: [num_heads, plain, rank], from a head's plain query to one of latent vectors.
        v: [num_heads, rank, values].
        lora: adapters of `kv_b` for the step's rows; None for no adapters.
    """

    k: Linear
    v: Linear
    lora: Lora | None = None


@flax.struct.dataclass
class LatentAttention:
    """One layer's attention parameters. In the columns of a head, the plain part is before the
    rotated one, and K before V.

    Attributes:
        q_a: [d_model, q_rank]; None if queries are projected directly.
        q_a_norm: [q_rank], likewise.
        q_b: [q_rank, num_heads * (plain + rotated)], or [d_model, ...].
        kv_a: [d_model, rank + rotated], the rotated part of K last.
        kv_a_norm: [rank].
        kv_b: in checkpoints [rank, num_heads * (plain + values)]; in steps `ByHead`.
        o: [num_heads * values, d_model].
    """

    q_a: Linear | None
    q_a_norm: Norm | None
    q_b: Linear
    kv_a: Linear
    kv_a_norm: Norm
    kv_b: Linear | ByHead
    o: Linear


def latent_leaves(config: ModelConfig, name: str, *, bias: bool) -> LatentAttention:
    """The leaves of one attention, see `Family.leaves`.

    Args:
        config: the model's, with latent projections.
        name: its prefix in checkpoints.
        bias: whether the projections to latent vectors and the output projection have biases.
    """
    latent = config.latent
    assert latent is not None

    def projection(
        part: str,
        shape: tuple[int, int],
        axes: tuple[str, str],
        granule: int = 1,
        bias: bool = False,
    ) -> Linear:
        full = f"{name}.{part}"
        return linear_leaves(full, shape, axes, bias=bias, std=config.init_std, granule=granule)

    d, heads = config.d_model, config.num_heads
    query, both = latent.plain + latent.rotated, latent.plain + latent.values
    q_a = q_a_norm = None
    q_b = projection("q_proj", (d, heads * query), ("embed", "heads"), query)
    if latent.q_rank is not None:
        q_a = projection("q_a_proj", (d, latent.q_rank), ("embed", "latent"), bias=bias)
        q_a_norm = norm_leaves(f"{name}.q_a_layernorm", latent.q_rank)
        shape = (latent.q_rank, heads * query)
        q_b = projection("q_b_proj", shape, ("latent", "heads"), query)
    return LatentAttention(
        q_a=q_a,
        q_a_norm=q_a_norm,
        q_b=q_b,
        kv_a=projection(
            "kv_a_proj_with_mqa",
            (d, latent.rank + latent.rotated),
            ("embed", "latent"),
            bias=bias,
        ),
        kv_a_norm=norm_leaves(f"{name}.kv_a_layernorm", latent.rank),
        kv_b=projection("kv_b_proj", (latent.rank, heads * both), ("latent", "heads"), both),
        o=projection(
            "o_proj", (heads * latent.values, d), ("heads", "embed"), latent.values, bias=bias
        ),
    )


def by_head(attn: LatentAttention, config: ModelConfig) -> LatentAttention:
    """A checkpoint's parameters with `kv_b` as steps have it, in the dtype of the norms."""
    kv_b, latent = attn.kv_b, config.latent
    assert latent is not None
    if isinstance(kv_b, ByHead):
        return attn
    kernel, transposed = kv_b.kernel, kv_b.transposed
    if isinstance(kernel, Quantized):
        kernel = dequantize(kernel, attn.kv_a_norm.scale.dtype, transposed=transposed)
    kernel = kernel.T if transposed else kernel
    k, v = jnp.split(kernel.reshape(latent.rank, config.num_heads, -1), (latent.plain,), axis=2)
    apart = ByHead(Linear(k.transpose(1, 2, 0)), Linear(v.transpose(1, 0, 2)), kv_b.lora)
    return dataclasses.replace(attn, kv_b=apart)


def by_head_specs(attn: LatentAttention, config: ModelConfig) -> LatentAttention:
    """The specs of `by_head`'s result, of those of a checkpoint's parameters."""
    latent = config.latent
    assert latent is not None

    def spec(inputs: int, outputs: int) -> Linear:
        shape, axes = (config.num_heads, inputs, outputs), ("heads", None, None)
        return Linear(ParamSpec(shape, axes, std=config.init_std))

    apart = ByHead(spec(latent.plain, latent.rank), spec(latent.rank, latent.values))
    return dataclasses.replace(attn, kv_b=apart)


def latent_input(
    weights: LatentAttention,
    config: ModelConfig,
    x: jax.Array,
    kind: LayerKind,
    rotation: tuple[jax.Array, jax.Array] | None,
    mesh: Mesh | None,
) -> AttentionInput:
    """Projects a layer's input to queries of latent vectors, and to the halves of one, see
    `attention.attention_input`.

    Args:
        weights: the layer's attention parameters.
        config: the model's.
        x: [T, d_model], normalised.
        kind: the layer's.
        rotation: angles of its rope, see `rope.angles`.
        mesh: the devices that the parameters are sharded over; None for one.
    """
    latent = config.latent
    assert latent is not None and rotation is not None
    # Replicated: otherwise XLA would have each shard compute its own part of them, and gather the
    # parts.
    x = constrain(x, mesh, None, None)
    few = x
    if weights.q_a is not None and weights.q_a_norm is not None:
        few = constrain(linear(x, weights.q_a, mesh), mesh, None, None)
        few = rms_norm(few, weights.q_a_norm.scale, NORM_EPS)
    q = linear(few, weights.q_b, mesh).reshape(len(x), config.num_heads, -1)
    q = constrain(q, mesh, None, "heads", None)
    q_plain, q_rotated = jnp.split(q, (latent.plain,), axis=-1)
    few, shared = jnp.split(linear(x, weights.kv_a, mesh), (latent.rank,), axis=-1)
    few = constrain(few, mesh, None, None)
    few = rms_norm(few, weights.kv_a_norm.scale, NORM_EPS)
    q_rotated = rotate_pairs(q_rotated, *rotation)
    shared = rotate_pairs(constrain(shared, mesh, None, None)[:, None], *rotation)
    # XLA's compiler for GPUs fails where it fuses the parts of few tokens' pairs with their halves.
    shared = jax.lax.optimization_barrier(shared)

    def padded(plain: jax.Array) -> jax.Array:
        return jnp.pad(plain, ((0, 0), (0, 0), (0, 2 * latent.half - latent.rank)))

    q_plain = padded(_queries(q_plain, weights, config, mesh))
    q = jnp.concatenate([q_plain, q_rotated], axis=-1)
    halves = [part.reshape(len(x), 1, 2, -1) for part in (padded(few[:, None]), shared)]
    copies = pool_kv_heads(config, 1 if mesh is None else mesh.size)
    cached = jnp.repeat(jnp.concatenate(halves, axis=-1), copies, axis=1)
    k, v = (constrain(cached[:, :, n], mesh, None, "kv_heads", None) for n in (0, 1))
    return AttentionInput(constrain(q, mesh, None, "heads", None), k, v, x, None, kind)


def latent_output(
    weights: LatentAttention, config: ModelConfig, mixed: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """What the output projection reads, see `attention.attention_output`.

    Args:
        weights: the layer's attention parameters.
        config: the model's.
        mixed: [T, num_heads, 2 * halves], the weighted sums of latent vectors.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [T, num_heads, values].
    """
    latent, kv_b = config.latent, by_head(weights, config).kv_b
    assert latent is not None and isinstance(kv_b, ByHead)
    mixed = mixed[..., : latent.rank]
    y = _product(mixed, kv_b.v, mesh)
    if kv_b.lora is not None:
        a, b = _low_rank(kv_b.lora, config)
        y = y + _adapted("thr,cr->thc", "thc,chv->thv", mixed, kv_b.lora, a, b[1], mesh)
    return constrain(y, mesh, None, "heads", None)


def _queries(
    q: jax.Array, weights: LatentAttention, config: ModelConfig, mesh: Mesh | None
) -> jax.Array:
    """Plain queries [T, num_heads, plain] -> those of latent vectors, [T, num_heads, rank]."""
    kv_b = by_head(weights, config).kv_b
    assert isinstance(kv_b, ByHead)
    y = _product(q, kv_b.k, mesh)
    if kv_b.lora is not None:
        a, b = _low_rank(kv_b.lora, config)
        y = y + _adapted("thp,chp->thc", "thc,cr->thr", q, kv_b.lora, b[0], a, mesh)
    return constrain(y, mesh, None, "heads", None)


def _product(x: jax.Array, weights: Linear, mesh: Mesh | None) -> jax.Array:
    options = {"transposed": weights.transposed, "alone": mesh is None}
    return head_matmul(x, weights.kernel, **options)


def _low_rank(lora: Lora, config: ModelConfig) -> tuple[jax.Array, list[jax.Array]]:
    """A [columns, rank], and B [columns, num_heads, ...] of K and of V."""
    latent = config.latent
    assert latent is not None and lora.rows is not None
    width = lora.rows.own.shape[1]
    b = lora.b[0][:width].reshape(width, config.num_heads, -1)
    return lora.a[:width, 0], jnp.split(b, (latent.plain,), axis=2)


def _adapted(
    into: str,
    out: str,
    x: jax.Array,
    lora: Lora,
    first: jax.Array,
    second: jax.Array,
    mesh: Mesh | None,
) -> jax.Array:
    """The low-rank product of each token's adapter, in the dtype of x.

    Args:
        into, out: both products, for einsum: from x to columns, and from there.
        x: [T, num_heads, any].
        lora: the adapters, with the columns of each token.
        first, second: their matrices, in the order in which x meets them.
        mesh: the devices that the parameters are sharded over; None for one.
    """
    assert lora.rows is not None

    def product(x: jax.Array, own: jax.Array) -> jax.Array:
        low = jnp.einsum(into, x.astype(first.dtype), first, preferred_element_type=jnp.float32)
        # Not a product with 0: another adapter's values may be infinite.
        low = jnp.where(own[:, None, :], low, 0).astype(second.dtype)
        return jnp.einsum(out, low, second, preferred_element_type=jnp.float32)

    rows = x, lora.rows.own
    y = in_fixed_batches(product, *rows) if mesh is None else product(*rows)
    return y.astype(x.dtype)
