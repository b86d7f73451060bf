"""Every sampling parameter against the slow reference, through the jitted public functions."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.engine.sampling.sampling_reference as reference
from jaxserve.engine.device.sampling import threefry2x32
from jaxserve.engine.device.sampling_state import RequestRow, init_state
from jaxserve.sched.request import Request, SamplingParams
from tests.engine.sampling.sampling_steps import (
    EOS,
    R,
    S,
    V,
    enter,
    full,
    greedy,
    request,
    seed_key,
    step,
)

tokens = st.integers(0, V - 1)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 1e-30, 1e-4, 0.3, 1.0, 4.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, V - 1, V, 10 * V]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.25]),
    logit_bias=st.lists(
        st.tuples(tokens, st.sampled_from([-100.0, -1.5, 0.5, 8.0])), max_size=4
    ).map(tuple),
    min_tokens=st.sampled_from([0, 3, 8]),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
)
histories = st.lists(tokens, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(sampling_params, histories, histories), min_size=1, max_size=R),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_every_row_of_a_mixed_batch_matches_the_reference(
    rows: list[tuple[SamplingParams, list[int], list[int]]], data_seed: int, ties: bool
) -> None:
    data = np.random.default_rng(data_seed)
    logits = data.normal(0, 2, (len(rows), V)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    slots = data.permutation(S)[: len(rows)].tolist()
    state = init_state(S, V)
    for slot, (params, prompt, output) in zip(slots, rows, strict=True):
        state = enter(state, slot, Request("r", (0, *prompt), params), output)
    state, result = step(state, logits, slots)
    for i, (params, prompt, output) in enumerate(rows):
        scores = reference.adjusted(logits[i], params, (0, *prompt), output, EOS)
        assert params.seed is not None
        expected, margin = reference.draw(scores, params, seed_key(params.seed), len(output))
        if margin > 1e-4:
            got = int(result.tokens[i])
            assert scores[got] == scores[expected] if params.temperature == 0 else got == expected
        assert int(state.last_token[slots[i]]) == int(result.tokens[i])
        assert int(state.num_generated[slots[i]]) == len(output) + 1


def test_noise_is_threefry() -> None:
    # Known answers of the Random123 distribution: 20 rounds; key, counter, result.
    ones = 0xFFFFFFFF
    for key, counter, answer in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ):
        words = threefry2x32(*(jnp.uint32(word) for word in (*key, *counter)))
        assert tuple(map(int, words)) == answer


def test_greedy_path_takes_the_first_maximum_and_agrees_with_the_full_path() -> None:
    logits = np.round(np.random.default_rng(0).normal(0, 1, (R, V))).astype(np.float32)
    slots, emit = np.arange(R, dtype=np.int32), np.ones(R, bool)
    state, fast = greedy(init_state(S, V), logits, slots, emit)
    other, slow = full(init_state(S, V), logits, slots, emit)
    assert fast.tokens.tolist() == logits.argmax(-1).tolist() == slow.tokens.tolist()
    assert state.last_token.tolist() == other.last_token.tolist()
    assert state.num_generated.tolist() == other.num_generated.tolist() == [1] * R + [0] * (S - R)


@pytest.mark.parametrize("sample", [greedy, full])
def test_padding_and_rows_that_do_not_emit_leave_the_state(sample: object) -> None:
    state = init_state(S, V)
    for slot in range(S):
        state = enter(state, slot, request(frequency_penalty=1.0, temperature=1.0), [slot + 3])
    before = jax.device_get(state)
    logits = np.random.default_rng(0).normal(0, 1, (R, V)).astype(np.float32)
    slots = np.array([4, 1, 0, S, S, 2**31 - 1], np.int32)
    emit = np.array([True, False, False, True, False, True])
    state, result = sample(state, logits, slots, emit)  # type: ignore[operator]
    after = jax.device_get(state)
    untouched = np.arange(S) != 4
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[untouched], new[untouched])
    assert after.last_token[4] == int(result.tokens[0])
    assert after.num_generated[4] == 2


def generate(
    one: RequestRow,
    count: int,
    *,
    slot: int,
    place: int,
    rows: int,
    crowd: int,
    preempt_at: int = -1,
) -> list[int]:
    """`count` tokens of a request at row `place` of batches of `rows`, among `crowd` others."""
    state = init_state(S, V)
    others = [s for s in range(S) if s != slot][:crowd]
    for s in others:
        state = enter(state, s, request(name=f"x{s}", temperature=2.0, frequency_penalty=0.5))
    state = enter(state, slot, one)
    output: list[int] = []
    for t in range(count):
        if t == preempt_at:  # another request takes the slot, ours comes back elsewhere
            state = enter(state, slot, request(temperature=1.0))
            others = [s for s in others if s != (slot + 1) % S]
            slot = (slot + 1) % S
            state = enter(state, slot, one, output)
        slots = [*others[:place], slot, *others[place:]]
        where = slots.index(slot)
        data = np.random.default_rng(t).normal(0, 2, (rows, V))
        logits = data[: len(slots)]
        logits[where] = np.random.default_rng(1000 + t + sum(output)).normal(0, 1, V)
        state, result = step(state, logits, slots, rows=rows)
        output.append(int(result.tokens[where]))
        assert int(state.last_token[slot]) == output[-1]
    return output


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": -(2**63), "top_p": 0.9, "top_k": 30, "min_p": 0.01},
        {"temperature": 1.5, "repetition_penalty": 1.7, "frequency_penalty": 0.6, "min_tokens": 9},
    ],
    ids=str,
)
def test_text_does_not_depend_on_batch_row_bucket_slot_or_preemption(
    sampling: dict[str, object],
) -> None:
    one = RequestRow(request((1, 2, 3), **sampling), V, EOS)
    alone = generate(one, 16, slot=0, place=0, rows=R, crowd=0)
    assert len(set(alone)) > 4
    assert generate(one, 16, slot=7, place=3, rows=R, crowd=4) == alone
    assert generate(one, 16, slot=3, place=1, rows=8, crowd=7) == alone
    for at in (1, 7, 15):
        assert generate(one, 16, slot=2, place=2, rows=R, crowd=5, preempt_at=at) == alone


def test_seeds_and_continuations_differ_and_n_counts_up_from_the_seed() -> None:
    def texts(one: Request, indices: Sequence[int]) -> list[tuple[int, ...]]:
        row, out = RequestRow(one, V, EOS), []
        for index in indices:
            state = enter(init_state(S, V), 0, row, index=index)
            text = []
            for _ in range(12):
                state, result = step(state, np.zeros((1, V)), [0])
                text.append(int(result.tokens[0]))
            out.append(tuple(text))
        return out

    seeded = texts(request(temperature=1.0, seed=10, n=3), range(3))
    assert len(set(seeded)) == 3
    assert texts(request(temperature=1.0, seed=11, n=2), [0, 1]) == seeded[1:]
    free = texts(request(temperature=1.0, n=3), range(3))
    again = texts(request(temperature=1.0, n=3), range(3))
    assert len({*free, *again}) == 6


def test_frequencies_are_the_distribution() -> None:
    # Chi-square with 39 degrees of freedom: 85 is passed once in 30,000 times. Seeds are fixed.
    vocab, slots, steps = V, 64, 64
    logits = np.linspace(-1.5, 1.5, vocab, dtype=np.float32)
    expected = np.exp(logits / 1.5)
    expected *= slots * steps / expected.sum()
    state = init_state(slots, vocab)
    for slot in range(slots):
        state = enter(state, slot, request(temperature=1.5, seed=slot))
    batch = np.tile(logits, (slots, 1)), np.arange(slots, dtype=np.int32), np.ones(slots, bool)
    seen = np.zeros(vocab)
    for _ in range(steps):
        state, result = full(state, *batch)
        seen += np.bincount(result.tokens, minlength=vocab)
    assert ((seen - expected) ** 2 / expected).sum() < 85


@pytest.mark.parametrize("top_k", [7, 4999])
def test_top_k_is_exact_in_a_large_vocabulary(top_k: int) -> None:
    vocab = 5003
    # Below the first, 64 away, each is one step of float32 further: no bit may be left out.
    logits = np.random.default_rng(0).permutation(
        np.array([64, *-np.arange(vocab - 1) / 2**17], np.float32)
    )
    allowed = set(np.argsort(logits)[-top_k:].tolist())
    state = init_state(64, vocab)
    for slot in range(64):
        state = enter(state, slot, request(temperature=100.0, seed=slot, top_k=top_k))
    got = set()
    for _ in range(4):
        state, result = full(
            state,
            np.tile(logits, (64, 1)),
            np.arange(64, dtype=np.int32),
            np.ones(64, bool),
        )
        got |= set(result.tokens.tolist())
    assert got <= allowed
    assert len(got) >= min(top_k, 80)  # 92 of 100 on average


def test_a_slot_forgets_who_had_it() -> None:
    state = init_state(S, V)
    heavy = request(
        (3, 4), frequency_penalty=100.0, min_tokens=99, logit_bias=((5, 100.0),), logprobs=3
    )
    state = enter(state, 0, heavy, [3, 3])
    state, _ = step(state, np.zeros((1, V)), [0])
    state = enter(state, 0, request((1,)))
    logits = np.zeros((1, V))
    logits[0, 3] = 1.0
    state, result = step(state, logits, [0])
    assert int(result.tokens[0]) == 3
    assert not np.any(result.top_ids)
    state = enter(state, 0, request((1,), frequency_penalty=0.4))
    drawn = []
    for _ in range(4):
        state, result = step(state, logits, [0])
        drawn.append(int(result.tokens[0]))
    assert drawn == [3, 3, 3, 0]  # the penalty counts this request's own tokens, 0.4 each
