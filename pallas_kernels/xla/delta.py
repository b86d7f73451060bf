"""The recurrence of gated delta nets in plain XLA operations: decodes all at once, prompts token by
token."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.pallas_kernels.delta_net import DeltaInput, DeltaNet, StateRows

EPSILON = 1e-6  # of the norms of Q and K
State = tuple[jax.Array, jax.Array]


def recur(
    pool: jax.Array, layer: jax.Array, inputs: DeltaInput, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """See `recurrence.recur`, for the values of one shard's pool."""
    bits, begins = _bits(pool), rows.context_lens == rows.query_lens
    state = _unpacked(bits[layer, rows.tables[:, 0]], begins, pool.shape[2], inputs.net)
    if rows.decode_only:
        state, out = one_token(inputs, state, inputs.mixed, inputs.gates)
    else:
        state, out = scan(inputs, state, rows.token_row)
    written = _packed(state, bits, rows.tables.shape[2])
    # Rows without tokens write to a block that does not exist: the scatter drops them.
    ids = jnp.where(rows.query_lens[:, None] > 0, rows.tables[:, 1], pool.shape[1])
    after = bits.at[layer, ids].set(written, mode="drop")
    return lax.bitcast_convert_type(after, pool.dtype), out.reshape(len(out), -1, out.shape[-1])


def zeros(net: DeltaNet, rows: int) -> State:
    """The states of so many rows before their first token: the last inputs of the convolution,
    float32 [rows, key_heads, taps - 1, channels], and [rows, key_heads, per_key, key_dim,
    value_dim]."""
    lead = rows, net.key_heads
    return (
        jnp.zeros((*lead, net.taps - 1, net.channels), jnp.float32),
        jnp.zeros((*lead, net.per_key, net.key_dim, net.value_dim), jnp.float32),
    )


def scan(inputs: DeltaInput, state: State, token_row: jax.Array) -> tuple[State, jax.Array]:
    """Updates the rows' states by all tokens in order.

    Args:
        inputs: The layer's, of T tokens.
        state: Of R rows, see `zeros`.
        token_row: int32 [T], the row of each token; R or more for none.

    Returns:
        The states, and float32 [T, key_heads, per_key, value_dim].
    """
    count = len(state[0])

    def step(state: State, token: Any) -> tuple[State, jax.Array]:
        row, *given = token
        at = jnp.minimum(row, count - 1)
        before = tuple(part[at] for part in state)
        after, out = one_token(inputs, before, *given)  # type: ignore[arg-type]
        kept = (
            whole.at[at].set(jnp.where(row < count, new, old))
            for whole, new, old in zip(state, after, before, strict=True)
        )
        return tuple(kept), out  # type: ignore[return-value]

    return lax.scan(step, state, (token_row, inputs.mixed, inputs.gates))


def one_token(
    inputs: DeltaInput, state: State, mixed: jax.Array, gates: jax.Array
) -> tuple[State, jax.Array]:
    """The state after one more token, and what is read from it.

    Args:
        inputs: The layer's, for its weights.
        state: See `zeros`, with any leading axes in place of rows.
        mixed: [..., key_heads, channels].
        gates: [..., key_heads, 2 * per_key].

    Returns:
        The state, and float32 [..., key_heads, per_key, value_dim].
    """
    window, matrix = state
    net, mixed, gates = inputs.net, mixed.astype(jnp.float32), gates.astype(jnp.float32)
    seen = jnp.concatenate([window, mixed[..., None, :]], axis=-2)
    x = jax.nn.silu((seen * jnp.swapaxes(inputs.conv, -1, -2)).sum(axis=-2))
    q, k, v = jnp.split(x, (net.key_dim, 2 * net.key_dim), axis=-1)
    q = _unit(q)[..., None, :, None] * net.key_dim**-0.5
    k = _unit(k)[..., None, :, None]
    v = v.reshape(*v.shape[:-1], net.per_key, net.value_dim)
    strength, forget = jnp.split(gates, 2, axis=-1)
    decay = jnp.exp(-jnp.exp(inputs.rate) * jax.nn.softplus(forget + inputs.shift))
    matrix = matrix * decay[..., None, None]
    change = (v - (matrix * k).sum(axis=-2)) * jax.nn.sigmoid(strength)[..., None]
    matrix = matrix + k * change[..., None, :]
    return (seen[..., 1:, :], matrix), (matrix * q).sum(axis=-2)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + EPSILON)


def _bits(pool: jax.Array) -> jax.Array:
    """The pool as integers: as floating-point numbers, bits of states might be changed."""
    return lax.bitcast_convert_type(pool, jnp.dtype(f"uint{8 * pool.dtype.itemsize}"))


def _unpacked(blocks: jax.Array, begins: jax.Array, heads: int, net: DeltaNet) -> State:
    """Blocks [R, blocks, kv_heads, block_size, head_dim] of bits -> states. begins: bool [R], which
    rows have zeros in place of them."""
    rows, apart = len(blocks), 4 // blocks.dtype.itemsize
    flat = jnp.moveaxis(blocks, 2, 1).reshape(rows, heads, -1)
    words = flat if apart == 1 else flat.reshape(rows, heads, -1, apart)
    own = net.key_heads // heads * net.kept
    numbers = lax.bitcast_convert_type(words, jnp.float32)[..., :own]
    numbers = jnp.where(begins[:, None, None], 0, numbers.reshape(rows, net.key_heads, net.kept))
    matrix, window = jnp.split(numbers, (net.matrix,), axis=-1)
    shapes = (part.shape[2:] for part in zeros(net, 1))
    return tuple(
        part.reshape(rows, net.key_heads, *shape)
        for part, shape in zip((window, matrix), shapes, strict=True)
    )  # type: ignore[return-value]


def _packed(state: State, bits: jax.Array, count: int) -> jax.Array:
    """States -> the bits of so many blocks of a pool with these bits, the rest of them zeros."""
    heads, block = bits.shape[2], bits.shape[3:]
    window, matrix = (part.reshape(*part.shape[:2], -1) for part in state)
    numbers = jnp.concatenate([matrix, window], axis=-1)
    flat = lax.bitcast_convert_type(numbers.reshape(len(numbers), heads, -1), bits.dtype)
    flat = flat.reshape(len(numbers), heads, -1)
    room = count * math.prod(block) - flat.shape[2]
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, room)))
    return jnp.moveaxis(flat.reshape(len(flat), heads, count, *block), 1, 2)
