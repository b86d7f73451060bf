"""The device's sampling state of each request: one row per slot, of static shape.

A request holds a slot from its admission to its end or preemption. That row has everything a step
needs to draw the next token, including the last token, so tokens need not visit the host.

Sizes: with 256 slots and a vocabulary of 152,064 the token counts take 78 MB and all else under
1 MB. The counts are always there (an array that grew with the first penalised request would mean
a compile in the middle of serving), two bytes per token: bit 15 says "in the prompt", the lower 15
count its occurrences in the output, saturating.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.device.device_arrays import put_replicated
from jaxserve.sched.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    Request,
    SamplingParams,
)

MAX_EOS = 16
MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + MAX_EOS
PROMPT_BIT = np.uint16(1 << 15)
COUNT_MASK = np.uint16((1 << 15) - 1)
GREEDY_BELOW = 1e-5  # lower temperatures are greedy, as in vLLM

# Columns of a packed row, all 32 bits wide: one array to upload at an admission, one to gather in a
# step. The lists of ids and values follow, in the order of `unpack`.
_INTS = ("top_k", "min_tokens", "num_logprobs", "key_hi", "key_lo")
_KEY_AT = _INTS.index("key_hi")
_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_SUPPRESSED_AT = len(_INTS) + len(_FLOATS)
_BIAS_IDS_AT = _SUPPRESSED_AT + MAX_SUPPRESSED
_BIAS_VALUES_AT = _BIAS_IDS_AT + MAX_LOGIT_BIAS
_ROW = _BIAS_VALUES_AT + MAX_LOGIT_BIAS
_Held = TypeVar("_Held")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """Sampling parameters of R requests, as arrays on the device. Lists of ids are padded with the
    vocabulary's size.

    Attributes:
        top_k: [R]; 0 is off.
        min_tokens: [R]; 0 is off.
        num_logprobs: [R]; -1 for none.
        key: uint32 [R, 2], for the noise.
        temperature: [R]; 0 is greedy.
        top_p: [R]; 1 is off.
        min_p: [R]; 0 is off.
        repetition, presence, frequency: [R], penalties; 1, 0 and 0 are off.
        suppressed_ids: [R, MAX_SUPPRESSED], not sampled before min_tokens.
        bias_ids: [R, MAX_LOGIT_BIAS], tokens whose logits get a bias.
        bias_values: [R, MAX_LOGIT_BIAS], the biases.
    """

    top_k: jax.Array
    min_tokens: jax.Array
    num_logprobs: jax.Array
    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    suppressed_ids: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array


class Newest(NamedTuple):
    """The part of `SamplingState` that every step changes. Plain greedy steps change nothing
    else."""

    last_token: jax.Array
    num_generated: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["last_token", "num_generated", "rows", "counts"],
    meta_fields=["mesh"],
)
@dataclass(frozen=True)
class SamplingState:
    """The sampling state of S device slots, with V tokens in the vocabulary. Donated to every step
    that changes it.

    Attributes:
        last_token: int32 [S], the input of the slot's next decode step.
        num_generated: int32 [S], output tokens so far.
        rows: int32 [S, _ROW], the packed parameters, see `unpack`.
        counts: uint16 [S, V], see the top of this file. Meaningful only in slots whose request has
            a penalty.
        mesh: the state is replicated over it; None on one device.
    """

    last_token: jax.Array
    num_generated: jax.Array
    rows: jax.Array
    counts: jax.Array
    mesh: Mesh | None = None

    @property
    def newest(self) -> Newest:
        """The part that the model's step takes and returns."""
        return Newest(self.last_token, self.num_generated)

    def after(self, newest: Newest) -> SamplingState:
        """The state with its newest part replaced."""
        return replace(self, **newest._asdict())

    @property
    def num_slots(self) -> int:
        """S, the number of device slots."""
        return self.last_token.shape[0]

    @property
    def vocab_size(self) -> int:
        """V, also the token id that pads lists."""
        return self.counts.shape[1]


def unpack(rows: jax.Array) -> Knobs:
    """The parameters of R rows of `SamplingState.rows`, int32 [R, _ROW]."""
    ints = dict(zip(_INTS, rows.T, strict=False))
    key = jnp.stack([ints.pop("key_hi"), ints.pop("key_lo")], axis=-1)
    floats = _bits(rows[:, len(_INTS) : _SUPPRESSED_AT], jnp.float32)
    return Knobs(
        **ints,
        **dict(zip(_FLOATS, floats.T, strict=True)),
        key=_bits(key, jnp.uint32),
        suppressed_ids=rows[:, _SUPPRESSED_AT:_BIAS_IDS_AT],
        bias_ids=rows[:, _BIAS_IDS_AT:_BIAS_VALUES_AT],
        bias_values=_bits(rows[:, _BIAS_VALUES_AT:], jnp.float32),
    )


@dataclass(frozen=True)
class SlotParams:
    """One slot's row on the host.

    packed: int32 [3 + _ROW], space for the slot, then last_token, num_generated and the row.
    counts: uint16 [V], None unless the request has a penalty.
    """

    packed: np.ndarray
    counts: np.ndarray | None = None


def plain_slot(vocab_size: int) -> SlotParams:
    """A slot without a request. It samples greedily."""
    return RequestRow(Request(id="", prompt=(0,)), vocab_size, ()).slot_params(0, ())


def init_state(num_slots: int, vocab_size: int, mesh: Mesh | None = None) -> SamplingState:
    """All slots free, which would sample greedily. With a mesh the state is replicated over it."""
    place = replicated(mesh)
    row = plain_slot(vocab_size).packed[3:]
    return SamplingState(
        last_token=jnp.zeros(num_slots, jnp.int32, device=place),
        num_generated=jnp.zeros(num_slots, jnp.int32, device=place),
        rows=jnp.tile(put_replicated(row, place), (num_slots, 1)),
        counts=jnp.zeros((num_slots, vocab_size), jnp.uint16, device=place),
        mesh=mesh,
    )


def replicated(mesh: Mesh | None) -> NamedSharding | jax.Device:
    """Where the state lives: on the first device, or on every device of the mesh."""
    return jax.devices()[0] if mesh is None else NamedSharding(mesh, PartitionSpec())


class RequestRow:
    """A request's sampling parameters, packed for the device. Made once on the caller's thread, so
    that invalid ones are refused there.

    Token ids outside the vocabulary must have been refused before (`validate`).

    Args:
        request: the submitted request.
        vocab_size: V.
        eos_ids: end-of-sequence tokens. min_tokens suppresses all of them, even with ignore_eos (as
            in vLLM).

    Raises:
        ValueError: there are more than MAX_EOS eos_ids.
    """

    def __init__(self, request: Request, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if len(eos_ids) > MAX_EOS:
            raise ValueError(f"eos_ids: has {len(eos_ids)} entries; at most {MAX_EOS} are allowed")
        self._vocab_size = vocab_size
        self._counted = request.prompt if has_penalty(request.sampling) else None
        self._row = _row(request.sampling, vocab_size, eos_ids)
        self._keys = _keys(request.sampling)

    def slot_params(self, index_of_n: int, output_tokens: Sequence[int]) -> SlotParams:
        """The slot row of continuation index_of_n, which has generated output_tokens so far.

        Takes microseconds and no array of V elements, unless the request has a penalty.
        """
        last = output_tokens[-1] if len(output_tokens) else 0
        packed = np.concatenate([np.array([0, last, len(output_tokens)], np.int32), self._row])
        packed[3 + _KEY_AT : 5 + _KEY_AT] = self._keys[index_of_n]
        if self._counted is None:
            return SlotParams(packed, None)
        return SlotParams(packed, _counts(self._counted, output_tokens, self._vocab_size))


def _row(sampling: SamplingParams, vocab_size: int, eos_ids: Sequence[int]) -> np.ndarray:
    """int32 [_ROW], without a key."""
    row = np.full(_ROW, vocab_size, np.int32)
    row[: len(_INTS)] = (
        min(sampling.top_k, vocab_size),
        sampling.min_tokens,
        -1 if sampling.logprobs is None else sampling.logprobs,
        *(0, 0),
    )
    row[len(_INTS) : _SUPPRESSED_AT].view(np.float32)[:] = (
        sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    if sampling.min_tokens:
        ends = (*sampling.stop_token_ids, *eos_ids)
        row[_SUPPRESSED_AT : _SUPPRESSED_AT + len(ends)] = ends
    if sampling.logit_bias:
        tokens, values = zip(*sampling.logit_bias, strict=True)
        row[_BIAS_IDS_AT : _BIAS_IDS_AT + len(tokens)] = tokens
        row[_BIAS_VALUES_AT : _BIAS_VALUES_AT + len(values)].view(np.float32)[:] = values
    return row


def admit(state: SamplingState, slot: int, row: SlotParams) -> SamplingState:
    """Writes a request's row to a slot; the old state is donated. Raises ValueError unless 0 <=
    slot < S.

    Two compiled variants, with and without counts; `warm_up` compiles both.
    """
    if not 0 <= slot < state.num_slots:
        raise ValueError(f"slot: must be in 0..{state.num_slots - 1}, got {slot}")
    place = replicated(state.mesh)
    packed = row.packed.copy()
    packed[0] = slot
    if row.counts is None:
        return _admit(state, put_replicated(packed, place))
    return _admit_counted(state, *put_replicated((packed, row.counts), place))


def warm_up(state: SamplingState) -> SamplingState:
    """Compiles both variants of `admit` on slot 0, which must be free; the old state is donated."""
    v = state.vocab_size
    plain = plain_slot(v)
    state = admit(state, 0, replace(plain, counts=np.zeros(v, np.uint16)))
    return admit(state, 0, plain)


def on_mesh(held: _Held, mesh: Mesh | None) -> _Held:
    """Keeps arrays replicated over the mesh: the state, so that a step's output is sharded like its
    input, and arrays for the host, so that each host has all of them."""
    return held if mesh is None else jax.lax.with_sharding_constraint(held, replicated(mesh))


@functools.partial(jax.jit, donate_argnums=0)
def _admit(state: SamplingState, packed: jax.Array) -> SamplingState:
    return on_mesh(_with_row(state, packed), state.mesh)


@functools.partial(jax.jit, donate_argnums=0)
def _admit_counted(state: SamplingState, packed: jax.Array, counts: jax.Array) -> SamplingState:
    state = _with_row(state, packed)
    return on_mesh(replace(state, counts=state.counts.at[packed[0]].set(counts)), state.mesh)


def _with_row(state: SamplingState, packed: jax.Array) -> SamplingState:
    slot = packed[0]
    return replace(
        state,
        last_token=state.last_token.at[slot].set(packed[1]),
        num_generated=state.num_generated.at[slot].set(packed[2]),
        rows=state.rows.at[slot].set(packed[3:]),
    )


def _bits(array: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, dtype)


def has_penalty(sampling: SamplingParams) -> bool:
    """Whether the request's tokens are counted."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def _counts(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> np.ndarray:
    occurrences = np.bincount(np.asarray(output, np.int64), minlength=vocab_size)
    counts = np.minimum(occurrences, COUNT_MASK).astype(np.uint16)
    counts[np.asarray(prompt)] |= PROMPT_BIT
    return counts


def _keys(sampling: SamplingParams) -> np.ndarray:
    """Two words (as int32) for each continuation, [n, 2]. Without a seed every request gets new
    ones. Made once, so that a continuation's draws survive preemptions."""
    if sampling.seed is None:
        words = [secrets.randbits(64) for _ in range(sampling.n)]
    else:
        words = [(sampling.seed + index) % 2**64 for index in range(sampling.n)]
    return np.array([(word >> 32, word & 0xFFFFFFFF) for word in words], np.uint32).view(np.int32)
