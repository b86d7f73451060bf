"""The jitted model step: runs a padded batch over the pool and returns the logits of each row's
last token.

One function serves prefill, mixed and decode steps; `Layout.decode_only` picks the decode attention
at compile time, `Layout.hidden` whether some rows may have hidden caches. If the batch is marked
greedy, the step also samples its tokens, so that an ordinary batch is one call. All other sampling
is a separate jitted function (`sampling.py`), so that its variants do not multiply the compiled
model steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.engine.device.batch_layout import (
    PLACEHOLDER,
    Layout,
    attention_batch,
    positions,
    state_rows,
)
from jaxserve.engine.device.hidden_cache import attend_hidden, hidden_rows
from jaxserve.engine.device.sampling import sample_greedy
from jaxserve.engine.device.sampling_state import Newest
from jaxserve.engine.device.step_model import StepModel, compiler_options
from jaxserve.engine.device.verification import checked_tokens, slots_of
from jaxserve.models.attention import kv_projection
from jaxserve.models.base import Attend, AttentionInput, LayerIndex, Params, StepInputs
from jaxserve.models.dense import attend_both_ways
from jaxserve.models.forward import forward, logits
from jaxserve.models.lora import BASE, Adapters, with_adapters
from jaxserve.pallas_kernels import (
    DeltaInput,
    Pool,
    deterministic_backend,
    get_backend,
    paged_attention,
    plan_attention,
    plan_write,
    recur,
    write,
)


class StepOutput(NamedTuple):
    """Results of a step.

    Attributes:
        newest: part of the sampling state: updated if the batch is greedy, otherwise unchanged.
        tokens: int32 [R], the likeliest token of each row.
        logits: float32 [R, vocab].
        slots, emit: int32, bool [R], the batch's inputs to sampling.
        checked: the tokens that the logits belong to, if any may be drafts; else None.
        hidden: the last layer's output for all tokens [T, d_model], on every device, for
        `prompt_logprobs_step.py` and `pooling_step.py`; None for a decode step.
    """

    pool: Any
    newest: Any
    tokens: Any
    logits: Any
    slots: Any
    emit: Any
    checked: Any
    hidden: Any


# (params, pool, newest of the sampling state [S], packed batch, adapters if any, *, layout)
ModelStep = Callable[..., StepOutput]


@lru_cache(maxsize=8)
def make_model_step(
    model: StepModel, pool_format: Any, *, deterministic: bool = False
) -> ModelStep:
    """The model's step, jitted over its layouts, either all deterministic or none. The pool is
    donated, and keeps its layout and sharding. Engines of the same model in one process share the
    step and its compilations."""
    if deterministic:
        backend = deterministic_backend(model.backend)
        assert backend is not None
        model = dataclasses.replace(model, backend=backend)
    whole = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())
    options = compiler_options(pool_format, deterministic=deterministic)
    return jax.jit(
        partial(_model_step, model),
        donate_argnames=("pool",),
        static_argnames=("layout",),
        out_shardings=StepOutput(pool_format, whole, whole, None, None, None, whole, whole),
        compiler_options=options | dict(get_backend(model.backend).xla_options),
    )


def _model_step(
    model: StepModel,
    params: Params,
    pool: Pool,
    newest: Newest,
    packed: jax.Array,
    adapters: Adapters | None = None,
    *,
    layout: Layout,
) -> StepOutput:
    fields = layout.unpack(packed)
    groups = range(layout.planes // 2)
    batches = [attention_batch(fields, drafts=layout.drafts, group=group) for group in groups]
    batch = batches[0]
    if adapters is not None:
        numbers = _of_tokens(fields["adapters"], fields["token_row"], layout)
        params = with_adapters(params, adapters, numbers, layout.lora)
    config, mesh = model.config, model.mesh
    how = kv_projection(params, config, model.max_len) if layout.hidden else None
    where: dict[str, Any] = {"backend": model.backend, "mesh": mesh}
    options = {"decode_only": layout.decode_only, **where}
    plans = {
        (group, window): plan_attention(
            pool,
            batches[group],
            config.num_heads,
            sliding_window=window,
            halves=config.halves,
            **options,
        )
        for group, window in (_planned(model) if layout.kv else ())
    }
    scoring: dict[str, Any] = {"scale": config.attn_scale, "soft_cap": config.soft_cap}
    scoring["halves"] = config.halves
    dense = not (config.causal or get_backend(model.backend).both_ways)
    if not (config.causal or dense):
        scoring["both_ways"] = True
    puts = [
        plan_write(pool, each, hidden=how is not None, backend=model.backend) for each in batches
    ]
    rows = hidden_rows(pool, batch, model, layout) if layout.hidden else None

    def attend(
        pool: Pool, layer: LayerIndex, inputs: AttentionInput | DeltaInput
    ) -> tuple[Pool, jax.Array]:
        if isinstance(inputs, DeltaInput):
            return _recur(model, pool, layer, inputs, fields, layout)
        x = None if how is None else inputs.x.reshape(inputs.k.shape)
        k, v = inputs.k, inputs.v
        if x is not None and not layout.kv:
            k = v = x  # not read, so that the new tokens' own need not be computed
        mine, put = batches[inputs.group], puts[inputs.group]
        pool = write(pool, layer, k, v, mine, x=x, halves=config.halves, plan=put, **where)
        out = jnp.zeros_like(inputs.q)
        if layout.kv:
            window = inputs.kind.sliding_window
            masks = {"sliding_window": window, "plan": plans[inputs.group, window], **scoring}
            masks["sinks"] = inputs.sinks
            out = paged_attention(inputs.q, pool, layer, mine, **masks, **options)
        if rows is not None and how is not None:
            out = attend_hidden(out, inputs, pool, layer, rows, how, model)
        return pool, out

    tokens = _feed(fields, newest.last_token)
    rows_of = fields["token_row"]
    attention: Attend = attend
    if dense:  # prompts are whole, and their cache is not read
        attention = attend_both_ways(config, rows_of, positions(fields))
    inputs = StepInputs(tokens, positions(fields), rows_of, rows_of < fields["slots"].shape[0])
    pool, x = forward(
        model.family,
        params,
        config,
        inputs,
        attention,
        pool,
        dtype=model.activations,
        mesh=mesh,
        groups=model.groups,
    )
    wanted = x if layout.decode_only else x[fields["last"]]
    found = logits(model.family, params, config, wanted, mesh=mesh)
    slots, emit, checked = fields["slots"], fields["emit"] != 0, None
    if layout.drafts:
        slots, checked = slots_of(fields), checked_tokens(fields, tokens)
    greedy = emit & (fields["greedy"] != 0)
    newest, sampled = sample_greedy(newest, found, slots, greedy, checked)
    hidden = None if layout.decode_only else x
    return StepOutput(pool, newest, sampled, found, slots, emit, checked, hidden)


def _recur(
    model: StepModel,
    pool: Pool,
    layer: LayerIndex,
    inputs: DeltaInput,
    fields: dict[str, jax.Array],
    layout: Layout,
) -> tuple[Pool, jax.Array]:
    """`recur` for the rows of a batch."""
    assert model.groups is not None
    rows = state_rows(fields, layout, inputs.group, model.groups.state)
    return recur(pool, layer, inputs, rows, backend=model.backend, mesh=model.mesh)


def _planned(model: StepModel) -> dict[tuple[int, int | None], None]:
    """The groups of the model's layers, with their windows."""
    kinds = model.config.layer_kinds
    places = [(0, 0)] * len(kinds) if model.groups is None else model.groups.places
    return dict.fromkeys(
        (group, kind.sliding_window)
        for kind, (group, _) in zip(kinds, places, strict=True)
        if not kind.state
    )


def _of_tokens(adapters: jax.Array, token_row: jax.Array, layout: Layout) -> jax.Array:
    """Each token's adapter, int32 [T], from that of its row; none for padding."""
    if layout.decode_only:
        return adapters
    return adapters.at[token_row].get(mode="fill", fill_value=BASE)


def _feed(fields: dict[str, jax.Array], last_token: jax.Array) -> jax.Array:
    """The step's input tokens, with placeholders replaced by the last token sampled in their
    slot."""
    row = jnp.minimum(fields["token_row"], fields["slots"].shape[0] - 1)
    slot = jnp.minimum(fields["slots"][row], last_token.shape[0] - 1)
    tokens = fields["tokens"]
    return jnp.where(tokens == PLACEHOLDER, last_token[slot], tokens)
