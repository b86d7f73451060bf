"""The programs that are compiled for a case: the model's steps and each kernel, at the largest
buckets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.buckets import ASKED, make_buckets
from jaxserve.engine.device.hidden_cache import make_project_to_kv
from jaxserve.engine.device.model_step import make_model_step
from jaxserve.engine.device.prompt_logprobs_step import make_prompt_step
from jaxserve.engine.device.sampling_state import Newest
from jaxserve.engine.device.step_model import StepModel, why_not_deterministic
from jaxserve.models import sharding
from jaxserve.models.fused import fused_specs
from jaxserve.models.layer_groups import pool_layers
from jaxserve.models.lora import adapter_specs
from jaxserve.pallas_kernels import (
    AttentionBatch,
    HiddenProjection,
    format_of,
    pool_of,
    staging_shape,
)
from jaxserve.pallas_kernels import attention as attend
from jaxserve.pallas_kernels import move as moving
from jaxserve.sched.cache.cache_kinds import default_hidden_read
from jaxserve.sched.speculation.choice import MOST
from jaxserve_lab.compile_check.case import CompileCase, param_sharding

MOVES = 4096  # slots moved or staged in a launch: 8 requests of 512 tokens
POOL_AXES = ("layers", "blocks", "kv_heads", "slots", "head_dim")


@dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
        name: As the report prints it.
        lower: Traces and lowers it for the case's devices.
        hidden: It reads hidden blocks, so it is only for models that can have them.
        whole: It takes the weights, too, so the device must hold all that it needs.
        host: It must copy to host memory and back asynchronously.
        lora: Rows may have adapters, so it is only for cases with room for them.
        deterministic: No sum's order may depend on other rows, see `analysis.sums`; only for cases
            for which the engine has such a step.
        drafts: Rows may have drafts, so it is not for models with states.
    """

    name: str
    lower: Callable[[CompileCase], jax.stages.Lowered]
    hidden: bool = False
    whole: bool = False
    host: bool = False
    lora: bool = False
    deterministic: bool = False
    drafts: bool = False

    def applies(self, case: CompileCase) -> bool:
        """Whether the case can have such a program."""
        why_not = why_not_deterministic(case.backend, case.config, case.shards, None)
        if self.deterministic and why_not:
            return False
        if self.lora and case.sizes.lora is None:
            return False
        if self.drafts and case.config.delta is not None:
            return False
        return case.offers_hidden or not self.hidden


def _array(case: CompileCase, shape: Sequence[int], dtype: Any, *axes: str | None) -> Any:
    """An abstract array, sharded over the case's mesh by the logical names of its axes."""
    placed = sharding.named(case.mesh, axes) if case.shards > 1 else sharding.named(case.mesh, ())
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=placed)


def _pool(case: CompileCase) -> Any:
    config = case.config
    size = case.sizes.block_size
    layers = pool_layers(config, case.groups)
    width = config.cached_dim(case.cache_dtype)
    shape = (layers, case.blocks, case.pool_heads, size, width)
    return pool_of(shape, case.cache_dtype, _format(case))


def _format(case: CompileCase) -> Any:
    """The format of the pool."""
    placed = _array(case, (1,) * len(POOL_AXES), case.cache_dtype, *POOL_AXES).sharding
    return format_of(case.cache_dtype, placed)


def _params(case: CompileCase, model: StepModel) -> Any:
    specs = case.family.param_specs(case.config)
    if model.fused:
        specs = fused_specs(case.family, case.config, case.shards)
    return _placed(case, specs)


def _adapters(case: CompileCase, model: StepModel) -> Any:
    assert model.lora is not None
    return _placed(case, adapter_specs(case.family, case.config, model.lora, fused=model.fused))


def _placed(case: CompileCase, specs: Any) -> Any:
    """Abstract arrays in place of the specs."""
    mesh = case.mesh if case.shards > 1 else None
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(
            sharding.padded_shape(mesh, spec),
            jnp.dtype(spec.dtype or case.dtype),
            sharding=param_sharding(case.mesh, spec),
        ),
        specs,
    )


def _model(case: CompileCase, *, hidden: bool) -> StepModel:
    """The model of a step. hidden: with caches of both kinds, read as with the engine's `auto`."""
    mesh = case.mesh if case.shards > 1 else None
    read = default_hidden_read(rotary=case.config.rope is not None) if hidden else None
    length = case.config.max_position
    shared = (case.family, case.config, case.backend, mesh, read, length, case.dtype)
    return StepModel(*shared, case.sizes.lora, case.groups)


def _largest_step(case: CompileCase, **options: bool) -> jax.stages.Lowered:
    return _step(case, _layout(case, **options))


def _step(case: CompileCase, layout: Layout) -> jax.stages.Lowered:
    pool, model = _pool(case), _model(case, hidden=layout.hidden > 0)
    step: Any = make_model_step(model, _format(case), deterministic=layout.deterministic)
    newest = Newest(*2 * [_array(case, (layout.slots,), jnp.int32)])
    packed = _array(case, (layout.size,), jnp.int32)
    adapters = [_adapters(case, model)] if layout.lora else []
    lowered: jax.stages.Lowered = step.lower(
        _params(case, model), pool, newest, packed, *adapters, layout=layout
    )
    return lowered


def _deterministic_step(case: CompileCase) -> jax.stages.Lowered:
    return _step(case, dataclasses.replace(case.buckets, deterministic=ASKED).deterministic_step())


def _lora_step(case: CompileCase, *, decode: bool) -> jax.stages.Lowered:
    assert case.sizes.lora is not None
    columns = case.sizes.lora.columns
    return _step(case, dataclasses.replace(_layout(case, decode=decode), lora=columns))


def _draft_step(case: CompileCase) -> jax.stages.Lowered:
    """A step of one request with all possible drafts: the smallest of its kind, and the most unlike
    others."""
    size = case.buckets
    few = make_buckets(size.slots, size.tokens[-1], width=size.width, drafts=True)
    layout = dataclasses.replace(few, planes=size.planes).mixed(MOST + 1)
    return _step(case, layout)


def _prompt_step(case: CompileCase) -> jax.stages.Lowered:
    layout = _layout(case, decode=False)
    hidden = _array(case, (layout.tokens, case.config.d_model), case.dtype, None, None)
    targets = _array(case, (layout.tokens,), jnp.int32)
    model = _model(case, hidden=False)
    step: Any = make_prompt_step(model)
    lowered: jax.stages.Lowered = step.lower(
        _params(case, model), hidden, targets, rows=layout.rows
    )
    return lowered


def _project_to_kv(case: CompileCase) -> jax.stages.Lowered:
    pool, layout = _pool(case), case.buckets.projection_layout()
    packed = _array(case, (layout.size,), jnp.int32)
    model = _model(case, hidden=True)
    program = make_project_to_kv(model, _format(case))
    lowered: jax.stages.Lowered = program.lower(_params(case, model), pool, packed, layout=layout)
    return lowered


def _layout(case: CompileCase, *, decode: bool, hidden: bool = False) -> Layout:
    """The largest step. hidden: with room for hidden caches in all rows, in addition to KV
    caches."""
    rows, tokens = case.sizes.max_rows, case.sizes.max_batch_tokens
    if decode:
        return case.buckets.decode(rows, hidden=max(1, rows - 1) if hidden else 0)
    return case.buckets.mixed(tokens, hidden=min(rows, tokens) if hidden else 0)


def _batch(case: CompileCase, layout: Layout) -> AttentionBatch:
    def of(*shape: int) -> Any:
        return _array(case, shape, jnp.int32)

    rows, tokens = layout.rows, layout.tokens
    per_row = ("context_lens", "query_start", "query_lens", "direction", "kind")
    return AttentionBatch(
        tables=of(rows, 2, layout.width),
        token_row=of(tokens),
        num_decodes=of(),
        num_rows=of(),
        **{name: of(rows) for name in per_row},
    )


def _heads(case: CompileCase, layout: Layout, heads: int, width: int = 0) -> Any:
    """[tokens, heads, width]. width: 0 for head_dim."""
    shape = (layout.tokens, heads, width or case.config.head_dim)
    return _array(case, shape, case.dtype, "tokens", "heads", "head_dim")


def _lower(
    case: CompileCase,
    function: Callable[..., Any],
    *arrays: Any,
    changes: bool = True,
    **options: Any,
) -> Any:
    """Jits a kernel. changes: it writes the pool, its first argument, in place."""
    mesh = case.mesh if case.shards > 1 else None
    bound = functools.partial(function, backend=case.backend, mesh=mesh, **options)
    if not changes or getattr(arrays[0], "ndim", 0) != len(POOL_AXES):
        return jax.jit(bound).lower(*arrays)
    return jax.jit(bound, donate_argnums=0, out_shardings=_format(case)).lower(*arrays)


def _layer(case: CompileCase) -> Any:
    return _array(case, (), jnp.int32)


def _write(case: CompileCase, *, hidden: bool) -> jax.stages.Lowered:
    layout = _layout(case, decode=False)
    new = _heads(case, layout, case.pool_heads)
    arrays = [_pool(case), _layer(case), new, new, _batch(case, layout)]

    def write(pool: Any, layer: Any, k: Any, v: Any, batch: Any, *x: Any, **options: Any) -> Any:
        return attend.write(pool, layer, k, v, batch, x=x[0] if x else None, **options)

    return _lower(case, write, *arrays, *([new] if hidden else []), halves=case.config.halves)


def _options(case: CompileCase) -> dict[str, Any]:
    config = case.config
    return {
        "scale": config.attn_scale,
        "sliding_window": config.layer_kinds[0].sliding_window,
        "soft_cap": config.soft_cap,
    }


def _attention(case: CompileCase, *, decode: bool) -> jax.stages.Lowered:
    layout = _layout(case, decode=decode)
    q = _heads(case, layout, case.config.num_heads, case.config.query_dim)
    arrays = (q, _pool(case), _layer(case), _batch(case, layout))
    options = {"decode_only": decode, "halves": case.config.halves, **_options(case)}
    if not case.config.sinks:
        return _lower(case, attend.paged_attention, *arrays, **options)

    def attention(*arrays: Any, **options: Any) -> Any:
        *given, sinks = arrays
        return attend.paged_attention(*given, sinks=sinks, **options)

    sinks = _array(case, (case.config.num_heads,), case.dtype, "heads")
    return _lower(case, attention, *arrays, sinks, **options)


def _absorbed(case: CompileCase) -> jax.stages.Lowered:
    layout, config = _layout(case, decode=True), case.config
    spec = PartitionSpec(None, None, sharding.TENSOR if case.shards > 1 else None)
    qx = jax.ShapeDtypeStruct(
        (layout.tokens, config.num_heads, config.d_model),
        case.dtype,
        sharding=NamedSharding(case.mesh, spec),
    )
    arrays = (qx, _pool(case), _layer(case), _batch(case, layout))
    return _lower(case, attend.absorbed_attention, *arrays, **_options(case))


def _projected(case: CompileCase, *, decode: bool) -> jax.stages.Lowered:
    layout, config = _layout(case, decode=decode), case.config
    q = _heads(case, layout, config.num_heads)
    weight = _array(case, (config.d_model, config.d_model), case.dtype, "embed", "heads")
    bias = _array(case, (config.d_model,), case.dtype, "heads")
    rotary = config.rope is not None
    table = _array(case, (2, config.max_position, config.head_dim // 2), jnp.float32)
    projection = HiddenProjection(
        wk=weight,
        wv=weight,
        bk=None if rotary else bias,
        bv=None if rotary else bias,
        rotation=table if rotary else None,
    )
    arrays = (q, _pool(case), _layer(case), _batch(case, layout), projection)
    return _lower(case, attend.projected_attention, *arrays, decode_only=decode, **_options(case))


def _move(case: CompileCase) -> jax.stages.Lowered:
    moves = _array(case, (MOVES, 4), jnp.int32)
    return _lower(case, moving.move_slots, _pool(case), moves, _layer(case))


def _stage_out(case: CompileCase) -> jax.stages.Lowered:
    slots = _array(case, (MOVES, 2), jnp.int32)
    return _lower(case, moving.stage_out, _pool(case), slots, _layer(case), changes=False)


def _stage_in(case: CompileCase) -> jax.stages.Lowered:
    pool, slots = _pool(case), _array(case, (MOVES, 2), jnp.int32)
    shape = staging_shape(pool, MOVES)
    staging = _array(case, shape, case.cache_dtype, None, "layers", "kv_heads", "head_dim")
    return _lower(case, moving.stage_in, pool, staging, slots, _layer(case))


def _through_host(case: CompileCase) -> jax.stages.Lowered:
    """A checkpoint and its restore in one, since arguments cannot be in host memory on a topology
    of GPUs. The barrier keeps the two copies from cancelling out."""

    def swap(pool: Any, out: Any, back: Any, count: Any, **options: Any) -> Any:
        staged = moving.stage_out(pool, out, count, **options)
        staged = jax.device_put(staged, jax.memory.Space.Host)
        staged, pool = jax.lax.optimization_barrier((staged, pool))
        staged = jax.device_put(staged, jax.memory.Space.Device)
        return moving.stage_in(pool, staged, back, count, **options)

    slots = _array(case, (MOVES, 2), jnp.int32)
    return _lower(case, swap, _pool(case), slots, slots, _layer(case))


_hidden_step = functools.partial(_largest_step, hidden=True)
_LORA = {"whole": True, "lora": True}
PROGRAMS = (
    Program("decode step", functools.partial(_largest_step, decode=True), whole=True),
    Program("prefill and mixed step", functools.partial(_largest_step, decode=False), whole=True),
    Program("step with drafts", _draft_step, whole=True, drafts=True),
    Program("deterministic step", _deterministic_step, whole=True, deterministic=True),
    Program("decode step with adapters", functools.partial(_lora_step, decode=True), **_LORA),
    Program("mixed step with adapters", functools.partial(_lora_step, decode=False), **_LORA),
    Program("hidden decode step", functools.partial(_hidden_step, decode=True), True, True),
    Program("hidden mixed step", functools.partial(_hidden_step, decode=False), True, True),
    Program("prompt log-probabilities", _prompt_step, whole=True),
    Program("hidden to KV", _project_to_kv, hidden=True, whole=True),
    Program("write", functools.partial(_write, hidden=False)),
    Program("decode attention", functools.partial(_attention, decode=True)),
    Program("prefill attention", functools.partial(_attention, decode=False)),
    Program("write with hidden", functools.partial(_write, hidden=True), hidden=True),
    Program("absorbed", _absorbed, hidden=True),
    Program("projected decode", functools.partial(_projected, decode=True), hidden=True),
    Program("projected prefill", functools.partial(_projected, decode=False), hidden=True),
    Program("move", _move),
    Program("stage out", _stage_out),
    Program("stage in", _stage_in),
    Program("to the host and back", _through_host, host=True),
)


def choose(names: str) -> list[Program]:
    """Programs by a comma-separated list of names, "all", "steps" or "kernels"; ValueError for any
    other."""
    chosen: list[Program] = []
    for name in names.split(","):
        groups = {"all": PROGRAMS, "steps": _whole(True), "kernels": _whole(False)}
        programs = groups.get(name) or [p for p in PROGRAMS if p.name == name]
        if not programs:
            known = ", ".join(["all", "steps", "kernels", *(p.name for p in PROGRAMS)])
            raise ValueError(f"--programs: {name!r} is not one of {known}")
        chosen += [program for program in programs if program not in chosen]
    return chosen


def _whole(whole: bool) -> list[Program]:
    return [program for program in PROGRAMS if program.whole == whole]
