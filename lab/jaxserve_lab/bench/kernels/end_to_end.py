"""A whole model with random weights: a decode step against its byte floor, with each kind of cache,
and the engine's throughput."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench import runs
from jaxserve.bench.load_target import EngineTarget
from jaxserve.config import Config
from jaxserve.engine.device.batch_layout import Layout, Rows
from jaxserve.engine.device.model_step import make_model_step
from jaxserve.engine.device.sampling_state import Newest
from jaxserve.engine.device.step_model import StepModel
from jaxserve.engine.startup.build import build_engine
from jaxserve.engine.startup.choices.pool_size import choose_block_size
from jaxserve.models.base import Family, ModelConfig, Params, with_quantization
from jaxserve.models.registry import get_family
from jaxserve.pallas_kernels import HIDDEN, KV, pool_format
from jaxserve.pallas_kernels.pool import Pool
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cache.cache_kinds import ABSORBED
from jaxserve.weights import fuse_loaded, load_params, transpose_loaded
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.kernel_inputs import Heads
from jaxserve_lab.bench.kernels.mixtures import unread_bytes

Step = Callable[[Params, Pool, jax.Array], tuple[Pool, jax.Array]]


@dataclass(frozen=True)
class StepSize:
    """A decode step of a preset's model.

    Attributes:
        model: A preset's name, or "tiny".
        rows: Requests.
        context: Cached tokens of each request, this step's included.
        block_size: Tokens of a block.
        dtype: Dtype of weights and pool, unless the next two are set.
        quantization: The weights' quantization, as in `model.quantization`.
        cache: Dtype of the pool.
    """

    model: str
    rows: int = 64
    context: int = 512
    block_size: int = 16
    dtype: str = "bfloat16"
    quantization: str = ""
    cache: str = ""

    @property
    def weights(self) -> str:
        """How the weights are stored."""
        return self.quantization or self.dtype

    @property
    def cached(self) -> str:
        """The pool's dtype."""
        return self.cache or self.dtype


@dataclass(frozen=True)
class StepTime:
    """A decode step's time and its floor.

    Attributes:
        model, weights, rows, context: As in `StepSize`.
        cache: The cache's kind and dtype, in words.
        seconds: Median time of a step.
        floor_bytes: The least that a step must read: every weight once, except experts that get no
            token, and the cache once.
        floor_seconds: floor_bytes at the measured copy rate.
    """

    model: str
    weights: str
    cache: str
    rows: int
    context: int
    seconds: float
    floor_bytes: int
    floor_seconds: float

    @property
    def times_floor(self) -> float:
        """seconds / floor_seconds: 1 is as fast as memory allows."""
        return self.seconds / self.floor_seconds


def decode_steps(size: StepSize, backend: str, copy_rate: float) -> list[StepTime]:
    """Times decode steps with a KV cache and, if the model supports absorbed reads and has only one
    dtype, with a hidden cache (Apt-Serve section 4.2). copy_rate: bytes/s. Raises ValueError for
    an unknown model."""
    config = inputs.model_config(size.model)
    family = get_family(config.family)
    config = with_quantization(family, config, size.quantization)
    heads = inputs.model_heads(size.model)
    dtype = jnp.dtype(size.dtype)
    params = load_params(None, family, config, dtype=dtype, load_format="random")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if params.lm_head is not None:  # otherwise a step reads the whole table
        weights -= sum(leaf.nbytes for leaf in jax.tree.leaves(params.embed_tokens))
    weights -= unread_bytes(params, config, size.rows)
    vectors = size.rows * size.context * config.num_layers * heads.vector_bytes(size.cached)
    cases = [("KV", KV, 2 * vectors)]
    alike = size.weights == size.cached == size.dtype
    if heads.offers_hidden and not heads.rotary and alike:
        cases.append(("hidden, absorbed", HIDDEN, vectors))
    steps = []
    for name, kind, cached in reversed(cases):
        if kind == KV:  # as in an engine without hidden caches
            params = transpose_loaded(fuse_loaded(params, family, config), dtype)
        floor = weights + cached
        seconds = _step_seconds(size, kind, family, config, heads, params, backend)
        about = (size.model, size.weights, f"{name}, {size.cached}", size.rows, size.context)
        steps.append(StepTime(*about, seconds, floor, floor / copy_rate))
    return steps[::-1]


def _step_seconds(
    size: StepSize,
    kind: int,
    family: Family,
    config: ModelConfig,
    heads: Heads,
    params: Params,
    backend: str,
) -> float:
    blocks = size.rows * int(blocks_for(size.context, size.block_size))
    dtype = jnp.dtype(size.cached)
    pool = inputs.random_pool(heads, config.num_layers, blocks, size.block_size, dtype)
    rows = _decodes(size, kind, np.random.default_rng(0).permutation(blocks))
    placed = pool_format(pool)
    step = _engine_step(family, config, rows, backend, placed, jnp.dtype(size.dtype))
    # Placed like the step's results, so that it is compiled only once.
    pool = jax.device_put(pool, placed)
    tokens = jax.device_put(jnp.ones(size.rows, jnp.int32), pool.sharding)

    def run(pool: Pool, tokens: jax.Array, count: int) -> tuple[Any, Any, float]:
        begin = time.perf_counter()
        for _ in range(count):
            pool, logits = step(params, pool, tokens)
            tokens = _greedy(logits)
        jax.block_until_ready((pool, tokens))
        return pool, tokens, time.perf_counter() - begin

    pool, tokens, _ = run(pool, tokens, 2)  # compiles
    seconds = []
    for _ in range(5):
        pool, tokens, short = run(pool, tokens, 2)
        pool, tokens, long = run(pool, tokens, 12)
        seconds.append((long - short) / 10)
    return statistics.median(seconds)


@jax.jit
def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _decodes(size: StepSize, kind: int, blocks: np.ndarray) -> Rows:
    """The step's rows, whose tokens are the slots' last ones. blocks: ids of K and V for all
    rows."""
    return Rows(
        counts=np.ones(size.rows, np.int64),
        contexts=np.full(size.rows, size.context - 1),
        tables=blocks.reshape(size.rows, 2, -1),
        kind=kind,
        tokens=((),) * size.rows,
        slots=np.arange(size.rows),
        emits=1,
    )


def _engine_step(
    family: Family,
    config: ModelConfig,
    rows: Rows,
    backend: str,
    pool_format: Any,
    dtype: jnp.dtype,
) -> Step:
    """The engine's own step for these rows, without padding."""
    hidden, (count, _, width) = rows.kind == HIDDEN, rows.tables.shape
    layout = Layout(count, count, width, count, True, count if hidden else 0, not hidden)
    placed = jnp.asarray(layout.pack(rows).buffer)
    read = ABSORBED if hidden else None
    model = StepModel(family, config, backend, None, read, activations=dtype)
    step = make_model_step(model, pool_format)

    def run(params: Params, pool: Pool, tokens: jax.Array) -> tuple[Pool, jax.Array]:
        done = step(params, pool, Newest(tokens, tokens), placed, layout=layout)
        return done.pool, done.logits

    return run


@dataclass(frozen=True)
class Load:
    """Requests for `throughput`, submitted at once.

    Attributes:
        model: A preset's name, or "tiny".
        requests: Number of requests.
        input_len: Prompt tokens of each.
        output_len: Output tokens of each.
        dtype: Dtype of weights and pool.
        batch_tokens: The only token bucket of the engine's steps.
    """

    model: str
    requests: int = 128
    input_len: int = 256
    output_len: int = 128
    dtype: str = "bfloat16"
    batch_tokens: int = 1024


def throughput(load: Load, backend: str) -> dict[str, Any]:
    """The engine's throughput with random weights; see `runs.throughput`. It has few buckets, so it
    compiles quickly. Raises ConfigError for a model or backend that the engine does not support."""
    tiny, longest = load.model == inputs.TINY, load.input_len + load.output_len
    blocks = load.requests * int(blocks_for(longest, choose_block_size(0)))
    config = Config().with_fields(
        model__path=str(inputs.TINY_FOLDER) if tiny else "",
        model__preset="" if tiny else load.model,
        model__load_format="random",
        model__dtype=load.dtype,
        engine__attention_backend=backend,
        engine__max_model_len=longest,
        engine__row_buckets=(load.requests,),
        engine__token_buckets=(load.batch_tokens,),
        engine__compilation_cache_dir="",
        cache__num_blocks=blocks,
        scheduler__policy="sarathi",  # there are no targets
        scheduler__max_rows=load.requests,
        scheduler__max_queue=2 * load.requests,
        scheduler__max_batch_tokens=load.batch_tokens,
        scheduler__max_prefill_tokens=load.batch_tokens,
    )
    engine = build_engine(config, progress=False)
    engine.start()
    try:
        target = EngineTarget(engine)
        sizes = (load.requests, load.input_len, load.output_len)
        runs.warm_up(target, *sizes, 0)
        return runs.throughput(target, *sizes, 2, 0)
    finally:
        engine.stop()
