"""Quantised weights: how they are stored, and what they stand for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.pallas_kernels import (
    grouped_matmul,
    in_fixed_batches,
    quantized_grouped_matmul,
    quantized_matmul,
)

Array = TypeVar("Array", np.ndarray, jax.Array)

DTYPES = {"int8": "int8", "int4": "int8", "fp8": "float8_e4m3fn"}
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
GROUPS = (32, 64, 128)
NONE = "none"  # the user wants unquantised weights
DEFAULT_GROUP = 32  # of int4


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored.

    Attributes:
        kind: "int8", "int4" or "fp8" (e4m3).
        group: number of consecutive inputs that share an output's scale; 0: all inputs.
        zero: whether each group has a zero point.
        scale: dtype of the scales.
        minimum: whether each group has a float32 minimum, which is added.
    """

    kind: str
    group: int = 0
    zero: bool = False
    scale: str = "float32"
    minimum: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of the numbers."""
        return DTYPES[self.kind]

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 4 if self.kind == "int4" else 8

    def alike(self, other: Scheme, inputs: int) -> bool:
        """Whether both store a weight of this many inputs in the same way: one group of all inputs
        equals no groups."""
        fields = dataclasses.replace(self, group=0) == dataclasses.replace(other, group=0)
        return fields and (self.group or inputs) == (other.group or inputs)

    def groups(self, inputs: int) -> int:
        """Number of groups per output. Raises ValueError if groups do not divide the inputs."""
        group = self.group or inputs
        if inputs % group:
            raise ValueError(f"groups of {group} do not divide {inputs} inputs")
        return inputs // group


TABLE = Scheme("int8")
BLOCKS = {
    "Q8_0": Scheme("int8", 32, scale="float16"),
    "Q4_0": Scheme("int4", 32, scale="float16"),
    "Q4_1": Scheme("int4", 32, minimum=True, scale="float16"),
    "Q4_K": Scheme("int4", 32, minimum=True, scale="float32"),
}
"""How tensors of GGUF files are kept quantised, by GGML's name of their type; others are made
wide."""


@dataclass(frozen=True)
class Quantization:
    """Which weights of a model are quantised, and how.

    Attributes:
        scheme: scheme of the projections.
        table: scheme of the tables of the vocabulary.
        wide: weights that are not quantised, by their names in checkpoints, without ".weight".
        others: weights with other schemes, by name.
        dequantizable: whether the checkpoint's weights can also be loaded wide.
    """

    scheme: Scheme
    table: Scheme = TABLE
    wide: tuple[str, ...] = ()
    others: tuple[tuple[str, Scheme], ...] = ()
    dequantizable: bool = False


def parse_quantization(text: str) -> Quantization:
    """What "int8", "int4", "int4:group=64", "int4:group=32,zero" or "fp8" stands for. int4 has
    groups, by default of 32; the others have one scale per output. Tables of the vocabulary are
    int8, with a scale per token.

    Raises:
        ValueError: If the text has another form.
    """
    kind, _, rest = text.partition(":")
    group, zero = DEFAULT_GROUP if kind == "int4" else 0, False
    known = kind in DTYPES
    for option in rest.split(",") if rest else ():
        name, _, number = option.partition("=")
        if name == "group" and number in map(str, GROUPS) and kind != "fp8":
            group = int(number)
        elif option == "zero" and kind == "int4":
            zero = True
        else:
            known = False
    if not known:
        raise ValueError(
            "must be int8, int4 or fp8; int8 and int4 take :group=N with N of "
            f"{', '.join(map(str, GROUPS))}, int4 also ,zero; got {text[:80]!r}"
        )
    return Quantization(Scheme(kind, group, zero, "bfloat16" if group else "float32"))


@flax.struct.dataclass
class Quantized:
    """A weight [in, out] that stands for (q - zero) * scale + minimum, a table [entries, width], or
    experts' weights [experts, in, out].

    Attributes:
        q: the numbers, in the weight's shape: int8 or float8_e4m3fn. With 4 bits, an int8 holds two
            inputs, the first in its low half, so there are half as many.
        scale: [groups, out], for a table [entries, groups]; a group consists of consecutive inputs.
        zero: int8, the shape of `scale`; None for none.
        minimum: float32, the shape of `scale`; None for none.
        bits: bits of a number.
        axes: mesh axes over which inputs and outputs are cut (see `mesh_axes.RULES`).
        inputs: dtype to which CPU kernels round their inputs; None for no rounding.
    """

    q: Any
    scale: Any
    zero: Any = None
    minimum: Any = None
    bits: int = flax.struct.field(pytree_node=False, default=8)
    axes: tuple[str | None, str | None] = flax.struct.field(pytree_node=False, default=(None, None))
    inputs: str | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the values that it stands for: float32."""
        return jnp.dtype(jnp.float32)


def dequantize(weights: Quantized, dtype: DTypeLike, *, transposed: bool = False) -> jax.Array:
    """The weight, or (transposed) table, in a float dtype."""
    if weights.q.ndim == 3:
        return jax.vmap(lambda part: dequantize(part, dtype, transposed=transposed))(weights)
    axis = 1 if transposed else 0
    q = weights.q if weights.bits == 8 else unpack_pairs(weights.q, axis)
    shape, groups = q.shape, weights.scale.shape[axis]
    by_group = list(shape)
    by_group[axis : axis + 1] = [groups, shape[axis] // groups]
    q = q.astype(jnp.float32).reshape(by_group)
    if weights.zero is not None:
        q = q - jnp.expand_dims(weights.zero.astype(jnp.float32), axis + 1)
    q = q * jnp.expand_dims(weights.scale.astype(jnp.float32), axis + 1)
    if weights.minimum is not None:
        q = q + jnp.expand_dims(weights.minimum, axis + 1)
    return q.reshape(shape).astype(dtype)


def take_rows(table: Quantized, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows of a table at ids, which are clipped, in a float dtype."""
    rows = jax.tree.map(lambda part: jnp.take(part, ids, axis=0, mode="clip"), table)
    return dequantize(rows, dtype, transposed=True)


def quantized_dot(
    x: jax.Array,
    weights: Quantized,
    *,
    transposed: bool,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
) -> jax.Array:
    """x [T, in] times what the weights stand for -> [T, out] in this dtype. Sums are in float32.

    On GPUs and TPUs no wider weights are written to memory: XLA multiplies numbers with one scale
    per output directly, and a kernel handles groups. On CPUs 8 and 4 bits have kernels, for any
    number of rows if x is rounded to bfloat16 (`inputs`); else XLA writes the weights out wide.

    Args:
        x: [T, in].
        weights: [in, out].
        transposed: they are a table, [out, in].
        dtype: dtype of the result.
        mesh: the devices that the weights are sharded over; None for one.
    """
    parts, axes = (weights.q, weights.scale, weights.zero, weights.minimum), weights.axes
    rounded = x if weights.inputs is None else x.astype(weights.inputs)
    y = quantized_matmul(rounded, *parts, transposed=transposed, dtype=dtype, axes=axes, mesh=mesh)
    if y is not None:
        return y
    axis = 1 if transposed else 0
    plain = weights.zero is None and weights.minimum is None
    alone = weights.scale.shape[axis] == 1 and plain and weights.bits == 8
    w = weights.q.astype(x.dtype) if alone else dequantize(weights, x.dtype, transposed=transposed)
    numbers = (((1,), (axis,)), ((), ()))

    def product(x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, w, numbers, preferred_element_type=jnp.float32)

    y = in_fixed_batches(product, x) if mesh is None else product(x)
    if alone:
        y = y * weights.scale.astype(jnp.float32).reshape(1, -1)
    return y.astype(dtype)


def quantized_grouped_dot(
    x: jax.Array,
    weights: Quantized,
    group_sizes: jax.Array,
    *,
    transposed: bool,
    dtype: DTypeLike,
) -> jax.Array:
    """Each group of rows times what its own weights stand for, on one device, see `grouped_matmul`.
    CPUs have kernels for 8 and 4 bits; otherwise XLA writes all weights out wide.

    Args:
        x: [T, in], by group.
        weights: [groups, in, out].
        group_sizes: int32 [groups].
        transposed: they are [groups, out, in].
        dtype: dtype of the result, [T, out].
    """
    rounded = x if weights.inputs is None else x.astype(weights.inputs)
    parts = (weights.q, weights.scale, weights.zero)
    y = None
    if weights.minimum is None:
        y = quantized_grouped_matmul(rounded, *parts, group_sizes, transposed=transposed)
    if y is not None:
        return y.astype(dtype)
    wide = dequantize(weights, x.dtype, transposed=transposed)
    return grouped_matmul(x, wide, group_sizes, transposed=transposed, dtype=dtype)


def pack_pairs(numbers: Array, axis: int) -> Array:
    """Packs 4-bit numbers in int8, two neighbours along the axis in one int8."""
    shape = list(numbers.shape)
    shape[axis : axis + 1] = [shape[axis] // 2, 2]
    moveaxis = np.moveaxis if isinstance(numbers, np.ndarray) else jnp.moveaxis
    low, high = moveaxis(numbers.reshape(shape), axis + 1, 0)
    packed: Array = (low & 15) | (high << 4)
    return packed


def unpack_pairs(packed: Array, axis: int) -> Array:
    """The inverse of `pack_pairs`."""
    stack = np.stack if isinstance(packed, np.ndarray) else jnp.stack
    shape = list(packed.shape)
    shape[axis] *= 2
    numbers: Array = stack([(packed << 4) >> 4, packed >> 4], axis=axis + 1).reshape(shape)
    return numbers
