"""Building blocks shared by the families. Norms and logits compute in float32."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.base import HFTensor, Leaf, Params, ParamSpec
from jaxserve.models.lora import Lora
from jaxserve.models.quantized import Quantized, quantized_dot, take_rows
from jaxserve.models.sharding import constrain
from jaxserve.pallas_kernels import (
    add_low_rank,
    has_skinny_matmul,
    in_fixed_batches,
    skinny_matmul,
)


@flax.struct.dataclass
class Linear:
    """A projection.

    Attributes:
        kernel: [in, out], for experts [experts, in, out]; may be `Quantized`.
        bias: [out], or None.
        lora: adapters of the step's rows, see `jaxserve.models.lora`; None for no adapters.
        transposed: the kernel is [..., out, in], see `jaxserve.weights.transpose_loaded`.
    """

    kernel: Params
    bias: Params = None
    lora: Lora | None = None
    transposed: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class Norm:
    """scale and bias, [width] each; None if the norm has none."""

    scale: Params = None
    bias: Params = None


# Fewer rows become a matrix-vector product, for which XLA's CPU compiler converts the whole weight.
_FEWEST_ROWS = 4


def matmul(
    x: jax.Array,
    weights: jax.Array | Quantized,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """x [T, in] @ weights [in, out] -> [T, out].

    If x is wider than the weights (float32 on 16 bits), it is rounded to their dtype and the sums
    stay in float32. XLA's CPU compiler then uses its library's mixed matmul, which reads the
    weights as they are. With a 16-bit result, or too few rows, it would convert them first, in each
    step. If numba is installed, our own kernels are used, see `has_skinny_matmul`.

    Args:
        x: [T, in].
        weights: [in, out].
        transposed: the weights are [out, in].
        dtype: dtype of the result; None for that of x.
        mesh: the devices that the weights are sharded over; None for one.
    """
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))
    rows, result = x.shape[0], jnp.dtype(dtype or x.dtype)
    if isinstance(weights, Quantized):
        return quantized_dot(x, weights, transposed=transposed, dtype=result, mesh=mesh)
    alone = x.dtype == jnp.float32 and mesh is None
    if alone and has_skinny_matmul(rows, weights, transposed=transposed):
        return skinny_matmul(x.astype(weights.dtype), weights, transposed).astype(result)
    if x.dtype != weights.dtype:
        x = jnp.pad(x.astype(weights.dtype), ((0, max(0, _FEWEST_ROWS - rows)), (0, 0)))

    def product(x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, weights, numbers, preferred_element_type=result)

    return (in_fixed_batches(product, x) if mesh is None else product(x))[:rows]


def linear(x: jax.Array, weights: Linear, mesh: Mesh | None) -> jax.Array:
    """x [T, in] -> [T, out], in the dtype of x, see `matmul`."""
    y = matmul(x, weights.kernel, transposed=weights.transposed, mesh=mesh)
    y = y if weights.bias is None else y + weights.bias
    return y if weights.lora is None else with_low_rank(y, x, weights.lora, mesh)


def with_low_rank(y: jax.Array, x: jax.Array, lora: Lora, mesh: Mesh | None) -> jax.Array:
    """A projection plus the low-rank product of each token's adapter.

    Args:
        y: [T, out], the projection, with its parts in the order of `lora`.
        x: [T, in], its input.
        lora: all adapters, and the columns of each token.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        [T, out], in the dtype of y.
    """
    assert lora.rows is not None
    if mesh is None:
        numbers, owner = lora.rows.numbers, lora.rows.owner
        added = add_low_rank(y, x, lora.a, lora.b, numbers, owner)
        if added is not None:
            return added
    return y + jnp.concatenate(lora_parts(x, lora, mesh), axis=1)


def lora_parts(x: jax.Array, lora: Lora, mesh: Mesh | None) -> list[jax.Array]:
    """The low-rank product of each token's adapter for each part of a projection.

    Args:
        x: [T, in].
        lora: all adapters, and the columns of each token.
        mesh: the devices that they are sharded over; None for one.

    Returns:
        [T, out] for each part, in the dtype of x; zeros for tokens without an adapter.
    """
    assert lora.rows is not None
    own, parts = lora.rows.own, len(lora.b)
    width = own.shape[1]
    a = lora.a[:width].reshape(width * parts, -1)
    low = matmul(x, a, transposed=True, mesh=mesh).reshape(len(x), width, parts)
    # Not a product with 0: another adapter's values may be infinite.
    low = jnp.where(own[:, :, None], low, 0)
    return [matmul(low[:, :, part], b[:width], mesh=mesh) for part, b in enumerate(lora.b)]


def embed_rows(table: jax.Array | Quantized, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows of table [V, d] at ids [T], in this dtype. Ids are clipped, since padding tokens may
    have any id."""
    if isinstance(table, Quantized):
        return take_rows(table, ids, dtype)
    return jnp.take(table, ids, axis=0, mode="clip").astype(dtype)


def vocab_logits(
    hidden: jax.Array, table: jax.Array | Quantized, vocab_size: int, mesh: Mesh | None
) -> jax.Array:
    """Multiplies hidden states with the output embedding.

    Args:
        hidden: [R, d].
        table: [padded vocabulary, d].
        vocab_size: tokens of the vocabulary, without padding.
        mesh: the devices that the parameters are sharded over; None for one.

    Returns:
        float32 [R, vocab_size], replicated.
    """
    logits = matmul(hidden, table, transposed=True, dtype=jnp.float32, mesh=mesh)
    logits = constrain(logits, mesh, None, "vocab")
    return constrain(logits[:, :vocab_size], mesh, None, None)


def linear_leaves(
    name: str,
    shape: tuple[int, int],
    axes: tuple[str, str],
    *,
    bias: bool,
    std: float,
    granule: int = 1,
    rows: tuple[int, int] | None = None,
) -> Linear:
    """The leaves of one projection.

    Args:
        name: its name in checkpoints, without ".weight".
        shape: [in, out].
        axes: names of both axes, see `ParamSpec`.
        bias: whether it has a bias.
        std: see `ParamSpec`.
        granule: see `ParamSpec`.
        rows: see `HFTensor`.
    """
    spec = ParamSpec(shape, axes, std=std, granule=granule)
    kernel = Leaf(spec, HFTensor(f"{name}.weight", transpose=True, rows=rows))
    if not bias:
        return Linear(kernel=kernel)
    spec = ParamSpec(shape[1:], axes[1:], "zeros", granule=granule)
    return Linear(kernel=kernel, bias=Leaf(spec, HFTensor(f"{name}.bias", rows=rows)))


def norm_leaves(
    name: str, width: int, *, scale: bool = True, bias: bool = False, offset: float = 0.0
) -> Norm:
    """The leaves of one norm.

    Args:
        name: its name in checkpoints.
        width: elements that it normalises over.
        scale: whether it has a scale.
        bias: whether it has a bias.
        offset: offset that is added to the scale.
    """

    def leaf(init: str, part: str) -> Leaf:
        return Leaf(ParamSpec((width,), ("norm",), init), HFTensor(f"{name}.{part}"))

    return Norm(
        scale=leaf("zeros" if offset else "ones", "weight") if scale else None,
        bias=leaf("zeros", "bias") if bias else None,
    )


def table_leaf(name: str, rows: int, width: int, rows_axis: str | None, std: float) -> Leaf:
    """The leaf of a table that is stored as it is used (embeddings, lm_head).

    Args:
        name: its name in checkpoints, without ".weight".
        rows: number of entries.
        width: elements of an entry.
        rows_axis: name of the first axis, see `ParamSpec`.
        std: see `ParamSpec`.
    """
    spec = ParamSpec((rows, width), (rows_axis, "embed"), std=std)
    return Leaf(spec, HFTensor(f"{name}.weight"))
