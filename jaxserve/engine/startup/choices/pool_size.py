"""How many blocks the pool gets. Decided before anything is loaded or compiled."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.config import ConfigError
from jaxserve.engine.device.cache_moves import STAGED_SLOTS
from jaxserve.engine.device.step_model import GPUS
from jaxserve.engine.startup.choices.device_memory import free_memory
from jaxserve.models.base import ModelConfig
from jaxserve.models.layer_groups import LayerGroups, groups_beside, pool_layers
from jaxserve.pallas_kernels import block_bytes, default_block_size, slot_bytes
from jaxserve.pallas_kernels.pool import MOST_NARROW
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cache.groups.groups import peak_blocks

GIB = 1 << 30
_LITTLE = 16  # part of the memory that a pool may take for nothing
_MODEST = 4  # part of it that a modest pool takes, and requests of full length that it holds


@dataclass(frozen=True)
class Demand:
    """What is asked of the pool. Bytes are per device.

    Attributes:
        num_blocks: blocks; 0 for as many as fit and are useful.
        block_size: tokens of a block.
        memory_bytes: for the pool alone; 0 for what the device has left.
        memory_fraction: part of the device's free memory that may be used in all.
        max_rows: requests in a batch.
        max_model_len: tokens of the longest request.
        max_batch_tokens: tokens of a batch.
        modest: if no size is configured, take only part of the free memory, since a host also runs
            other programs.
        groups: the groups of layers with block lists of their own; None if all share one.
    """

    num_blocks: int
    block_size: int
    memory_bytes: int
    memory_fraction: float
    max_rows: int
    max_model_len: int
    max_batch_tokens: int
    modest: bool = False
    groups: LayerGroups | None = None


@dataclass(frozen=True)
class Room:
    """How many blocks are possible.

    Attributes:
        allowed: blocks that the pool may have, at least a pair.
        free: blocks that the device has memory for.
        gap: the pool's array has as many blocks as the first number, or more than the second; see
            `pallas_kernels.pool.exceeds_index_range`.
    """

    allowed: int
    free: int
    gap: tuple[int, int] = (0, 0)


def choose_block_size(wanted: int) -> int:
    """Tokens of a block. wanted: cache.block_size, 0 for what suits the device."""
    return wanted or default_block_size(jax.default_backend())


def pool_room(
    demand: Demand,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    activations: DTypeLike | None = None,
    weights: int,
    pool_heads: int,
    shards: int,
    other_work: int = 0,
    device: tuple[str, int] | None = None,
    platform: str | None = None,
) -> Room:
    """How large the pool can be.

    Args:
        demand: what is asked for.
        config: the model.
        dtype: of the pool.
        activations: dtype of activations; None for the pool's.
        weights: bytes of weights on each device.
        pool_heads: KV heads of the whole pool.
        shards: devices that share each layer.
        other_work: bytes that hidden caches and moves need beside the pool, see `hidden_workspace`
            and `moving_workspace`.
        device: name and free bytes of each device; None for this process's devices.
        platform: kind of device; None for this process's.

    Raises:
        ConfigError: it does not fit. The message says what would.
    """
    layers, width = pool_layers(config, demand.groups), config.cached_dim(dtype)
    block = block_bytes(
        layers,
        pool_heads // shards,
        demand.block_size,
        width,
        dtype,
        platform or jax.default_backend(),
    )
    work = _workspace(demand, config, shards, jnp.dtype(activations or dtype).itemsize)
    work += other_work
    name, total = device or free_memory()
    left = int(total * demand.memory_fraction) - weights - work
    budget = min(left, demand.memory_bytes) if demand.memory_bytes else left
    if demand.memory_bytes > left > 0:
        raise ConfigError(
            f"cache.memory_gib: {_gib(demand.memory_bytes)} asked for, but weights and workspace "
            f"leave {_gib(left)} on {name}"
        )
    fits, pair = max(budget, 0) // block, _held(demand, 1)
    if fits < pair:
        raise ConfigError(
            f"the model does not fit: weights {_gib(weights)} and workspace {_gib(work)} leave "
            f"nothing of the {_gib(total)} that are free on {name}, of which cache.memory_fraction="
            f"{demand.memory_fraction} may be taken"
            if left <= 0
            else f"cache.memory_gib: {_gib(budget)} hold no block pair of {_gib(pair * block)}"
        )
    if 0 < demand.num_blocks < pair:
        raise ConfigError(
            f"cache.num_blocks={demand.num_blocks}: a token takes {pair} blocks, of K and of V of "
            "each group of layers, and of states"
        )
    if demand.num_blocks > fits:
        raise ConfigError(
            f"cache.num_blocks={demand.num_blocks} needs {_gib(demand.num_blocks * block)}, but "
            f"{_gib(budget)} are left on {name}; at most {fits} blocks of {demand.block_size} "
            "tokens fit"
        )
    gap = (0, 0)
    if (platform or jax.default_backend()) in GPUS and jnp.dtype(dtype).itemsize == 1:
        numbers = layers * pool_heads // shards * demand.block_size * width
        gap = (MOST_NARROW // numbers, 2 * MOST_NARROW // numbers)
    return Room(fits, left // block, gap)


def pool_blocks(demand: Demand, room: Room) -> int:
    """Blocks of the pool: the number asked for, else as many as are allowed and useful.

    A modest pool has room for four requests of full length, or a sixteenth of the free blocks if
    that is more, but at most a quarter of them and one such request. Parts of the memory are
    rounded down to a power of two, so that a start with slightly different free memory finds its
    steps compiled.
    """
    if demand.num_blocks:
        return demand.num_blocks
    useful = demand.max_rows * _held(demand, demand.max_model_len)
    if demand.modest:
        quarter, little = (1 << max(room.free // n, 1).bit_length() - 1 for n in (_MODEST, _LITTLE))
        longest = useful // demand.max_rows
        useful = min(useful, max(longest, min(quarter, max(_MODEST * longest, little))))
    return min(room.allowed, useful)


def _held(demand: Demand, tokens: int) -> int:
    """Most blocks of a request of so many tokens with KV."""
    groups = groups_beside(demand.groups)
    return int(peak_blocks(tokens, demand.block_size, groups, demand.max_batch_tokens))


def most_held(max_rows: int, max_model_len: int, block_size: int) -> int:
    """Blocks that so many requests of full length take with KV. With as many memory is never
    short."""
    return max_rows * int(blocks_for(max_model_len, block_size))


def array_blocks(demand: Demand, room: Room) -> int:
    """Blocks of the pool's array, whose shape is part of every compiled step. Only few sizes are
    used, so that a start with another number of blocks, or beside other programs, can find its
    steps compiled. Smaller than `pool_blocks` only if no number was asked for; the pool is then as
    small.

    Powers of two as long as that is little of the memory; beyond, 16 sizes from one to the next.
    """
    found = _few_sizes(demand, room)
    least, most = room.gap
    return least if demand.num_blocks <= least < found <= most else found


def _few_sizes(demand: Demand, room: Room) -> int:
    blocks = pool_blocks(demand, room)
    power = 1 << (blocks - 1).bit_length()
    if power <= min(room.allowed, room.free // _LITTLE):
        return power
    step = max(1, power // 32)
    above = -(-blocks // step) * step
    if above <= room.allowed:
        return above
    return blocks if demand.num_blocks else blocks // step * step


def hidden_workspace(
    config: ModelConfig, dtype: DTypeLike, *, projected_tokens: int, gathered_tokens: int
) -> int:
    """Bytes that hidden caches need on each device beside the pool, at most.

    Args:
        config: the model.
        dtype: of the pool.
        projected_tokens: tokens whose vectors of all layers are read at once for a projection to
            KV.
        gathered_tokens: tokens whose vectors of one layer every shard gathers to project them; they
            are there twice meanwhile.
    """
    item = jnp.dtype(dtype).itemsize
    if item == 1:  # and float32, which they become before they are projected
        item += 4
    vector = config.d_model * item
    return (projected_tokens * config.num_layers + 2 * gathered_tokens) * vector


def moving_workspace(
    moves: bool,
    config: ModelConfig,
    dtype: DTypeLike,
    heads: int,
    groups: LayerGroups | None = None,
) -> int:
    """Bytes on each device for slots on their way to or from host memory; 0 if none are moved.

    Args:
        moves: whether caches are moved.
        config: the model.
        dtype: of the pool.
        heads: KV heads on each device.
        groups: as in `Demand`.
    """
    return STAGED_SLOTS * _slot_bytes(config, dtype, heads, groups) if moves else 0


def host_slots(
    gib: float,
    used: bool,
    config: ModelConfig,
    dtype: DTypeLike,
    heads: int,
    groups: LayerGroups | None = None,
) -> int:
    """Slots that host memory holds of caches, each of one plane and all layers.

    Args:
        gib: cache.host_gib.
        used: whether anything goes there.
        config: the model.
        dtype: of the pool.
        heads: KV heads that one host keeps.
        groups: as in `Demand`.

    Raises:
        ConfigError: memory is given, but nothing goes there.
    """
    if gib and not used:
        raise ConfigError(
            f"cache.host_gib={gib:g}: the policy makes no checkpoints, and without "
            "cache.prefix_caching, or where layers have windows or states, nothing else goes there"
        )
    return int(gib * GIB // _slot_bytes(config, dtype, heads, groups))


def _slot_bytes(
    config: ModelConfig, dtype: DTypeLike, heads: int, groups: LayerGroups | None
) -> int:
    return slot_bytes(pool_layers(config, groups), heads, config.cached_dim(dtype), dtype)


def _workspace(demand: Demand, config: ModelConfig, shards: int, item: int) -> int:
    """Activations and logits of the largest step, in bytes: a generous estimate."""
    width = 4 * config.d_model + (2 * config.d_ff + 4 * config.d_model) // shards
    if config.latent is not None:  # queries and results of all heads, much wider than x
        width += 3 * config.num_heads * config.query_dim // shards
    if (experts := config.experts) is not None:  # a row of its own for each expert that it goes to
        each = 5 * config.d_model + 2 * -(-experts.d_ff // shards)
        width += experts.experts_per_token * each
    logits = demand.max_rows * config.vocab_size * 4 * 4
    if (net := config.delta) is not None:  # the states of all rows, twice, and what is convolved
        width += 3 * net.key_heads * net.channels * 4 // (item * shards)
        logits += 2 * demand.max_rows * net.key_heads * net.kept * 4 // shards
    return demand.max_batch_tokens * width * item + logits


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
