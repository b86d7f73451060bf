"""Low-rank adapters (LoRA, Hu et al. 2021, section 4.1) of many requests in one product.

An adapter adds x A B to a projection's x W, with A [in, rank] and B [rank, out], B already times
the adapter's scale. A projection's A of all adapters lie side by side in one room of columns, and
its B one below the other. An adapter takes as many columns as its rank's bucket has, and `owner`
says whose each column is.

On one CPU a kernel reads the columns of those adapters that the batch has. Elsewhere such a batch
takes two products: of x with all A of the room's first columns, and, with zeros where a column is
not of the row's own adapter, with all B. Adding those zeros is exact: a row's result does not
depend on what is in other columns. Steps are compiled for few columns and for all (`widths`).
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
"""Columns that a matrix unit multiplies as fast as fewer."""


@dataclasses.dataclass(frozen=True)
class LoraSlots:
    """Room for adapters on the device. Hashable: steps are compiled for it.

    Attributes:
        count: how many there may be at once.
        rank: the largest rank, one of `RANKS`.
        targets: last parts of the names of the projections that adapters may change, such as
            "q_proj"; empty for all.
    """

    count: int
    rank: int
    targets: tuple[str, ...] = ()

    @property
    def columns(self) -> int:
        """Of the room of a projection: as many as adapters of the largest rank take."""
        return self.count * self.rank

    def widths(self, *, skips: bool) -> tuple[int, ...]:
        """How many of the room's first columns steps are compiled for, ascending. skips: whether
        steps read no columns but those of their rows' adapters, so that one number is enough."""
        few = self.columns // 4 // RANKS[0] * RANKS[0]
        return (self.columns,) if skips or self.columns <= _TILE else (few, self.columns)


def bucket(rank: int) -> int:
    """Columns that an adapter of this rank takes."""
    return next(columns for columns in RANKS if rank <= columns)


@flax.struct.dataclass
class RowColumns:
    """Which columns the tokens of a step have.

    Attributes:
        numbers: int32 [T], each token's adapter.
        owner: int32 [columns], of the whole room, see `Adapters`.
        own: bool [T, width], which of the first columns are of the token's adapter.
    """

    numbers: Any
    owner: Any
    own: Any


@flax.struct.dataclass
class Lora:
    """All adapters of a projection, or one adapter's part of it.

    Attributes:
        a: [columns, parts, in]; the parts are q, k and v where those are fused, else one.
        b: [columns, out] of each part.
        rows: which of the columns the tokens have; None while no step reads them.
    """

    a: Any
    b: tuple[Any, ...]
    rows: RowColumns | None = None


Layers = tuple[dict[str, Lora], ...]
"""Of each layer, by `Projection.place`."""


@flax.struct.dataclass
class Adapters:
    """All adapters on the device.

    Attributes:
        owner: int32 [columns], the number of the adapter that has the column, 0 for nobody. An
            adapter's columns are together, and begin at a multiple of how many they are.
        layers: A and B.
    """

    owner: Any
    layers: Layers


class Projection(NamedTuple):
    """A projection that adapters may change.

    Attributes:
        layer: index of its layer.
        place: where its adapters are among those of the layer: "attn" for q, k and v where they
            are fused, else its own path in the layer's tree.
        leaf: of its kernel, [in, out].
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
    """All of a model's layers; q, k and v in this order. fused: whether steps take those as one."""
    for index, layer in enumerate(family.leaves(config).layers):
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            place, _, part = name.rpartition(".")
            # Experts are stacked, and what routes to them is `wide`: neither is for `linear`.
            if part == "kernel" and len(leaf.spec.shape) == 2 and not leaf.wide:
                yield Projection(index, FUSED if fused and place in _QKV else place, leaf)


def adapter_specs(
    family: Family, config: ModelConfig, slots: LoraSlots, *, fused: bool
) -> Adapters:
    """Specs of the room for adapters, cut over a mesh as the projections are. Where q, k and v are
    fused, there is room for all three of them, or for none.

    Args:
        family: the model's.
        config: its shape.
        slots: the room.
        fused: whether q, k and v are.
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
        width: how many of the room's first columns have all of those.
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
    """A jitted function (adapters, layers of another one, its number, the first of its columns) ->
    the adapters with that one. The first are donated, and stay on their devices."""
    where = jax.tree.map(lambda array: array.sharding, adapters)
    return jax.jit(_put, donate_argnums=0, out_shardings=where)


def empty_adapter(adapters: Adapters, columns: int) -> Layers:
    """An adapter that changes nothing, of so many columns: NumPy arrays."""
    return jax.tree.map(
        lambda array: np.zeros((columns, *array.shape[1:]), array.dtype), adapters.layers
    )


def make_adapters(specs: Adapters, dtype: DTypeLike, mesh: Mesh | None) -> Adapters:
    """Room with nothing in it, on the devices."""

    def zeros(spec: ParamSpec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.dtype or dtype, device=param_sharding(mesh, spec))

    return jax.tree.map(zeros, specs)


def adapter_bytes(specs: Adapters, dtype: DTypeLike, mesh: Mesh | None) -> int:
    """Bytes of the room on each device."""
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
    left = jnp.where(adapters.owner == number, BASE, adapters.owner)  # by who had it before
    owner = into(left, jnp.full(columns, number))
    return Adapters(owner, jax.tree.map(into, adapters.layers, new))
