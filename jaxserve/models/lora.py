"""Low-rank adapters (LoRA, Hu et al. 2021, section 4.1) of many requests in one product.

An adapter adds x A B to a projection's x W, with A [in, rank] and B [rank, out], B already times
the adapter's scale. For each projection, the A of all adapters lie side by side in one range of
columns, and the B one below the other. An adapter takes as many columns as its rank's bucket, and
`owner` says which adapter has each column.

On one CPU, a kernel reads only the columns of adapters in the batch. Elsewhere the batch takes two
products: of x with A in the first columns, and of the result with B, where columns of other
adapters are set to zero. Adding those zeros is exact: a row's result does not depend on other
columns. Steps are compiled for few columns and for all (`widths`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.base import Family, Leaf, ModelConfig, Params, ParamSpec
from jaxserve.models.sharding import param_sharding
from jaxserve.pallas_kernels.low_rank import RANKS

BASE = 0
"""The number of a row without an adapter; the adapter in slot i has number i + 1."""

_TILE = 128
"""A matrix unit multiplies fewer columns no faster than this many."""


@dataclasses.dataclass(frozen=True)
class LoraSlots:
    """Room for adapters on the device. Hashable: steps are compiled for it.

    Attributes:
        count: most adapters at once.
        rank: the largest rank, one of `RANKS`.
        targets: last parts of the names of the projections that adapters may change, such as
            "q_proj"; empty for all.
    """

    count: int
    rank: int
    targets: tuple[str, ...] = ()

    @property
    def columns(self) -> int:
        """Columns for a projection: enough for all adapters to have the largest rank."""
        return self.count * self.rank

    def widths(self, *, skips: bool) -> tuple[int, ...]:
        """Numbers of columns that steps are compiled for, ascending. skips: whether steps only read
        the columns of their rows' adapters, so that one number is enough."""
        few = self.columns // 4 // RANKS[0] * RANKS[0]
        return (self.columns,) if skips or self.columns <= _TILE else (few, self.columns)


def bucket(rank: int) -> int:
    """Columns that an adapter of this rank takes."""
    return next(columns for columns in RANKS if rank <= columns)


@flax.struct.dataclass
class RowColumns:
    """The columns of the tokens of a step.

    Attributes:
        numbers: int32 [T], each token's adapter.
        owner: int32 [columns], of all columns, see `Adapters`.
        own: bool [T, width], which of the first columns belong to the token's adapter.
    """

    numbers: Any
    owner: Any
    own: Any


@flax.struct.dataclass
class Lora:
    """All adapters of a projection, or one adapter's part of it.

    Attributes:
        a: [columns, parts, in]; the parts are q, k and v if those are fused, else a single one.
        b: [columns, out] for each part.
        rows: the columns of the tokens; None outside of steps.
    """

    a: Any
    b: tuple[Any, ...]
    rows: RowColumns | None = None


Layers = tuple[dict[str, Lora], ...]
"""The adapters of each layer, by `Projection.place`."""


@flax.struct.dataclass
class Adapters:
    """All adapters on the device.

    Attributes:
        owner: int32 [columns], the number of the adapter that has the column, 0 for none. An
            adapter's columns are contiguous, and begin at a multiple of their number.
        layers: A and B.
    """

    owner: Any
    layers: Layers


class Projection(NamedTuple):
    """A projection that adapters may change.

    Attributes:
        layer: index of its layer.
        place: key of its adapters in the layer: "attn" for q, k and v if they are fused, else its
            path in the layer's tree.
        leaf: leaf of its kernel, [in, out].
    """

    layer: int
    place: str
    leaf: Leaf

    @property
    def target(self) -> str:
        """The last part of its name in checkpoints."""
        return self.leaf.name.rpartition(".")[2]


_QKV = ("attn.q", "attn.k", "attn.v")
FUSED = "attn"


def projections(family: Family, config: ModelConfig, *, fused: bool) -> Iterator[Projection]:
    """The projections of all layers; q, k and v in this order. fused: whether steps take q, k and v
    as one."""
    for index, layer in enumerate(family.leaves(config).layers):
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            place, _, part = name.rpartition(".")
            # Experts are stacked, and their router is `wide`: neither goes through `linear`.
            if part == "kernel" and len(leaf.spec.shape) == 2 and not leaf.wide:
                yield Projection(index, FUSED if fused and place in _QKV else place, leaf)


def adapter_specs(
    family: Family, config: ModelConfig, slots: LoraSlots, *, fused: bool
) -> Adapters:
    """Specs of the arrays for adapters, cut over a mesh like the projections. If q, k and v are
    fused, there are columns for all three of them, or for none.

    Args:
        family: the model's.
        config: its shape.
        slots: the room for adapters.
        fused: whether q, k and v are fused.
    """
    every = list(projections(family, config, fused=fused))
    wanted = {
        projection.place
        for projection in every
        if not slots.targets or projection.target in slots.targets
    }
    layers: list[dict[str, Lora]] = [{} for _ in range(config.num_layers)]
    for layer, place, leaf in every:
        if place not in wanted:
            continue
        spec, before = leaf.spec, layers[layer].get(place)
        b = ParamSpec(
            (slots.columns, spec.shape[1]), (None, spec.axes[1]), "zeros", granule=spec.granule
        )
        parts = (b,) if before is None else (*before.b, b)
        a = ParamSpec(
            (slots.columns, len(parts), spec.shape[0]),
            (None, None, spec.axes[0]),
            "zeros",
            granule=spec.granule,
        )
        layers[layer][place] = Lora(a, parts)
    owner = ParamSpec((slots.columns,), (None,), "zeros", dtype="int32")
    return Adapters(owner, tuple(layers))


def with_adapters(params: Params, adapters: Adapters, numbers: jax.Array, width: int) -> Params:
    """The parameters with adapters beside the projections that they change, for one step.

    Args:
        params: the model's.
        adapters: all of them.
        numbers: int32 [T], the adapter of each token, or `BASE`.
        width: number of first columns that contain all of these.
    """
    own = (numbers[:, None] == adapters.owner[:width]) & (numbers[:, None] != BASE)
    rows = RowColumns(numbers, adapters.owner, own)

    def beside(node: Any, mine: dict[str, Lora], place: str = "") -> Any:
        if not dataclasses.is_dataclass(node):
            return node
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(node):
            inside = getattr(node, field.name)
            if dataclasses.is_dataclass(inside):
                path = f"{place}.{field.name}" if place else field.name
                changed[field.name] = beside(inside, mine, path)
        lora = mine.get(place)
        if lora is not None:
            changed["lora"] = dataclasses.replace(lora, rows=rows)
        return dataclasses.replace(node, **changed)  # type: ignore[type-var]

    layers = map(beside, params.layers, adapters.layers)
    return params.replace(layers=tuple(layers))


def make_put(adapters: Adapters) -> Callable[..., Adapters]:
    """A jitted function (adapters, layers of a new adapter, its number, its first column) -> the
    adapters with the new one. The first argument is donated, and stays on its devices."""
    where = jax.tree.map(lambda array: array.sharding, adapters)
    return jax.jit(_put, donate_argnums=0, out_shardings=where)


def empty_adapter(adapters: Adapters, columns: int) -> Layers:
    """An adapter of this many columns that changes nothing: NumPy arrays."""
    return jax.tree.map(
        lambda array: np.zeros((columns, *array.shape[1:]), array.dtype), adapters.layers
    )


def make_adapters(specs: Adapters, dtype: DTypeLike, mesh: Mesh | None) -> Adapters:
    """Empty arrays for adapters, on the devices."""

    def zeros(spec: ParamSpec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.dtype or dtype, device=param_sharding(mesh, spec))

    return jax.tree.map(zeros, specs)


def adapter_bytes(specs: Adapters, dtype: DTypeLike, mesh: Mesh | None) -> int:
    """Bytes of the arrays for adapters on each device."""
    return sum(
        math.prod(param_sharding(mesh, spec).shard_shape(spec.shape))
        * jnp.dtype(spec.dtype or dtype).itemsize
        for spec in jax.tree.leaves(specs)
    )


def _put(adapters: Adapters, new: Layers, number: jax.Array, first: jax.Array) -> Adapters:
    def into(room: jax.Array, mine: jax.Array) -> jax.Array:
        at: list[Any] = [first, *[np.int32(0)] * (room.ndim - 1)]
        return jax.lax.dynamic_update_slice(room, mine.astype(room.dtype), at)

    columns = jax.tree.leaves(new)[0].shape[0]
    left = jnp.where(adapters.owner == number, BASE, adapters.owner)  # drops its old columns
    owner = into(left, jnp.full(columns, number))
    return Adapters(owner, jax.tree.map(into, adapters.layers, new))
