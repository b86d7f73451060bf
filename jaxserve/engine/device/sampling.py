"""Draws the next tokens on the device, every request by its own parameters, in one batch.

`sample_greedy` and `sample_full` are pure and of static shape: the first is part of the model's
step, the second is called under jit after it, with the state donated. Order of operations for each
row of logits:

1. log-probabilities to report: of the model's own distribution, before anything below;
2. logit bias, added;
3. repetition penalty: logits of tokens in prompt or output, divided if positive, else multiplied;
4. frequency and presence penalty: subtracted, per occurrence in the output and once;
5. min_tokens: stop tokens get minus infinity while there are fewer, and what a grammar does not
   allow always does (if it allows nothing but stop tokens, one of those is drawn all the same);
6. temperature 0: the largest logit (the lowest id of equals). Otherwise logits / temperature, and
7. min_p: tokens less likely than min_p times the likeliest are out;
8. top_k: those below the k-th largest of what is left are out;
9. top_p: of what is left, renormalised, the smallest set of the likeliest that holds top_p stays;
10. a draw from the rest, by Gumbel noise.

That is vLLM's order. Tokens that tie with the last one kept by top_k or top_p stay.

The noise of a row depends on the request's seed and the index of the generated token alone, not
on batch, row, bucket or preemptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.engine.device.sampling_state import (
    COUNT_MASK,
    PROMPT_BIT,
    Knobs,
    Newest,
    SamplingState,
    on_mesh,
    unpack,
)
from jaxserve.engine.device.verification import Checked, Standing
from jaxserve.pallas_kernels import argmax, in_fixed_batches, log_sum_exp
from jaxserve.sched.request import MAX_TOP_LOGPROBS
from jaxserve.sched.speculation.choice import MOST

NOT_FINITE = -1
_ALL = np.uint32(2**32 - 1)  # 32 tokens that may be drawn
_INF_BITS = 0x7F800000  # float32 infinity


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleResult:
    """Sampled tokens and their log-probabilities, R rows. Rows that do not emit hold no meaningful
    values.

    Log-probabilities come from `sample_full` only. They are zeros if no emitting row of the batch
    asked for any.

    Attributes:
        tokens: int32 [R]; NOT_FINITE if the model's logits are not numbers.
        chosen_logprob: float32 [R], of the sampled tokens.
        top_ids: int32 [R, min(MAX_TOP_LOGPROBS, V)], the likeliest tokens, best first.
        top_logprobs: float32, their log-probabilities.
    """

    tokens: jax.Array
    chosen_logprob: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def sample_greedy(
    newest: Newest,
    logits: jax.Array,
    slots: jax.Array,
    emit: jax.Array,
    checked: Checked | None = None,
) -> tuple[Newest, jax.Array]:
    """The fast path, for batches in which every emitting request `is_plain_greedy`. It is part of
    the model's step.

    Args:
        newest: the state's newest tokens.
        logits: [R, V].
        slots: int32 [R], distinct for emitting rows except drafts; S or more for padding.
        emit: bool [R]. A row without it leaves the state unchanged.
        checked: which rows are drafts that follow the row before; None if none is.

    Returns:
        The updated `newest`, and the tokens, int32 [R], see `SampleResult`.
    """
    tokens = argmax(logits)
    standing = None if checked is None else checked.stand(tokens)
    return _advanced(newest, slots, emit, tokens, standing), tokens


def sample_full(
    state: SamplingState,
    logits: jax.Array,
    slots: jax.Array,
    emit: jax.Array,
    masks: jax.Array | None = None,
    checked: Checked | None = None,
) -> tuple[SamplingState, SampleResult]:
    """Samples with every parameter, in the order that the module describes. Operations that no
    emitting row needs are skipped.

    Args:
        state: the sampling state.
        logits: [R, V].
        slots: see `sample_greedy`.
        emit: see `sample_greedy`.
        masks: uint32 [R, `mask_words(V)`], a bit for each token that may be drawn, the lowest
        first; None if all may.
        checked: see `sample_greedy`.

    Returns:
        The updated state, and the sampled tokens.
    """
    raw = logits.astype(jnp.float32)
    emit = emit & (slots < state.num_slots)
    rows = _rows(state, jnp.minimum(slots, state.num_slots - 1), emit, checked)
    more = rows.biased | rows.penalised | rows.early | rows.random
    if masks is not None:
        more |= jnp.any(masks != _ALL, axis=1)
    # Each branch returns tokens, not logits: a branch that only passes an array on copies it.
    tokens = lax.cond(jnp.any(more), _draw, _draw_plain, raw, rows, masks)
    tokens = jnp.where(argmax(raw) < 0, NOT_FINITE, jnp.maximum(tokens, 0))
    result = lax.cond(
        jnp.any(emit & (rows.knobs.num_logprobs >= 0)),
        with_logprobs,
        lambda raw, tokens: without_logprobs(tokens, raw.shape[-1]),
        raw,
        tokens,
    )
    standing = None if checked is None else checked.stand(tokens)
    state = state.after(_advanced(state.newest, slots, emit, tokens, standing))
    return _counted(state, slots, emit, tokens, standing), on_mesh(result, state.mesh)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    """The state of the R rows of a batch; the bool [R] say what an emitting row needs. drafts: [R,
    MOST], the drafts up to the row, which its counts leave out; None if there are none."""

    knobs: Knobs
    num_generated: jax.Array
    counts: jax.Array
    drafts: jax.Array | None
    biased: jax.Array
    penalised: jax.Array
    early: jax.Array
    random: jax.Array


def _rows(state: SamplingState, at: jax.Array, emit: jax.Array, checked: Checked | None) -> _Rows:
    knobs = unpack(state.rows[at])
    generated = state.num_generated[at]
    if checked is not None:
        generated += checked.depth
    penalties = (knobs.repetition != 1) | (knobs.presence != 0) | (knobs.frequency != 0)
    return _Rows(
        knobs=knobs,
        num_generated=generated,
        # Read here, not in a branch: XLA would copy all of state.counts before updating it.
        counts=state.counts[at],
        drafts=None if checked is None else checked.drafts(state.vocab_size),
        biased=emit & (knobs.bias_ids[:, 0] < state.vocab_size),
        penalised=emit & penalties,
        early=emit & (generated < knobs.min_tokens),
        random=emit & (knobs.temperature > 0),
    )


def _draw_plain(raw: jax.Array, rows: _Rows, masks: jax.Array | None = None) -> jax.Array:
    return argmax(raw)


def _draw(raw: jax.Array, rows: _Rows, masks: jax.Array | None = None) -> jax.Array:
    # Before min_tokens, a mask may allow stop tokens only: with the lowest value they can be drawn.
    lowest = -jnp.inf if masks is None else float(jnp.finfo(jnp.float32).min)
    scores = lax.cond(
        jnp.any(rows.biased | rows.penalised | rows.early),
        partial(_adjusted, lowest=lowest),
        lambda z, _: z,
        raw,
        rows,
    )
    if masks is not None:
        scores = jnp.where(_allowed(masks, scores.shape[-1]), scores, -jnp.inf)
    return lax.cond(jnp.any(rows.random), _draw_random, _draw_plain, scores, rows)


def mask_words(vocab_size: int) -> int:
    """32-bit words for a bit per token."""
    return -(-vocab_size // 32)


def _allowed(masks: jax.Array, v: int) -> jax.Array:
    """uint32 [R, `mask_words(v)`] -> bool [R, v]."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(masks.shape[0], -1)[:, :v] != 0


def _advanced(
    newest: Newest,
    slots: jax.Array,
    emit: jax.Array,
    tokens: jax.Array,
    standing: Standing | None,
) -> Newest:
    last: jax.Array | bool = True if standing is None else standing.last
    more: jax.Array | int = 1 if standing is None else standing.depth + 1
    where = jnp.where(emit & last, slots, newest.last_token.shape[0])
    return Newest(
        newest.last_token.at[where].set(tokens, mode="drop"),
        newest.num_generated.at[where].add(more, mode="drop"),
    )


def _counted(
    state: SamplingState,
    slots: jax.Array,
    emit: jax.Array,
    tokens: jax.Array,
    standing: Standing | None,
) -> SamplingState:
    stands: jax.Array | bool = True if standing is None else standing.stands
    where = jnp.where(emit & stands, slots, state.num_slots)
    old = state.counts.at[where, tokens].get(mode="fill", fill_value=0)
    if standing is None:
        new = jnp.where(old & COUNT_MASK == COUNT_MASK, old, old + jnp.uint16(1))
        counts = state.counts.at[where, tokens].set(new, mode="drop")
    else:
        counts = _counted_several(state.counts, where, tokens, old, standing)
    return on_mesh(replace(state, counts=counts), state.mesh)


def _counted_several(
    counts: jax.Array, where: jax.Array, tokens: jax.Array, old: jax.Array, standing: Standing
) -> jax.Array:
    """The counts if a row may have the same token several times: the last write includes all."""
    places = jnp.arange(len(tokens))[:, None] - jnp.arange(1, MOST + 1)
    same = tokens[jnp.maximum(places, 0)] == tokens[:, None]
    before = jnp.sum(same & (jnp.arange(1, MOST + 1) <= standing.depth[:, None]), axis=1)
    count = jnp.minimum((old & COUNT_MASK).astype(jnp.int32) + before + 1, int(COUNT_MASK))
    new = old & PROMPT_BIT | count.astype(jnp.uint16)
    return counts.at[where, tokens].max(new, mode="drop")


def _adjusted(scores: jax.Array, rows: _Rows, *, lowest: float) -> jax.Array:
    """Steps 2 to 5 except grammars. [R, V] -> [R, V]; rows that ask for none are unchanged. lowest:
    value of stop tokens."""
    knobs = rows.knobs
    index = jnp.arange(scores.shape[0])[:, None]
    scores = scores.at[index, knobs.bias_ids].add(knobs.bias_values, mode="drop")
    counts = rows.counts
    if rows.drafts is not None:
        counts = counts.at[index, rows.drafts].add(1, mode="drop")
    scores = _penalised(scores, counts, knobs)
    suppressed = jnp.where(rows.early[:, None], knobs.suppressed_ids, scores.shape[-1])
    return scores.at[index, suppressed].set(lowest, mode="drop")


def _penalised(scores: jax.Array, counts: jax.Array, knobs: Knobs) -> jax.Array:
    """Steps 3 and 4."""
    repetition = knobs.repetition[:, None]
    repeated = jnp.where(scores > 0, scores / repetition, scores * repetition)
    scores = jnp.where(counts > 0, repeated, scores)
    outputs = (counts & COUNT_MASK).astype(jnp.float32)
    scores -= knobs.frequency[:, None] * outputs
    return scores - knobs.presence[:, None] * (outputs > 0)


def _draw_random(scores: jax.Array, rows: _Rows) -> jax.Array:
    """Steps 6 to 10, [R, V] -> [R]. Works on the distance of each token below the likeliest, which
    is never negative (and infinite for tokens that are out)."""
    knobs, v = rows.knobs, scores.shape[-1]
    temperature = jnp.where(rows.random, knobs.temperature, 1)
    distance = (jnp.max(scores, axis=-1, keepdims=True) - scores) / temperature[:, None]
    distance = _cut(distance, -jnp.log(knobs.min_p))
    use_k = rows.random & (knobs.top_k > 0)
    use_p = rows.random & (knobs.top_p < 1)
    unbounded = jnp.full(use_k.shape, jnp.inf)
    bound = lax.cond(jnp.any(use_k), lambda: _top_k_bound(distance, knobs.top_k), lambda: unbounded)
    distance = _cut(distance, jnp.where(use_k, bound, jnp.inf))
    # Row by row, so that sums have one order, and the data that is halved stays in caches.
    nucleus = partial(in_fixed_batches, _top_p_bound, distance, knobs.top_p, size=1)
    bound = lax.cond(jnp.any(use_p), nucleus, lambda: unbounded)
    distance = _cut(distance, jnp.where(use_p, bound, jnp.inf))
    noise = _gumbel(knobs.key, rows.num_generated, v)
    return argmax(jnp.where(rows.random[:, None], noise, 0) - distance)


def _cut(distance: jax.Array, bound: jax.Array) -> jax.Array:
    return jnp.where(distance <= bound[:, None], distance, jnp.inf)


def _top_k_bound(distance: jax.Array, top_k: jax.Array) -> jax.Array:
    """Distance of the k-th nearest token, [R]; exact."""
    return _smallest_bound(
        lambda bound: jnp.sum(distance <= bound[:, None], axis=-1) >= top_k, top_k.shape
    )


def _top_p_bound(distance: jax.Array, top_p: jax.Array) -> jax.Array:
    """Smallest distance within which top_p of the probability lies, [R]; exact up to the rounding
    of the float32 sums."""
    mass = jnp.exp(-distance)
    # Even a product that float32 rounds to 0 requires at least one token.
    enough = jnp.maximum(top_p * jnp.sum(mass, axis=-1), jnp.finfo(jnp.float32).tiny)
    return _smallest_bound(
        lambda bound: jnp.sum(jnp.where(distance <= bound[:, None], mass, 0), axis=-1) >= enough,
        top_p.shape,
    )


def _smallest_bound(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """Smallest float32 in [0, inf] for which the monotone test holds. It is assumed to hold at
    infinity, and not without any token.

    Non-negative floats sort like their bits, so bisecting the bits finds the exact float in 31
    passes; sorting [32, 50272] on CPU takes 20 times as long.
    """

    def halve(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        fails, works = bracket
        middle = fails + (works - fails) // 2
        good = holds(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(good, fails, middle), jnp.where(good, middle, works)

    start = (jnp.full(shape, -1, jnp.int32), jnp.full(shape, _INF_BITS, jnp.int32))
    _, works = lax.fori_loop(0, 31, halve, start)
    return lax.bitcast_convert_type(works, jnp.float32)


def _gumbel(keys: jax.Array, num_generated: jax.Array, v: int) -> jax.Array:
    """Standard Gumbel noise [R, v] from keys uint32 [R, 2] and the index of the token, int32 [R].

    Uses log1p, not the log of a uniform number just below 1: the winners of a large vocabulary come
        from its last few steps of 2**-24, where float32 is coarse; near 0 it is fine.
    """
    ids = lax.broadcasted_iota(jnp.uint32, (keys.shape[0], v), 1)
    bits, _ = threefry2x32(keys[:, :1], keys[:, 1:], num_generated[:, None].astype(jnp.uint32), ids)
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def threefry2x32(
    key0: jax.Array, key1: jax.Array, word0: jax.Array, word1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
    2011, section 4.2).

    Written out instead of taken from jax.random: unrolled it is one fused loop, three times faster
    on CPU, and a seed gives the same text whatever jax's version and settings.

    Args:
        key0, key1: the key, uint32.
        word0, word1: the counter, uint32. All four broadcast.

    Returns:
        Two arrays of random words, uint32.
    """
    parity = jnp.uint32(0x1BD11BDA)
    keys = (key0, key1, key0 ^ key1 ^ parity)
    word0, word1 = word0 + key0, word1 + key1
    for group in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            word0 = word0 + word1
            word1 = word0 ^ (word1 << by | word1 >> 32 - by)
        word0 = word0 + keys[(group + 1) % 3]
        word1 = word1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return word0, word1


def with_logprobs(raw: jax.Array, tokens: jax.Array) -> SampleResult:
    """The tokens [R] with their log-probabilities, by the model's own logits raw, float32 [R,
    V]."""
    total = log_sum_exp(raw)
    chosen = jnp.take_along_axis(raw, tokens[:, None], axis=-1)
    top, ids = lax.top_k(raw, min(MAX_TOP_LOGPROBS, raw.shape[-1]))
    return SampleResult(tokens, (chosen - total)[:, 0], ids.astype(jnp.int32), top - total)


def without_logprobs(tokens: jax.Array, vocab_size: int) -> SampleResult:
    """The tokens with log-probabilities of zero, in the same shapes."""
    shape = (tokens.shape[0], min(MAX_TOP_LOGPROBS, vocab_size))
    return SampleResult(tokens, jnp.zeros(shape[0]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
