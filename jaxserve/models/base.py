"""What every model family provides: a config, parameter specs, a checkpoint layout, two functions.

A family is plain functions over pytrees. Its parameters are one `flax.struct` tree whose layer
leaves are stacked on axis 0, so that the layers run as one `lax.scan`. Attention is not the
family's business: `forward` hands every layer's q, k, v to an `Attend` callable, which owns the
cache (its carry) and returns the attention output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

Carry = Any
Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model, common to all families. Hashable, so it can be a static argument.

    Attributes:
        family: name of the family that runs it.
        d_ff: width of the feed-forward layer.
        head_dim: elements of one attention head; `num_heads * head_dim` may differ from `d_model`.
        max_position: longest sequence, in tokens.
        attn_scale: factor on q.k before the softmax.
        sliding_window: a token sees this many tokens, itself included; None for all before it.
        eos_token_ids: ids that end a generation; may be empty.
    """

    family: str
    vocab_size: int
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    attn_scale: float
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter array: shape, logical axis names (see `jaxserve.sharding`), random init.

    Attributes:
        init: "normal" (mean 0, deviation `std`), "zeros" or "ones".
        granule: elements of a "heads" or "kv_heads" axis that belong together (head_dim), so that
            a head is never cut in two by sharding.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    std: float = 0.02
    granule: int = 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """Which tensor of a Hugging Face checkpoint fills a parameter.

    Attributes:
        name: tensor name; "{}" stands for the layer number when `num_layers` is set.
        transpose: the checkpoint stores [out, in], the parameter is [in, out].
        num_layers: the parameter stacks this many tensors on axis 0; None for a single tensor.
    """

    name: str
    transpose: bool = False
    num_layers: int | None = None

    def names(self) -> list[str]:
        """The tensor names, one a layer, in order."""
        if self.num_layers is None:
            return [self.name]
        return [self.name.format(i) for i in range(self.num_layers)]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter's spec and its place in a checkpoint; families build one tree of these."""

    spec: ParamSpec
    source: HFTensor


def leaf_specs(leaves: Params) -> Params:
    """The tree of `ParamSpec` in a tree of `Leaf`."""
    return jax.tree.map(lambda leaf: leaf.spec, leaves)


def leaf_sources(leaves: Params) -> Params:
    """The tree of `HFTensor` in a tree of `Leaf`."""
    return jax.tree.map(lambda leaf: leaf.source, leaves)


def count_params(specs: Params) -> int:
    """Number of elements in a tree of `ParamSpec`."""
    return sum(spec.size for spec in jax.tree.leaves(specs))


class KVWeights(NamedTuple):
    """A layer's weights for K and V; stacked over layers, every array has one more axis in front.

    Attributes:
        wk, wv: [d_model, num_kv_heads * head_dim].
        bk, bv: [num_kv_heads * head_dim], or None.
        k_norm: [head_dim], scale of the RMS norm over each head of K, or None.
    """

    wk: jax.Array
    wv: jax.Array
    bk: jax.Array | None
    bv: jax.Array | None
    k_norm: jax.Array | None


class AttentionInput(NamedTuple):
    """What a layer hands to attention, for T flat tokens.

    Attributes:
        q: [T, num_heads, head_dim], rotated where the family rotates.
        k: [T, num_kv_heads, head_dim], likewise.
        v: [T, num_kv_heads, head_dim].
        x: [T, d_model], the input of the QKV projection (what a hidden cache stores).
        weights: how k and v were made of x.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    x: jax.Array
    weights: KVWeights


class KVProjection(NamedTuple):
    """How each layer makes K and V of `AttentionInput.x`, for caches that store x (Apt-Serve 4.2):

        K_h = rotate(norm(x @ wk_h + bk_h), position),   V_h = x @ wv_h + bv_h

    Attributes:
        weights: of all layers, stacked.
        norm_eps: of the norm.
        rotation: float32 [2, max_len, head_dim // 2], cos and sin by position; None where
            positions are not rotated.
    """

    weights: KVWeights
    norm_eps: float
    rotation: jax.Array | None


# (carry, layer index as a traced int32, inputs) -> (carry, output [T, num_heads, head_dim])
Attend = Callable[[Carry, jax.Array, AttentionInput], tuple[Carry, jax.Array]]


class Forward(Protocol):
    """Runs the layers.

    tokens and positions are int32 [T]. Returns the carry and the hidden states [T, d_model] after
    the final norm, in the dtype of the parameters.
    """

    def __call__(
        self,
        params: Params,
        config: Any,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        carry: Carry,
        *,
        mesh: Mesh | None = None,
    ) -> tuple[Carry, jax.Array]: ...


class Logits(Protocol):
    """Projects hidden states [R, d_model] on the vocabulary: float32 [R, vocab_size]."""

    def __call__(
        self, params: Params, config: Any, hidden: jax.Array, *, mesh: Mesh | None = None
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: the functions the engine and the loader need.

    Attributes:
        name: the family's name, as in `ModelConfig.family`.
        model_types: the `model_type` values of a Hugging Face config.json that it runs.
        prefix: the prefix of tensor names that some checkpoints leave out.
        config_from_hf: config.json as a dict -> config; ValueError names an unsupported field.
        param_specs: config -> tree of `ParamSpec`.
        hf_layout: config -> tree of `HFTensor`, same structure.
        kv_projection: params, config, max_len -> `KVProjection`, whose arrays are those of params.
    """

    name: str
    model_types: tuple[str, ...]
    prefix: str
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    param_specs: Callable[[Any], Params]
    hf_layout: Callable[[Any], Params]
    forward: Forward
    logits: Logits
    kv_projection: Callable[[Params, Any, int], KVProjection]
