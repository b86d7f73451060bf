"""The recurrence of gated delta nets on CPUs, by numba. A share is a key head of a row, with all of
the row's tokens, so that its state stays in the core's cache. Each token's sums have one order, in
prompts as in decodes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit

from jaxserve.pallas_kernels.cpu.numba_ffi import (
    INLINE,
    OPTIONS,
    allocate,
    compiled_once,
    copy,
    data,
    data_address,
    dims,
    free,
    int32s,
    pointer,
    register,
)
from jaxserve.pallas_kernels.delta_net import DeltaInput, StateRows
from jaxserve.pallas_kernels.xla.delta import EPSILON

_POOL, _MIXED, _GATES, _CONV, _DECAY, _TABLES, _LENS, _START, _MANY, _INTS, _OUT = (
    *range(10),
    11,
)


def recur(
    pool: jax.Array, layer: jax.Array, inputs: DeltaInput, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """See `recurrence.recur`, for the values of one shard's pool, on one CPU device."""
    net = inputs.net
    sizes = net.key_dim, net.value_dim, net.taps, pool.dtype.itemsize
    read = jax.ShapeDtypeStruct((len(inputs.mixed), net.value_heads, net.value_dim), jnp.float32)
    call = jax.ffi.ffi_call(
        target(),
        (jax.ShapeDtypeStruct(pool.shape, pool.dtype), read),
        input_output_aliases={_POOL: 0},
    )
    after, out = call(
        pool,
        inputs.mixed.astype(jnp.float32),
        inputs.gates.astype(jnp.float32),
        jnp.swapaxes(inputs.conv, 1, 2),
        jnp.stack([inputs.rate, inputs.shift]),
        rows.tables,
        rows.context_lens,
        rows.query_start,
        rows.query_lens,
        jnp.stack([jnp.asarray(layer, jnp.int32), *map(jnp.int32, sizes)]),
    )
    return after, out


@compiled_once
def target() -> str:
    """The name of the kernel, which is compiled at the first call.

    Operands: pool [L, B, P, S, D], which is the first result; mixed [T, K, C]; gates [T, K, 2 * V];
    conv [K, taps, C]; rate and shift [2, K, V]; tables [R, 2, blocks]; context_lens, query_start,
    query_lens [R]; int32 [5]: layer, key_dim, value_dim, taps, bytes of the pool's numbers. Second
    result: [T, K * V, value_dim].
    """
    return register("jaxserve_delta", _plan, _share, __file__)


@njit(**OPTIONS)
def _plan(given: Any) -> Any:
    return dims(given[_TABLES], 3)[0] * dims(given[_MIXED], 3)[1], 0


@njit(**OPTIONS)
def _move(given: Any, row: int, which: int, head: int, first: int, count: int, memory: int) -> None:
    """Copies bytes of a row's state from the pool, or to it.

    Args:
        given: The operands.
        row: The row.
        which: 0 from the blocks before the step, 1 to those behind it.
        head: Head of the pool.
        first, count: Bytes of that head's part of the state.
        memory: Address of the other side.
    """
    rows, _, blocks = dims(given[_TABLES], 3)
    tables = carray(data(given[_TABLES]), (rows, 2, blocks), np.int32)
    pool, ints = dims(given[_POOL], 5), int32s(given[_INTS])
    block = pool[3] * pool[4] * ints[4]
    done = 0
    while done < count:
        at = first + done
        index, inside = at // block, at % block
        some = min(block - inside, count - done)
        place = ((ints[0] * pool[1] + tables[row, which, index]) * pool[2] + head) * block + inside
        if which == 0:
            copy(memory + done, data_address(given[_POOL]) + place, some)
        else:
            copy(data_address(given[_POOL]) + place, memory + done, some)
        done += some


@njit(**INLINE)
def _normed(x: Any, factor: Any) -> None:
    total = np.float32(0)
    for d in range(len(x)):
        total += x[d] * x[d]
    scale = factor / np.sqrt(total + np.float32(EPSILON))
    for d in range(len(x)):
        x[d] *= scale


@njit(**INLINE)
def _convolved(window: Any, new: Any, conv: Any, x: Any) -> None:
    """x [C] becomes what the convolution makes of window [taps - 1, C] and new [C], which goes into
    the window."""
    last = len(window)
    for c in range(len(x)):
        x[c] = new[c] * conv[last, c]
    for tap in range(last):
        for c in range(len(x)):
            x[c] += window[tap, c] * conv[tap, c]
    for c in range(len(x)):
        x[c] = x[c] / (np.float32(1) + np.exp(-x[c]))
    for tap in range(last - 1):
        for c in range(len(x)):
            window[tap, c] = window[tap + 1, c]
    for c in range(len(x) if last else 0):
        window[last - 1, c] = new[c]


@njit(**INLINE)
def _updated(
    matrix: Any, q: Any, k: Any, v: Any, decay: Any, strength: Any, out: Any, change: Any
) -> None:
    """One token's update of a value head.

    Args:
        matrix: float32 [key_dim, value_dim], the recurrent state.
        q, k: float32 [key_dim], of norm 1.
        v: float32 [value_dim].
        decay: Factor on the state.
        strength: How much is written.
        out: float32 [value_dim], gets what q reads.
        change: Memory of the same size.
    """
    width = len(out)
    for e in range(width):
        change[e] = np.float32(0)
        out[e] = np.float32(0)
    for d in range(len(k)):
        line, here = matrix[d], k[d]
        for e in range(width):
            line[e] *= decay
            change[e] += line[e] * here
    for e in range(width):
        change[e] = (v[e] - change[e]) * strength
    for d in range(len(k)):
        line, here, asked = matrix[d], k[d], q[d]
        for e in range(width):
            line[e] += here * change[e]
            out[e] += line[e] * asked


@njit(**OPTIONS)
def _share(given: Any, _: int, i: int) -> None:
    tokens, heads, channels = dims(given[_MIXED], 3)
    ints, pool_heads = int32s(given[_INTS]), dims(given[_POOL], 5)[2]
    row, head = i // heads, i % heads
    count, start = int32s(given[_MANY])[row], int32s(given[_START])[row]
    if count <= 0:
        return
    key_dim, width, taps = int(ints[1]), int(ints[2]), int(ints[3])
    per = dims(given[_GATES], 3)[2] // 2
    mixed = carray(data(given[_MIXED]), (tokens, heads, channels), np.float32)
    gates = carray(data(given[_GATES]), (tokens, heads, 2 * per), np.float32)
    conv = carray(data(given[_CONV]), (heads, taps, channels), np.float32)[head]
    decays = carray(data(given[_DECAY]), (2, heads, per), np.float32)[:, head]
    out = carray(data(given[_OUT]), (tokens, heads, per, width), np.float32)
    whole = per * key_dim * width
    kept = whole + (taps - 1) * channels
    memory = allocate((kept + channels + width + 1) // 2)
    state = carray(pointer(memory), (kept,), np.float32)
    matrices = carray(pointer(memory), (per, key_dim, width), np.float32)
    window = carray(pointer(memory + 4 * whole), (taps - 1, channels), np.float32)
    x = carray(pointer(memory + 4 * kept), (channels,), np.float32)
    change = carray(pointer(memory + 4 * (kept + channels)), (width,), np.float32)
    each = heads // pool_heads
    place = head % each * kept * 4
    if int32s(given[_LENS])[row] == count:
        state[:] = np.float32(0)
    else:
        _move(given, row, 0, head // each, place, 4 * kept, memory)
    for token in range(start, start + count):
        _convolved(window, mixed[token, head], conv, x)
        q, k = x[:key_dim], x[key_dim : 2 * key_dim]
        _normed(q, np.float32(1) / np.sqrt(np.float32(key_dim)))
        _normed(k, np.float32(1))
        for j in range(per):
            first = 2 * key_dim + j * width
            gate = gates[token, head, per + j] + decays[1, j]
            positive = max(gate, np.float32(0)) + np.log1p(np.exp(-abs(gate)))  # softplus
            decay = np.exp(-np.exp(decays[0, j]) * positive)
            strength = np.float32(1) / (np.float32(1) + np.exp(-gates[token, head, j]))
            v = x[first : first + width]
            _updated(matrices[j], q, k, v, decay, strength, out[token, head, j], change)
    _move(given, row, 1, head // each, place, 4 * kept, memory)
    free(memory)
