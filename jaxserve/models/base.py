"""What every model family provides: a config, its parameters, and three functions.

A family is a set of plain functions over pytrees: the embedding, one layer, and the part after the
last layer. Its parameters are one `flax.struct` tree, in which `layers` is a tuple with a tree for
each layer, whose leaves are that layer's own arrays. A family does not know how the layers run one
after another (`jaxserve.models.forward`) or what attention reads: a layer hands its normalised
input to an `Attention`, behind which an `Attend` owns the cache (its carry).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.mesh_axes import RULES
from jaxserve.models.quantized import NONE, Quantization, Quantized, Scheme, parse_quantization
from jaxserve.models.rope import Rope, for_length
from jaxserve.pallas_kernels.delta_net import DeltaInput, DeltaNet
from jaxserve.pallas_kernels.pool import cached_width

# Scales of random weights of each kind: a few in 10,000 would exceed the largest number; -7 to 7
# are equally likely.
DEVIATIONS = {"int8": 32.0, "int4": (56 / 3) ** 0.5, "fp8": 64.0}

Carry = Any
Params = Any
LayerIndex = jax.Array | int


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ between layers beside weights. Hashable, as `ModelConfig`.

    Attributes:
        rope: how queries and keys are rotated by position; None if they are not.
        sliding_window: number of tokens that a token sees, including itself; None for all before
            it. If the model is not causal, as many on either side.
        state: whether the layer has a state (`ModelConfig.delta`) in place of attention.
    """

    rope: Rope | None = None
    sliding_window: int | None = None
    state: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """The shape of low-rank projections, which layers have in place of q, k and v (multi-head
    latent attention, DeepSeek-AI 2024, section 2.1). Hashable, as `ModelConfig`.

    Attributes:
        rank: size of the latent vector from which a token's K and V are computed, without the
            rotated part.
        q_rank: likewise for queries; None if they are projected directly.
        plain: elements of a head of Q or K that are not rotated.
        rotated: elements that are rotated; all heads of K share them.
        values: elements of a head of V.
    """

    rank: int
    q_rank: int | None
    plain: int
    rotated: int
    values: int

    @property
    def half(self) -> int:
        """Elements of half a latent vector; of an odd number the second half has a zero more."""
        return -(-self.rank // 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts, which layers have in place of one feed-forward. Hashable, as
    `ModelConfig`.

    Attributes:
        num_experts: experts of a layer.
        experts_per_token: number of experts that a token goes to.
        d_ff: width of an expert.
        shared_d_ff: width of one more expert, to which all tokens go; 0 for none.
        normalised: whether the weights of a token's experts are scaled to a sum of 1.
        scale: factor on these weights.
        sigmoid: whether a router's scores are sigmoids instead of a softmax. A token's experts are
            then chosen by their scores plus a bias that each has, and groups by the two best of
            these sums (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2).
        groups: number of equal groups of experts.
        groups_per_token: number of groups that a token's experts may come from; the groups with the
            likeliest experts are chosen.
        dense_layers: layers that have a feed-forward of `ModelConfig.d_ff` instead, ascending.
        limit: clamps the gate to at most this, and the other half to -limit and limit, see
            `pallas_kernels.gated`; None if the gate has the model's activation.
        alpha: factor on the gate in the clamped gate's sigmoid.
    """

    num_experts: int
    experts_per_token: int
    d_ff: int
    shared_d_ff: int = 0
    normalised: bool = True
    scale: float = 1.0
    sigmoid: bool = False
    groups: int = 1
    groups_per_token: int = 1
    dense_layers: tuple[int, ...] = ()
    limit: float | None = None
    alpha: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model, common to all families. Hashable, so it can be a static argument.

    Attributes:
        family: name of the family that runs it.
        d_ff: width of the feed-forward layer, in layers without experts.
        num_kv_heads: heads of K and V, in attention and its cache; 1 with latent projections, since
            all heads read the same latent vector.
        head_dim: elements of one head of K or V, in attention and its cache; `num_heads * head_dim`
            may differ from `d_model`. With latent projections half of what is cached of a token,
            see `halves`.
        max_position: longest sequence, in tokens.
        attn_scale: factor on q.k before the softmax.
        norm_eps: added to the variance, or the mean square, in all norms.
        tied: the output embedding is the input embedding.
        init_std: standard deviation of random projections and embeddings.
        rope: how queries and keys are rotated by position; None if they are not.
        sliding_window: number of tokens that a token sees, including itself; None for all before
            it.
        eos_token_ids: ids that end a generation; may be empty.
        quantization: which weights are quantised; None for none.
        kinds: the kind of each layer, if `rope` and `sliding_window` differ between layers; else
            empty.
        soft_cap: bound of attention's scores, by tanh; None for none.
        logit_cap: likewise for the logits.
        logit_scale: factor on the logits, before their bound.
        norm_offset: added to the scales of RMS norms.
        whole_norms: q and k are normalised over all heads together, not over each head.
        experts: the experts of layers that have some; None if no layer has.
        sinks: attention has one more score per head, without a value.
        latent: low-rank projections to q, k and v; None if they are projected directly.
        delta: the gated delta net of layers that have a state; None if none has.
        gated: attention's result is multiplied by the sigmoid of a gate, which is projected with q.
        causal: whether a token sees only the tokens before it; else it sees all of its text, which
            is for vectors only.
        mtp_layers: layers that checkpoints have behind these, to predict several tokens at once
            (multi-token prediction). Nothing uses them.
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
    norm_eps: float
    tied: bool
    init_std: float
    rope: Rope | None = None
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantization: Quantization | None = None
    kinds: tuple[LayerKind, ...] = ()
    soft_cap: float | None = None
    logit_cap: float | None = None
    logit_scale: float = 1.0
    norm_offset: float = 0.0
    whole_norms: bool = False
    experts: Experts | None = None
    sinks: bool = False
    latent: Latent | None = None
    delta: DeltaNet | None = None
    gated: bool = False
    causal: bool = True
    mtp_layers: int = 0

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that `rope` applies to."""
        return self.head_dim if self.latent is None else self.latent.rotated

    @property
    def halves(self) -> int:
        """Leading elements of K, and of V, which are the value of a token whose key is all of both,
        see `models.latent`. 0: K is the key, and V the value."""
        return 0 if self.latent is None else self.latent.half

    def cached_dim(self, dtype: DTypeLike) -> int:
        """Elements of one head of K or V in a cache of this dtype."""
        return cached_width(self.head_dim, dtype, self.halves)

    @property
    def query_dim(self) -> int:
        """Elements of a head's query in attention."""
        return 2 * self.head_dim if self.halves else self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of a head that the output projection reads."""
        return self.head_dim if self.latent is None else self.latent.values

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order."""
        return self.kinds or (LayerKind(self.rope, self.sliding_window),) * self.num_layers

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of this layer; None if it has a feed-forward of `d_ff`."""
        if self.experts is None or layer in self.experts.dense_layers:
            return None
        return self.experts

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of its layers."""
        return tuple(dict.fromkeys(kind.sliding_window for kind in self.layer_kinds))

    def for_length(self, longest: int) -> ModelConfig:
        """The model for contexts of at most this many tokens, see `rope.for_length`."""

        def shorter(rope: Rope | None) -> Rope | None:
            return None if rope is None else for_length(rope, longest)

        kinds = tuple(dataclasses.replace(kind, rope=shorter(kind.rope)) for kind in self.kinds)
        return dataclasses.replace(self, rope=shorter(self.rope), kinds=kinds)

    @property
    def plain_keys(self) -> bool:
        """Whether all layers compute K from x as in `KVProjection`, with neither bounds on scores
        nor sinks."""
        partial = self.rope is not None and self.rope.partial != 1
        other = self.kinds or self.soft_cap is not None or self.norm_offset or self.whole_norms
        other = other or self.gated
        return not (other or partial or self.sinks or self.latent)


def layer_kinds(
    ropes: Sequence[Rope | None], windows: Sequence[int | None]
) -> tuple[LayerKind, ...]:
    """`ModelConfig.kinds`: empty if all layers are alike.

    Args:
        ropes: the rope of each layer.
        windows: the window of each layer, in tokens.
    """
    kinds = tuple(map(LayerKind, ropes, windows))
    return kinds if len(set(kinds)) > 1 else ()


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter array: shape, logical axis names (see `jaxserve.models.sharding`), random init.

    Attributes:
        init: "normal" (mean 0, deviation `std`), "zeros", "ones", "constant" (all are `std`) or
            "pairs" (two numbers of -7 to 7 in each).
        granule: elements of a "heads" or "kv_heads" axis that belong together (head_dim), so that
            sharding never cuts a head in two.
        dtype: the dtype of arrays that are quantised, or always wide; None for the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"
    std: float = 0.02
    granule: int = 1
    dtype: str | None = None

    @property
    def size(self) -> int:
        """Number of elements, before any padding of the vocabulary."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """Which tensor of a Hugging Face checkpoint fills a parameter.

    Attributes:
        name: the tensor's name, such as "model.decoder.layers.3.fc1.weight".
        transpose: the checkpoint stores [out, in], the parameter is [in, out].
        stacked: number of tensors that are stacked along the parameter's first axis, with the index
            in place of * in their names; 0 if it is a single tensor.
        rows: if the parameter is only some rows of the tensor: the first row, and the tensor's
            number of rows.
        columns: if the parameter takes every n-th element along the tensor's last axis: the first
            one, and n.
    """

    name: str
    transpose: bool = False
    rows: tuple[int, int] | None = None
    stacked: int = 0
    columns: tuple[int, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors that the parameter is made of."""
        if not self.stacked:
            return (self.name,)
        return tuple(self.name.replace("*", str(index)) for index in range(self.stacked))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a whole tensor, from the parameter's shape."""
        shape = shape[1:] if self.stacked else shape
        stored = shape[::-1] if self.transpose else shape
        if self.columns is not None:
            stored = (*stored[:-1], self.columns[1] * stored[-1])
        return stored if self.rows is None else (self.rows[1], *stored[1:])


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter's spec and its place in a checkpoint; families build one tree of these.

    Attributes:
        spec: the parameter's spec.
        source: its place in checkpoints.
        wide: whether it is never quantised here.
    """

    spec: ParamSpec
    source: HFTensor
    wide: bool = False

    @property
    def name(self) -> str:
        """The name in checkpoints, without ".weight"."""
        return self.source.name.removesuffix(".weight")

    @property
    def is_table(self) -> bool:
        """Whether it is a table of the vocabulary."""
        return self.spec.axes[0] == "vocab"

    @property
    def of_experts(self) -> bool:
        """Whether it has the matrices of all experts of a layer."""
        return len(self.spec.shape) == 3

    def scheme(self, quantization: Quantization | None) -> Scheme | None:
        """How it is quantised; None if it is not."""
        if quantization is None or self.name in quantization.wide:
            return None
        other = dict(quantization.others).get(self.name)
        if other is not None:
            return other
        if self.is_table:
            return quantization.table
        matrix = self.source.transpose or self.of_experts
        return quantization.scheme if matrix and not self.wide else None

    def stored(self, quantization: Quantization | None) -> ParamSpec | Quantized:
        """What is stored: its spec, or a `Quantized` of specs. Raises ValueError if groups do not
        divide it."""
        spec, scheme = self.spec, self.scheme(quantization)
        if scheme is None:
            return spec
        # The axes of the inputs and of the outputs.
        axis, of_outputs = (1, 0) if self.is_table else (1, 2) if self.of_experts else (0, 1)
        inputs = spec.shape[axis]
        try:
            groups = scheme.groups(inputs)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

        def along_inputs(size: int, axes: str | None, **fields: Any) -> ParamSpec:
            of_shape, of_axes = list(spec.shape), list(spec.axes)
            of_shape[axis], of_axes[axis] = size, axes
            # If inputs are cut by heads, a shard has whole groups (see `sharding.check_tensor`).
            granule = 1 if axes in ("heads", "kv_heads") else spec.granule
            return dataclasses.replace(
                spec, shape=tuple(of_shape), axes=tuple(of_axes), granule=granule, **fields
            )

        std, cut = DEVIATIONS[scheme.kind], spec.axes[axis]
        of_group = along_inputs(groups, cut if groups > 1 else None, init="constant")
        return Quantized(
            q=along_inputs(
                inputs * scheme.bits // 8,
                cut,
                dtype=scheme.dtype,
                init="pairs" if scheme.bits == 4 else "normal",
                std=std,
            ),
            scale=dataclasses.replace(of_group, dtype=scheme.scale, std=spec.std / std),
            zero=dataclasses.replace(of_group, dtype="int8", std=0) if scheme.zero else None,
            minimum=(
                dataclasses.replace(of_group, dtype="float32", std=0) if scheme.minimum else None
            ),
            bits=scheme.bits,
            axes=(RULES[spec.axes[axis] or "embed"], RULES[spec.axes[of_outputs] or "embed"]),
        )


class KVWeights(NamedTuple):
    """One layer's weights for K and V.

    Attributes:
        wk, wv: [d_model, num_kv_heads * head_dim].
        bk, bv: [num_kv_heads * head_dim], or None.
        k_norm: scale [head_dim] of the RMS norm over each head of K, or None.
    """

    wk: jax.Array
    wv: jax.Array
    bk: jax.Array | None
    bv: jax.Array | None
    k_norm: jax.Array | None


class StepInputs(NamedTuple):
    """The T flat tokens that a forward pass computes, of all rows of the batch one after another.

    Attributes:
        tokens: int32 [T], token ids.
        positions: int32 [T], each token's place in its sequence, from 0.
        token_row: int32 [T], the batch row that each token belongs to; the number of rows, or
            more, for padding tokens.
        real: bool [T], False for padding tokens; None if there are none.
    """

    tokens: jax.Array
    positions: jax.Array
    token_row: jax.Array
    real: jax.Array | None = None


class AttentionInput(NamedTuple):
    """What a layer hands to attention, for T flat tokens.

    Attributes:
        q: [T, num_heads, query_dim], rotated if the model rotates.
        k: [T, kv_heads, head_dim], likewise, with as many heads as the pool.
        v: [T, kv_heads, head_dim].
        x: [T, d_model], the input of the QKV projection (what a hidden cache stores).
        weights: how k and v were computed from x; None if the layer has q, k and v fused.
        kind: the layer's kind.
        sinks: [num_heads], a score without a value for each head's softmax, or None.
        group: the layer's group, see `models.layer_groups`.
        gate: [T, num_heads, head_dim], see `ModelConfig.gated`, or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    x: jax.Array
    weights: KVWeights | None
    kind: LayerKind
    sinks: jax.Array | None = None
    group: int = 0
    gate: jax.Array | None = None


class KVProjection(NamedTuple):
    """How each layer computes K and V from `AttentionInput.x`, for caches that store x.

    Apt-Serve, section 4.2:

    K_h = rotate(norm(x @ wk_h + bk_h), position), V_h = x @ wv_h + bv_h

    Attributes:
        weights: weights of each layer.
        norm_eps: epsilon of the norm.
        rotation: float32 [2, max_len, head_dim // 2], cos and sin by position; None if positions
            are not rotated.
    """

    weights: tuple[KVWeights, ...]
    norm_eps: float
    rotation: jax.Array | None


# (carry, layer's slot in its group, inputs) -> (carry, output [T, heads, head_dim, or 2 * halves]),
# or what `recurrence.recur` gives
Attend = Callable[[Carry, LayerIndex, AttentionInput | DeltaInput], tuple[Carry, jax.Array]]

# One layer's attention: input [T, d_model] -> (carry, output [T, d_model]), including the
# projections at both ends
Attention = Callable[[jax.Array], tuple[Carry, jax.Array]]


class Embed(Protocol):
    """A family's function from token ids to the input of its first layer."""

    def __call__(
        self,
        params: Params,
        config: ModelConfig,
        inputs: StepInputs,
        *,
        dtype: DTypeLike,
        mesh: Mesh | None,
    ) -> jax.Array:
        """Returns [T, d_model] in this dtype, which the layers keep. mesh: the devices that the
        parameters are sharded over; None for one."""
        ...


class Layer(Protocol):
    """A family's function for any one of its layers."""

    def __call__(
        self,
        weights: Params,
        config: ModelConfig,
        x: jax.Array,
        attention: Attention,
        *,
        real: jax.Array | None,
        mesh: Mesh | None,
    ) -> tuple[Carry, jax.Array]:
        """Returns the carry of attention, and x [T, d_model] after the layer. weights: the layer's
        own tree. `attention` must be called once. real: as in `StepInputs`; outputs for padding do
        not matter. mesh: as in `Embed`."""
        ...


class Finish(Protocol):
    """A family's function after its last layer, such as the final norm. It works row by row, so it
    may run on chosen rows only."""

    def __call__(
        self, params: Params, config: ModelConfig, x: jax.Array, *, mesh: Mesh | None
    ) -> jax.Array:
        """Turns the last layer's output x [R, d_model] into the input of the output embedding, [R,
        its width]. mesh: as in `Embed`."""
        ...


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: the functions the engine and the loader need.

    Attributes:
        name: the family's name, as in `ModelConfig.family`.
        model_types: the `model_type` values of a Hugging Face config.json that it runs.
        prefix: the prefix of tensor names that some checkpoints leave out.
        config_from_hf: config.json as a dict -> config; ValueError names an unsupported field.
        leaves: config -> tree of `Leaf`, structured as the parameters: `embed_tokens` and, unless
            tied, `lm_head`, each [vocab_size, width]; `layers`, a tuple of trees, each with an
            `AttentionParams`, a `LatentAttention` or a `DeltaParts` called `attn`; and whatever the
            functions below need. It has the form of checkpoints; see `jaxserve.models.fused` for
            the form in steps.
    """

    name: str
    model_types: tuple[str, ...]
    prefix: str
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    leaves: Callable[[ModelConfig], Params]
    embed: Embed
    layer: Layer
    finish: Finish

    def param_specs(self, config: ModelConfig) -> Params:
        """Shapes and axes of a checkpoint's parameters: a tree of `ParamSpec` with their structure.
        Raises ValueError if groups of the quantisation do not divide a weight."""
        return jax.tree.map(lambda leaf: leaf.stored(config.quantization), self.leaves(config))

    def hf_layout(self, config: ModelConfig) -> Params:
        """The parameters' places in a Hugging Face checkpoint: a tree of `HFTensor` with the
        structure of the unquantised parameters."""
        return jax.tree.map(lambda leaf: leaf.source, self.leaves(config))

    def joined_tensor(self, config: ModelConfig) -> str | None:
        """A tensor of its checkpoints that contains several parameters; None if there is none."""
        sources: list[HFTensor] = jax.tree.leaves(self.hf_layout(config))
        return next((source.name for source in sources if source.rows or source.columns), None)

    def stacked_tensor(self, config: ModelConfig) -> str | None:
        """The name of tensors of its checkpoints that make one parameter together; None if there
        are none."""
        sources: list[HFTensor] = jax.tree.leaves(self.hf_layout(config))
        return next((source.name for source in sources if source.stacked), None)

    def num_params(self, config: ModelConfig) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(leaf.spec.size for leaf in jax.tree.leaves(self.leaves(config)))


def with_wide_head(family: Family, config: ModelConfig) -> ModelConfig:
    """The model with an unquantised output table, if the table is quantised in groups and can be
    loaded wide."""
    quantization, leaves = config.quantization, family.leaves(config)
    head: Leaf = leaves.embed_tokens if config.tied else leaves.lm_head
    scheme = head.scheme(quantization)
    if quantization is None or not quantization.dequantizable or scheme is None or not scheme.group:
        return config
    wide = dataclasses.replace(quantization, wide=(*quantization.wide, head.name))
    return dataclasses.replace(config, quantization=wide)


def with_quantization(family: Family, config: ModelConfig, text: str) -> ModelConfig:
    """The model with weights quantised by `parse_quantization`; "" leaves them as they are stored,
    "none" makes them wide.

    Raises:
        ValueError: If the text is invalid, the model's weights are already quantised in a way that
            can only be read as it is, or groups do not divide a weight.
    """
    if not text:
        return config
    quantization = None if text == NONE else parse_quantization(text)
    if config.quantization is not None and not config.quantization.dequantizable:
        raise ValueError(f"the checkpoint's weights are quantised already, not to be made {text!r}")
    config = dataclasses.replace(config, quantization=quantization)
    family.param_specs(config)
    return config
