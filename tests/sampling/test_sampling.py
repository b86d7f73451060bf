"""Every sampling parameter against the slow reference, through the jitted public functions."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine import sampling_state
from jaxserve.engine.sampling import (
    SampleResult,
    SamplingState,
    admit,
    init_state,
    sample_full,
    sample_greedy,
    slot_params,
    threefry2x32,
    warm_up,
)
from jaxserve.sched.request import MAX_LOGIT_BIAS, Request, SamplingParams

V, S, R = 40, 9, 6
EOS = (2,)
full = jax.jit(sample_full, donate_argnums=0)
greedy = jax.jit(sample_greedy, donate_argnums=0)
rng = np.random.default_rng(0)


def request(prompt: Sequence[int] = (1,), name: str = "r", **sampling: object) -> Request:
    return Request(id=name, prompt=tuple(prompt), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def enter(
    state: SamplingState, slot: int, one: Request, output: Sequence[int] = (), index: int = 0
) -> SamplingState:
    vocab = state.vocab_size
    return admit(state, slot, slot_params(one, index, output, vocab, EOS))


def step(
    state: SamplingState,
    logits: np.ndarray,
    slots: Sequence[int],
    emit: Sequence[bool] | None = None,
    rows: int = R,
) -> tuple[SamplingState, SampleResult]:
    """One batch of `slots`, padded to `rows`."""
    more = rows - len(slots)
    logits = np.concatenate([logits, np.full((more, logits.shape[1]), 7.0)]).astype(np.float32)
    padded = np.array([*slots, *[state.num_slots] * more], np.int32)
    emitting = np.array([*(emit or [True] * len(slots)), *[True] * more])
    return full(state, logits, padded, emitting)


def seed_key(seed: int) -> tuple[int, int]:
    return seed >> 32, seed & 0xFFFFFFFF


tokens = st.integers(0, V - 1)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
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
    logits = np.round(rng.normal(0, 1, (R, V))).astype(np.float32)
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
    logits = rng.normal(0, 1, (R, V)).astype(np.float32)
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
    one: Request, count: int, *, slot: int, place: int, rows: int, crowd: int, preempt_at: int = -1
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
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "seed": 2**63 - 1, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
        {"temperature": 1.5, "seed": 9, "repetition_penalty": 1.7, "frequency_penalty": 0.6},
        {"presence_penalty": 2.0, "repetition_penalty": 1.3, "min_tokens": 9},
        {"temperature": 1.0},
    ],
    ids=str,
)
def test_text_does_not_depend_on_batch_row_bucket_slot_or_preemption(
    sampling: dict[str, object],
) -> None:
    one = request((1, 2, 3), **sampling)
    alone = generate(one, 16, slot=0, place=0, rows=R, crowd=0)
    assert len(set(alone)) > 4
    assert generate(one, 16, slot=7, place=3, rows=R, crowd=4) == alone
    assert generate(one, 16, slot=3, place=1, rows=8, crowd=7) == alone
    for at in (1, 7, 15):
        assert generate(one, 16, slot=2, place=2, rows=R, crowd=5, preempt_at=at) == alone


def test_seeds_and_continuations_differ_and_n_counts_up_from_the_seed() -> None:
    def texts(one: Request, indices: Sequence[int]) -> list[tuple[int, ...]]:
        out = []
        for index in indices:
            state = enter(init_state(S, V), 0, one, index=index)
            text = []
            for _ in range(12):
                state, result = step(state, np.zeros((1, V)), [0])
                text.append(int(result.tokens[0]))
            out.append(tuple(text))
        return out

    seeded = texts(request(temperature=1.0, seed=10), range(3))
    assert len(set(seeded)) == 3
    assert texts(request(temperature=1.0, seed=11), [0, 1]) == seeded[1:]
    free = texts(request(temperature=1.0), range(3))
    again = texts(request(temperature=1.0, name="another"), range(3))
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


def test_draws_of_successive_tokens_and_neighbouring_seeds_are_not_alike() -> None:
    state = init_state(64, V)
    for slot in range(64):
        state = enter(state, slot, request(temperature=1.0, seed=slot))
    drawn = []
    for _ in range(64):
        state, result = full(
            state, np.zeros((64, V)), np.arange(64, dtype=np.int32), np.ones(64, bool)
        )
        drawn.append(np.array(result.tokens))
    grid = np.array(drawn)
    for lagged in (grid[1:] == grid[:-1], grid[:, 1:] == grid[:, :-1]):
        assert abs(lagged.mean() - 1 / V) < 4 * (1 / V / lagged.size) ** 0.5


@pytest.mark.parametrize("top_k", [1, 7, 100, 4999])
def test_top_k_is_exact_in_a_large_vocabulary(top_k: int) -> None:
    vocab = 5003
    # Below the first, 64 away, each is one step of float32 further: no bit may be left out.
    logits = rng.permutation(np.array([64, *-np.arange(vocab - 1) / 2**17], np.float32))
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
    assert len(got) >= min(top_k, 90)


def test_tiny_and_huge_temperatures() -> None:
    logits = np.array([[0.0, 1e-3, -1e-3, *[-30.0] * (V - 3)]] * 3)
    state = init_state(S, V)
    for slot, temperature in enumerate((1e-4, 1e-30, 100.0)):
        state = enter(state, slot, request(temperature=temperature, seed=slot))
    got: list[set[int]] = [set(), set(), set()]
    for _ in range(40):
        state, result = step(state, logits, [0, 1, 2])
        for i in range(3):
            got[i].add(int(result.tokens[i]))
    assert got[0] == got[1] == {1}
    assert len(got[2]) > 15


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


def test_min_tokens_keeps_eos_and_stop_tokens_away_until_then() -> None:
    logits = np.zeros((1, V))
    logits[0, [2, 7, 9]] = 5.0, 4.0, 3.0
    sampling = {"min_tokens": 3, "stop_token_ids": (7,), "max_tokens": 9}
    state = enter(init_state(S, V), 0, request(**sampling))
    drawn = []
    for _ in range(5):
        state, result = step(state, logits, [0])
        drawn.append(int(result.tokens[0]))
    assert drawn == [9, 9, 9, 2, 2]


def test_logit_bias_adds_up_and_reaches_its_limit_of_entries() -> None:
    vocab = 400
    most = tuple((token, -100.0) for token in range(MAX_LOGIT_BIAS - 2))
    bias = (*most, (350, 2.0), (350, 2.0))
    logits = np.zeros((1, vocab))
    logits[0, [5, 360]] = 50.0, 3.0
    state = enter(init_state(2, vocab), 1, request(logit_bias=bias))
    _, result = step(state, logits, [1], rows=1)
    assert int(result.tokens[0]) == 350


def test_logprobs_are_the_models_own_whatever_is_sampled() -> None:
    logits = rng.normal(0, 3, (3, V)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    state = init_state(S, V)
    state = enter(state, 0, request(logprobs=20))
    warm = request(
        temperature=5.0,
        top_k=3,
        logprobs=0,
        seed=1,
        logit_bias=((4, 100.0),),
        repetition_penalty=2.0,
    )
    state = enter(state, 1, warm)
    state = enter(state, 2, request())
    state, result = step(state, logits, [0, 1, 2])
    best = np.argsort(-logprobs)[:, :20]
    for i in range(3):
        token = int(result.tokens[i])
        assert abs(float(result.chosen_logprob[i]) - logprobs[i, token]) < 1e-5
        assert result.top_ids[i].tolist() == best[i].tolist()
        np.testing.assert_allclose(result.top_logprobs[i], logprobs[i][best[i]], atol=1e-5)
    assert int(result.tokens[1]) == 4
    _, silent = step(state, logits[2:], [2])
    assert not np.any(silent.top_logprobs) and not np.any(silent.chosen_logprob)


def test_counts_saturate() -> None:
    state = enter(init_state(S, V), 0, request((6,), frequency_penalty=1e-4), [5] * 40_000)
    logits = np.zeros((1, V))
    logits[0, 5] = 10.0
    for _ in range(2):
        state, result = step(state, logits, [0])
        assert int(result.tokens[0]) == 5
    assert int(state.counts[0, 5]) == sampling_state.COUNT_MASK
    assert int(state.counts[0, 6]) == sampling_state.PROMPT_BIT


def test_a_row_of_nan_gives_a_token_of_the_vocabulary() -> None:
    state = enter(init_state(S, V), 0, request(temperature=1.0, top_p=0.9))
    _, result = step(state, np.full((1, V), np.nan), [0])
    assert 0 <= int(result.tokens[0]) < V


def test_nothing_compiles_after_warm_up_and_plain_rows_carry_no_counts() -> None:
    state = warm_up(init_state(S, V))
    before = sampling_state._admit._cache_size(), sampling_state._admit_counted._cache_size()
    with jax.transfer_guard("disallow"):
        for slot, one in enumerate(
            (request(), request(temperature=1.0, seed=3), request(presence_penalty=1.0))
        ):
            row = slot_params(one, 0, [1, 2], V, EOS)
            assert (row.counts is None) == (slot < 2)
            state = admit(state, slot, row)
    after = sampling_state._admit._cache_size(), sampling_state._admit_counted._cache_size()
    assert before == after
    assert state.last_token.tolist()[:3] == [2, 2, 2]


def test_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"slot: must be in 0\.\.8, got 9"):
        enter(init_state(S, V), S, request())
    with pytest.raises(ValueError, match="eos_ids: has 17 entries; at most 16"):
        slot_params(request(), 0, (), V, range(17))


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxserve.engine.sampling import admit, init_state, sample_full, sample_greedy, slot_params
from jaxserve.sched.request import Request, SamplingParams
V, S = 96, 8
kinds = [dict(), dict(temperature=1.0, seed=1, top_k=9), dict(temperature=1.0, seed=2, top_p=0.7),
         dict(frequency_penalty=1.0, repetition_penalty=1.2, logprobs=3),
         dict(min_tokens=4, logit_bias=((3, 2.0),))]
full, greedy = (jax.jit(f, donate_argnums=0) for f in (sample_full, sample_greedy))
def run(mesh):
    state, out = init_state(S, V, mesh), []
    for i, kind in enumerate(kinds):
        request = Request("r", (1, 2), SamplingParams(**kind))
        state = admit(state, i, slot_params(request, 0, (), V, (0,)))
    for t in range(6):
        logits = np.random.default_rng(t).normal(0, 1, (8, V)).astype(np.float32)
        if mesh is not None:
            logits = jax.device_put(logits, NamedSharding(mesh, P(None, "tensor")))
        sample = greedy if t == 3 else full
        state, result = sample(state, logits, np.arange(8, dtype=np.int32), np.ones(8, bool))
        out.append(result.tokens.tolist())
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    return out
alone = run(None)
assert run(Mesh(np.array(jax.devices()), ("tensor",))) == alone
assert full._cache_size() == 2 and greedy._cache_size() == 2
print("same")
"""


def test_logits_sharded_over_the_vocabulary_give_the_same_tokens() -> None:
    code = "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'\n"
    done = subprocess.run(
        [sys.executable, "-c", code + SHARDED], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_penalties_with_counts_follow_the_reference_step_by_step() -> None:
    params = SamplingParams(
        max_tokens=99, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.2
    )
    one = Request("r", (3, 3, 8), params)
    state = enter(init_state(S, V), 5, one)
    output: list[int] = []
    for t in range(30):
        logits = np.random.default_rng(t % 3).normal(0, 1, (1, V)).astype(np.float32)
        state, result = step(state, logits, [5])
        scores = reference.adjusted(logits[0], params, one.prompt, output, EOS)
        output.append(int(result.tokens[0]))
        assert scores[output[-1]] > scores.max() - 1e-5
    assert max(Counter(output).values()) < 8
    state = enter(state, 2, one, output)
    np.testing.assert_array_equal(state.counts[2], state.counts[5])
