"""Low-rank adapters (LoRA, Hu et al. 2021, section 4.1) of many requests in one product.

An adapter adds x A B to a projection's x W, with A [in, rank] and B [rank, out], B already times
the adapter's scale. Adapters have slots. A projection's A of all slots lie side by side, and its B
one below the other, so that a batch whose rows have different adapters takes two products: of x
with all A, and, with zeros where a column is not of the row's own adapter, with all B. Adding those
zeros is exact: a row's result does not depend on what is in other slots. It costs slots times rank
columns whoever has which adapter, as few as a tile of a matrix unit while adapters are few.
"""

from __future__ import annotations

import dataclasses
import functools
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

BASE = 0
"""The number of a row without an adapter; the adapter in slot i has number i + 1."""


@dataclasses.dataclass(frozen=True)
class LoraSlots:
    """Room for adapters on the device. Hashable: steps are compiled for it.

    Attributes:
        count: how many there may be at once.
        rank: the largest rank; an adapter of a smaller one has columns of zeros.
        targets: last parts of the names of the projections that adapters may change, such as
            "q_proj"; empty for all.
    """

    count: int
    rank: int
    targets: tuple[str, ...] = ()

    @property
    def columns(self) -> int:
        """Of all slots of a projection."""
        return self.count * self.rank


@flax.struct.dataclass
class Lora:
    """The adapters of a projection in all slots, or one adapter's part in one.

    Attributes:
        a: [in, parts * columns]: of q, k and v that are fused, first those of q.
        b: [columns, out] of each part.
        own: bool [T, columns], which are of the token's adapter; None while no step reads them.
    """

    a: Any
    b: tuple[Any, ...]
    own: Any = None


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


Adapters = tuple[dict[str, Lora], ...]
"""Of each layer, by `Projection.place`."""

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
    """Specs of the adapters in all slots, cut over a mesh as the projections are. Where q, k and v
    are fused, there is room for all three of them, or for none.

    Args:
        family: the model's.
        config: its shape.
        slots: the room.
        fused: whether q, k and v are.
    """
    found = list(projections(family, config, fused=fused))
    wanted = {one.place for one in found if not slots.targets or one.target in slots.targets}
    layers: list[dict[str, Lora]] = [{} for _ in range(config.num_layers)]
    for layer, place, leaf in found:
        if place not in wanted:
            continue
        spec, before = leaf.spec, layers[layer].get(place)
        b = ParamSpec(
            (slots.columns, spec.shape[1]), (None, spec.axes[1]), "zeros", granule=spec.granule
        )
        parts = (b,) if before is None else (*before.b, b)
        a = ParamSpec(
            (spec.shape[0], len(parts) * slots.columns),
            (spec.axes[0], None),
            "zeros",
            granule=spec.granule,
        )
        layers[layer][place] = Lora(a, parts)
    return tuple(layers)


def with_adapters(params: Params, adapters: Adapters, numbers: jax.Array, rank: int) -> Params:
    """The parameters with adapters beside the projections that they change, for one step.

    Args:
        params: the model's.
        adapters: in all slots.
        numbers: int32 [T], the adapter of each token, or `BASE`.
        rank: of the slots.
    """

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
            columns = lora.b[0].shape[0]
            own = numbers[:, None] == jnp.arange(columns, dtype=jnp.int32) // rank + 1
            changed["lora"] = dataclasses.replace(lora, own=own)
        return dataclasses.replace(node, **changed)  # type: ignore[type-var]

    layers = map(beside, params.layers, adapters)
    return params.replace(layers=tuple(layers))


def make_put(adapters: Adapters, rank: int) -> Callable[[Adapters, Adapters, jax.Array], Adapters]:
    """A jitted function (adapters, another one, slot) -> the adapters with that one in the slot.
    The first are donated, and stay on their devices. Of the other one a is [in, parts * rank], b
    [rank, out]."""
    where = jax.tree.map(lambda array: array.sharding, adapters)
    return jax.jit(functools.partial(_put, rank=rank), donate_argnums=0, out_shardings=where)


def empty_adapter(adapters: Adapters, slots: LoraSlots) -> Adapters:
    """An adapter that changes nothing, for one of the slots."""

    def of(lora: Lora) -> Lora:
        a, dtype = lora.a.shape[0], lora.a.dtype
        b = tuple(np.zeros((slots.rank, part.shape[1]), dtype) for part in lora.b)
        return Lora(np.zeros((a, len(b) * slots.rank), dtype), b)

    return jax.tree.map(of, adapters, is_leaf=lambda node: isinstance(node, Lora))


def make_adapters(specs: Adapters, dtype: DTypeLike, mesh: Mesh | None) -> Adapters:
    """Slots with nothing in them, on the devices."""

    def zeros(spec: ParamSpec) -> jax.Array:
        return jnp.zeros(spec.shape, dtype, device=param_sharding(mesh, spec))

    return jax.tree.map(zeros, specs)


def adapter_bytes(specs: Adapters, dtype: DTypeLike, mesh: Mesh | None) -> int:
    """Bytes of all slots on each device."""
    return sum(
        math.prod(param_sharding(mesh, spec).shard_shape(spec.shape)) * jnp.dtype(dtype).itemsize
        for spec in jax.tree.leaves(specs)
    )


def _put(adapters: Adapters, one: Adapters, slot: jax.Array, *, rank: int) -> Adapters:

    def into(all_slots: jax.Array, mine: jax.Array, parts: int) -> jax.Array:
        width = all_slots.shape[1] // parts
        for part in range(parts):
            piece = mine[:, part * rank : (part + 1) * rank].astype(all_slots.dtype)
            at = (np.int32(0), part * width + slot * rank)
            all_slots = jax.lax.dynamic_update_slice(all_slots, piece, at)
        return all_slots

    def each(lora: Lora, mine: Lora) -> Lora:
        b = tuple(
            jax.lax.dynamic_update_slice(part, own.astype(part.dtype), (slot * rank, np.int32(0)))
            for part, own in zip(lora.b, mine.b, strict=True)
        )
        return Lora(into(lora.a, mine.a, len(lora.b)), b)

    return jax.tree.map(each, adapters, one, is_leaf=lambda node: isinstance(node, Lora))
