"""The interface of a backend of kernels, the registry of backends, and their names."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from jaxserve.pallas_kernels.batch import KV


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What a token's keys and values are, and how products q . k become scores, see
    `attention.paged_attention`.

    Attributes:
        scale: Factor of the products.
        sliding_window: Positions that a token sees, its own included; None for all.
        soft_cap: Bound of tanh capping; None for no cap.
        both_ways: Whether tokens also see later tokens of the step's context.
        halves: Leading elements of K, and of V, that are a token's value; these and the rest of
            both are its key. 0: K is the key, and V the value.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    both_ways: bool = False
    halves: int = 0


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """The model and pool dimensions that kernels are compiled for.

    Attributes:
        num_heads: Query heads of one shard.
        kv_heads: KV heads of one shard.
        head_dim: Elements of a head in the pool.
        block_size: Tokens of a block.
        dtype: Dtype of the pool.
        sinks: Whether heads have sinks, see `attention.paged_attention`.
        halves: See `Scoring`.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: DTypeLike
    sinks: bool = False
    halves: int = 0


class ScaleOps(NamedTuple):
    """A backend's functions for the scales of an int8 pool, float32 [layers, blocks, kv_heads,
    block_size], of one shard; as its functions of the same names for vectors.

    Attributes:
        write: (scales, layer, k, v, x, batch, plan) -> scales, with k, v and x [T, kv_heads]; the
            plan is that of the values.
        move: (scales, moves, count) -> scales.
        stage_out: (scales, slots, count) -> [M, layers, kv_heads].
        stage_in: (scales, staging, slots, count) -> scales.
    """

    write: Callable[..., jax.Array]
    move: Callable[..., jax.Array]
    stage_out: Callable[..., jax.Array]
    stage_in: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Backend:
    """The kernels of one backend.

    All see one shard's heads. Shapes and meaning are those of the functions of the same purpose in
    `attention` and `move`. `layer` is a traced index into the whole pool. If a plan function is
    None, its kernels take no `plan`.

    Attributes:
        write: (pool, layer, k, v, x, batch, plan) -> pool. x is None if no row can be hidden.
        attend: (q, pool, layer, batch, plan, *, scoring, decode_only, sinks) -> [T, H, D] for KV
            rows; zeros for tokens of other rows and padding. sinks: float32 [H], or None.
        absorbed: (qx, pool, layer, batch, plan, *, scoring, axis_name) -> [T, H, E] for hidden
            decodes; zeros elsewhere. axis_name: the mesh axis over which qx, x and the result are
            cut along E and scores are summed; None for no cut.
        projected: (q, pool, layer, batch, projection, plan, *, scoring, decode_only) -> [T, H, D]
            for hidden rows, decodes and chunks; zeros elsewhere. The pool's blocks are whole (all
            of x) even if q and projection have only a shard's heads.
        move: (pool, moves, count) -> pool.
        stage_out: (pool, slots, count) -> staging.
        stage_in: (pool, staging, slots, count) -> pool.
        scales: Its functions for scales.
        supports: (kind, shape) -> None, or why the kernels of this cache kind cannot run that
            shape.
        plan: (kind, batch, pool's shape, pool's dtype, num_heads, *, sliding_window, decode_only)
            -> the plan, a tree of arrays that serves all layers of a step: of kind KV for `attend`,
            of HIDDEN for `projected`. With `halves` it is given those, too, if there are any.
        plan_absorbed: (batch, pool's shape, pool's dtype, num_heads, *, sliding_window) -> the plan
            for `absorbed`.
        plan_write: (batch, pool's shape, pool's dtype, *, hidden) -> the plan for `write`. hidden:
            x is given.
        argmax: (scores) -> [R], see `argmax.argmax`. None: XLA's operations are used.
        skinny_matmul: (rows, weights, *, transposed) -> the kernel of such a product, which takes
            (x, weights, *, transposed) as `skinny_matmul.skinny_matmul`, or None if it has none.
            None: the backend has no such kernels.
        by_columns: (weights [in, out]) -> whether few rows are multiplied faster if these are kept
            as [out, in], and many rows as fast. None: never.
        quantized_matmul: (x, q, scale, zero, *, transposed, dtype), of which only shapes and dtypes
            are asked -> the kernel of such a product on one device, which takes (x, q, scale, zero)
            as `quantized_matmul.quantized_matmul` and returns [T, out] in this dtype or float32, or
            None if it has none. None: the backend has no such kernels.
        grouped_matmul: (weights, *, transposed) -> the kernel of products with these, which takes
            (x, weights, group_sizes) as `grouped_matmul.grouped_matmul`, x in the weights' dtype,
            and returns float32 [T, out], or None if it has none. None: the backend has no such
            kernels.
        quantized_grouped_matmul: (x, q, scale, *, transposed), of which only shapes and dtypes are
            asked -> the kernel of such products, which takes (x, q, scale, zero, group_sizes) as
            `grouped_matmul.quantized_grouped_matmul`, or None if it has none. None: the backend has
            no such kernels.
        add_low_rank: (a), of which only shape and dtype are asked -> the kernel of such products on
            one device, which takes what `low_rank.add_low_rank` does, or None if it has none. None:
            the backend has no such kernels.
        widened_rows: From so many rows of x on, `quantized_matmul` writes the weights out in x's
            dtype, those of one product at a time. None: never.
        adds_minimums: `quantized_matmul`'s kernels also take the groups' minimums, after the zero
            points.
        batch_invariant: a row's bits depend neither on the number nor on the values of other rows;
            see `fixed_batches.in_fixed_batches`.
        norm: (x, *weights), of which only dtypes are asked -> the kernel of such norms on one
            device, which takes (x [T, D], scale, bias, *, eps, offset, centred: whether the mean is
            subtracted first) and returns float32 [T, D], or None if it has none. None: the backend
            has no such kernels.
        log_sum_exp: (float32 [R, V]) -> [R], see `norm.log_sum_exp`. None: XLA's operations are
            used.
        angles: (positions, frequencies, amplitude) -> float32 [T, n] each, see `rotary.angles`.
            None: XLA's operations are used.
        rotate: (x), of which only the dtype is asked -> the kernel of such rotations on one device,
            which takes (x, cos [T, n], sin [T, n]) as `rotary.rotate`, or None if it has none.
            None: the backend has no such kernels.
        gated: (gate, up), of which only dtypes are asked -> the kernel of such activations on one
            device, which takes what `gates.gated` does, or None if it has none. None: the backend
            has no such kernels.
        add_weighted: (y), of which only the dtype is asked -> the kernel of such sums on one
            device, which takes what `weighted.add_weighted` does, without any None, or None if it
            has none. None: the backend has no such kernels.
        built_for: () -> the processor and the instructions that its kernels are compiled for. None:
            they only depend on the kind of device.
        xla_options: Names and values of XLA's options for steps with its kernels.
        both_ways: `attend` takes such scoring.
        halves: `attend` takes such scoring, with one KV head a shard. Its result is then [T, H, 2 *
            halves].
        recur: (values, layer, inputs, rows) -> (values, out) as `recurrence.recur`, for the values
            of one shard's pool. None: XLA's operations are used.
        decode_group: Rows that decodes read together, sorted by length: each costs as much as the
            longest.
        decode_chunk: Approximate tokens of K and V that such a group reads at once.
    """

    write: Callable[..., jax.Array]
    attend: Callable[..., jax.Array]
    absorbed: Callable[..., jax.Array]
    projected: Callable[..., jax.Array]
    move: Callable[..., jax.Array]
    stage_out: Callable[..., jax.Array]
    stage_in: Callable[..., jax.Array]
    scales: ScaleOps
    supports: Callable[[int, KernelShape], str | None]
    plan: Callable[..., Any] | None = None
    plan_absorbed: Callable[..., Any] | None = None
    plan_write: Callable[..., Any] | None = None
    argmax: Callable[[jax.Array], jax.Array] | None = None
    skinny_matmul: Callable[..., Callable[..., jax.Array] | None] | None = None
    by_columns: Callable[[jax.Array], bool] | None = None
    quantized_matmul: Callable[..., Callable[..., jax.Array] | None] | None = None
    grouped_matmul: Callable[..., Callable[..., jax.Array] | None] | None = None
    quantized_grouped_matmul: Callable[..., Callable[..., jax.Array] | None] | None = None
    add_low_rank: Callable[..., Callable[..., jax.Array] | None] | None = None
    widened_rows: int | None = None
    adds_minimums: bool = False
    batch_invariant: bool = False
    norm: Callable[..., Callable[..., jax.Array] | None] | None = None
    log_sum_exp: Callable[[jax.Array], jax.Array] | None = None
    angles: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    rotate: Callable[[jax.Array], Callable[..., jax.Array] | None] | None = None
    gated: Callable[..., Callable[..., jax.Array] | None] | None = None
    add_weighted: Callable[[jax.Array], Callable[..., jax.Array] | None] | None = None
    built_for: Callable[[], str] | None = None
    xla_options: tuple[tuple[str, Any], ...] = ()
    both_ways: bool = False
    halves: bool = False
    recur: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    decode_group: int = 1
    decode_chunk: int = 1

    def chunk_tokens(self, block_size: int, width: int) -> int:
        """decode_chunk rounded to whole blocks, at most the `width` blocks of a table."""
        return block_size * min(max(1, self.decode_chunk // block_size), width)


# Name -> module here and its attribute, imported when the backend is first chosen: a machine
# without a GPU need not have the libraries of its kernels. The -interpret backends run anywhere,
# slowly: for tests.
BACKENDS: dict[str, tuple[str, str]] = {
    "xla": ("xla.backend", "BACKEND"),
    "numba": ("cpu.backend", "BACKEND"),
    "triton": ("gpu_triton.backend", "BACKEND"),
    "tpu": ("tpu.backend", "BACKEND"),
    "mosaic-gpu": ("gpu_mosaic.backend", "BACKEND"),
    "mosaic-gpu-decodes": ("gpu_mosaic.backend", "DECODES_BACKEND"),
    "mosaic-gpu-prompts": ("gpu_mosaic.backend", "PROMPTS_BACKEND"),
    "triton-interpret": ("gpu_triton.backend", "INTERPRET_BACKEND"),
    "mosaic-gpu-interpret": ("gpu_mosaic.backend", "INTERPRET_BACKEND"),
    "tpu-interpret": ("tpu.backend", "INTERPRET_BACKEND"),
}
# Variants with a fixed order of sums for each query's attention, whatever else is in its batch,
# however its prompt is cut, and whether it belongs to a prompt: `deterministic_backend`.
_DETERMINISTIC = {
    f"{name}-deterministic": (module, f"DETERMINISTIC_{attribute}")
    for name, (module, attribute) in BACKENDS.items()
    if module in ("gpu_triton.backend", "tpu.backend")
}


class Rivals(NamedTuple):
    """Names of backends with other kernels for the same pools.

    Attributes:
        decodes: With other kernels for steps of decodes alone.
        prompts: With others for chunks of prompts.
        both: With both.
    """

    decodes: str
    prompts: str
    both: str

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self)


# Those that a start measures where "auto" stands for the first.
RIVALS = {"triton": Rivals("mosaic-gpu-decodes", "mosaic-gpu-prompts", "mosaic-gpu")}
_DETERMINISTIC |= {
    f"{name}-deterministic": _DETERMINISTIC[f"{usual}-deterministic"]
    for usual, others in RIVALS.items()
    for name in others.names
}
# Platforms of backends that do not run everywhere. "auto" takes the first that fits, or one of its
# rivals.
PLATFORMS = {"triton": "gpu", "tpu": "tpu", "numba": "cpu"}
PLATFORMS |= {name: PLATFORMS[usual] for usual, others in RIVALS.items() for name in others.names}
# Required compute capability: Ampere or later; only Hopper for kernels with wgmma.
CAPABILITIES: dict[str, tuple[float, float | None]] = {
    "triton": (8.0, None),
    **dict.fromkeys(RIVALS["triton"].names, (9.0, 9.0)),
}


_COMPILING = contextvars.ContextVar("backend of the first device", default="auto")


def resolve_backend(name: str) -> str:
    """The backend that a configured name stands for.

    "auto" is triton on GPUs from sm_80 up, tpu on TPUs, numba on CPUs if it is installed, and xla
    elsewhere.

    Raises:
        ValueError: An unknown name.
    """
    if name == "auto":
        return _by_platform()
    if name not in BACKENDS:
        raise ValueError(f"backend: must be auto or one of {sorted(BACKENDS)}, got {name!r}")
    return name


def rivals(usual: str, shape: KernelShape) -> Rivals | None:
    """The rivals of a backend, if the first device runs them and they support the shape."""
    found = RIVALS.get(usual)
    if found is None or _misplaced(found.both) is not None:
        return None
    return found if unsupported(get_backend(found.both), KV, shape) is None else None


def deterministic_backend(name: str) -> str | None:
    """The name of the variant of a backend whose attention has a fixed order of sums, and is
    slower; None if there is none. The functions here take the name, the configuration does not."""
    variant = f"{name}-deterministic"
    return variant if variant in _DETERMINISTIC else None


def _by_platform() -> str:
    return next((name for name in PLATFORMS if _misplaced(name) is None), "xla")


def _misplaced(name: str) -> str | None:
    """Why a backend cannot run on the first device, or None."""
    device, wanted = jax.devices()[0], PLATFORMS.get(name)
    if wanted not in (None, device.platform):
        return f"{name} needs a {wanted}, this is a {device.platform}"
    if name == "numba" and importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install numba"
    if wanted != "gpu":
        return None
    oldest, newest = CAPABILITIES[name]
    try:
        capability = float(device.compute_capability)
    except ValueError:  # AMD's are named
        return f"{name} needs a gpu of NVIDIA's, this is a {device.compute_capability}"
    if oldest <= capability <= (newest or capability):
        return None
    which = f"{oldest} or newer" if newest is None else f"{oldest}"
    return f"{name} needs a gpu of compute capability {which}, this one has {capability}"


def _unusable() -> str | None:
    """Why the first device does not run the kernels of its platform; None if there are none."""
    platform = jax.devices()[0].platform
    return next((_misplaced(name) for name, its in PLATFORMS.items() if its == platform), None)


def get_backend(name: str) -> Backend:
    """The backend of a name, "auto" included (see `resolve_backend`)."""
    return _load(name if name in _DETERMINISTIC else resolve_backend(name))


@functools.cache
def _load(name: str) -> Backend:
    module, attribute = (BACKENDS | _DETERMINISTIC)[name]
    backend = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    assert isinstance(backend, Backend)
    return backend


def platform_backend() -> Backend:
    """The first device's own backend, for kernels that do not touch the pool: these do not depend
    on the backend for attention."""
    return get_backend(_COMPILING.get())


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Makes this the first device's own backend, while programs are compiled for a device that is
    not present."""
    token = _COMPILING.set(name)
    try:
        yield
    finally:
        _COMPILING.reset(token)


def unsupported(backend: Backend, kind: int, shape: KernelShape) -> str | None:
    """Why a backend's kernels of this cache kind cannot run that shape; None if they can."""
    if shape.halves and not backend.halves:
        return "it has no kernels for latent caches"
    return backend.supports(kind, shape)


def select_backend(name: str, kinds: tuple[int, ...], shape: KernelShape) -> tuple[str, str | None]:
    """Chooses the backend for a model.

    Args:
        name: The configured name, or "auto".
        kinds: Cache kinds to be served.
        shape: The model's shape.

    Returns:
        (The backend's name, None), or ("xla", the reason) for "auto" if the platform's own kernels
        do not run or do not support the shape.

    Raises:
        ValueError: An unknown name, or one other than "auto" that the first device does not run or
            that does not support the shape.
    """
    chosen = resolve_backend(name)
    misplaced = _misplaced(chosen)
    if misplaced is not None:
        raise ValueError(f"backend: {misplaced}")
    if name == "auto" and chosen == "xla":
        return chosen, _unusable()
    for kind in kinds:
        reason = unsupported(get_backend(chosen), kind, shape)
        if reason is None:
            continue
        if name == "auto":
            return "xla", f"{chosen}: {reason}"
        raise ValueError(f"backend: {chosen} cannot serve this model: {reason}")
    return chosen, None
