"""Sampling at its limits: counts, penalties, bias, errors, shards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.engine.sampling.sampling_reference as reference
from jaxserve.engine.device import sampling_state
from jaxserve.engine.device.sampling import NOT_FINITE, mask_words, sample_full, sample_greedy
from jaxserve.engine.device.sampling_state import RequestRow, admit, init_state, warm_up
from jaxserve.engine.device.verification import Checked
from jaxserve.sched.request import (
    MAX_LOGIT_BIAS,
    MIN_REPETITION_PENALTY,
    Request,
    SamplingParams,
)
from tests.compiling import virtual_devices
from tests.engine.sampling.sampling_steps import EOS, R, S, V, enter, full, request, step


def test_logit_bias_adds_up_and_reaches_its_limit_of_entries() -> None:
    vocab = 400
    most = tuple((token, -100.0) for token in range(MAX_LOGIT_BIAS - 2))
    bias = (*most, (350, 2.0), (350, 2.0))
    logits = np.zeros((1, vocab))
    logits[0, [5, 360]] = 50.0, 3.0
    state = enter(init_state(2, vocab), 1, request(logit_bias=bias))
    _, result = step(state, logits, [1], rows=1)
    assert int(result.tokens[0]) == 350


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 5e-324])
def test_the_smallest_top_p_leaves_the_likeliest_token(top_p: float) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (1, V)).astype(np.float32)
    state = enter(init_state(S, V), 0, request(temperature=2.0, top_p=top_p, seed=1))
    _, result = step(state, logits, [0])
    assert int(result.tokens[0]) == logits.argmax()


def test_the_smallest_repetition_penalty_is_computed_right() -> None:
    logits = np.full((1, V), -1.0)
    logits[0, [3, 5, 7]] = 1e3, 1e3 + 1, 1e3 + 2
    sampling = {"repetition_penalty": MIN_REPETITION_PENALTY, "temperature": 1.0, "seed": 1}
    state = enter(init_state(S, V), 0, Request("r", (3, 5), SamplingParams(**sampling)))
    _, result = step(state, logits, [0])
    assert int(result.tokens[0]) == 5


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
        {"logit_bias": ((3, 5.0),), "logprobs": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 4},
    ],
    ids=str,
)
def test_what_is_no_number_is_told_and_is_its_rows_alone(sampling: dict[str, Any]) -> None:
    """Not of a row that a grammar leaves nothing, nor where some tokens are ruled out."""
    whole = np.random.default_rng(0).normal(0, 3, (R, V)).astype(np.float32)
    whole[5, 1::2] = -np.inf
    broken = whole.copy()
    broken[0], broken[1, 7], broken[2, 3], broken[3] = np.nan, np.nan, np.inf, -np.inf
    masks = np.full((R, mask_words(V)), -1, np.int32).view(np.uint32)
    masks[4] = 0
    slots, emit = np.arange(R, dtype=np.int32), np.ones(R, bool)
    for more in ((), (masks,)):
        tokens = []
        for logits in (whole, broken):
            state = init_state(S, V)
            for slot in range(R):
                state = enter(state, slot, request(**{**sampling, "seed": slot}))
            _, result = full(state, logits, slots, emit, *more)
            tokens.append(result.tokens.tolist())
        assert tokens[1][:4] == [NOT_FINITE] * 4
        assert tokens[1][4:] == tokens[0][4:]
        assert min(tokens[0]) >= 0


def test_drafts_behind_what_is_no_number_do_not_stand() -> None:
    logits = np.zeros((4, V), np.float32)
    logits[[0, 1, 2, 3], [5, 6, 7, 8]] = 1
    logits[1, 3] = np.nan
    checked = Checked(jnp.array([False, True, True, True]), jnp.array([4, 5, 6, 7]))
    newest, tokens = sample_greedy(
        init_state(S, V).newest, jnp.asarray(logits), jnp.zeros(4, int), jnp.ones(4, bool), checked
    )
    assert tokens.tolist() == [5, NOT_FINITE, 7, 8]
    assert int(newest.num_generated[0]) == 2


@pytest.mark.promise(8)
def test_logprobs_are_the_models_own_whatever_is_sampled() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (3, V)).astype(np.float32)
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
    state, alone = step(state, logits[1:2], [1])  # who wants no alternatives
    assert abs(float(alone.chosen_logprob[0]) - logprobs[1, int(alone.tokens[0])]) < 1e-5
    _, silent = step(state, logits[2:], [2])
    assert not np.any(silent.top_logprobs) and not np.any(silent.chosen_logprob)


@pytest.mark.parametrize(
    "penalty",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 2.0},
        {"logit_bias": ((5, -2.0),)},
    ],
    ids=str,
)
def test_each_penalty_is_computed_where_nobody_asks_for_another(penalty: dict[str, Any]) -> None:
    logits = np.zeros((1, V))
    logits[0, [5, 6]] = 3.0, 2.0
    state = enter(init_state(S, V), 0, request(**penalty), [5])
    _, result = step(state, logits, [0])
    assert int(result.tokens[0]) == 6


def test_counts_saturate() -> None:
    state = enter(init_state(S, V), 0, request((6,), frequency_penalty=1e-4), [5] * 40_000)
    logits = np.zeros((1, V))
    logits[0, 5] = 10.0
    for _ in range(2):
        state, result = step(state, logits, [0])
        assert int(result.tokens[0]) == 5
    assert int(state.counts[0, 5]) == sampling_state.COUNT_MASK
    assert int(state.counts[0, 6]) == sampling_state.PROMPT_BIT


def test_nothing_compiles_after_warm_up_and_plain_rows_carry_no_counts() -> None:
    state = warm_up(init_state(S, V))
    before = sampling_state._admit._cache_size(), sampling_state._admit_counted._cache_size()
    with jax.transfer_guard("disallow"):
        for slot, one in enumerate(
            (request(), request(temperature=1.0, seed=3), request(presence_penalty=1.0))
        ):
            row = RequestRow(one, V, EOS).slot_params(0, [1, 2])
            assert (row.counts is None) == (slot < 2)
            state = admit(state, slot, row)
    after = sampling_state._admit._cache_size(), sampling_state._admit_counted._cache_size()
    assert before == after
    assert state.last_token.tolist()[:3] == [2, 2, 2]


def test_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"slot: must be in 0\.\.8, got 9"):
        enter(init_state(S, V), S, request())
    with pytest.raises(ValueError, match="eos_ids: has 17 entries; at most 16"):
        RequestRow(request(), V, range(17))


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxserve.engine.device.sampling_state import RequestRow, admit, init_state
from jaxserve.sched.request import Request, SamplingParams
V, S = 96, 8
kinds = [dict(), dict(temperature=1.0, seed=1, top_k=9), dict(temperature=1.0, seed=2, top_p=0.7),
         dict(frequency_penalty=1.0, repetition_penalty=1.2, logprobs=3),
         dict(min_tokens=4, logit_bias=((3, 2.0),))]
from tests.engine.sampling.sampling_steps import full, greedy
def run(mesh):
    state, out = init_state(S, V, mesh), []
    for i, kind in enumerate(kinds):
        request = Request("r", (1, 2), SamplingParams(**kind))
        state = admit(state, i, RequestRow(request, V, (0,)).slot_params(0, ()))
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
    env = {**os.environ, "XLA_FLAGS": virtual_devices(4)}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def test_penalties_and_min_tokens_follow_the_reference_step_by_step() -> None:
    params = SamplingParams(
        max_tokens=99,
        min_tokens=3,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        repetition_penalty=1.2,
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_a_mask_allows_is_drawn(temperature: float) -> None:
    """Whatever else is asked for; rows of full masks are as without any."""
    vocab = 70
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 30, (4, vocab)), jnp.float32)
    bias, early = ((3, 100.0),), {"min_tokens": 5, "stop_token_ids": (3, 69)}
    masks = np.full((4, mask_words(vocab)), 2**32 - 1, np.uint32)
    masks[1] = [0, 0, 1 << 5]  # token 69 alone
    masks[2] = [1 << 3, 1 << 8, 0]  # a stop token, and another
    masks[3] = [1 << 3, 0, 1 << 5]  # stop tokens alone
    state = init_state(4, vocab)
    for slot in range(4):
        asked = request(temperature=temperature, seed=7, logprobs=1, logit_bias=bias, **early)
        state = enter(state, slot, asked)
    slots, emit = jnp.arange(4), jnp.ones(4, bool)
    _, free = jax.jit(sample_full)(state, logits, slots, emit)
    _, held = jax.jit(sample_full)(state, logits, slots, emit, jnp.asarray(masks))
    everything = jnp.full_like(masks, 2**32 - 1)
    _, unmasked = jax.jit(sample_full)(state, logits, slots, emit, everything)
    jax.tree.map(np.testing.assert_array_equal, unmasked, free)
    tokens = held.tokens.tolist()
    assert tokens[0] == free.tokens[0]
    assert tokens[1:3] == [69, 40]
    assert tokens[3] in (3, 69)
    model = jax.nn.log_softmax(logits)[jnp.arange(4), held.tokens]
    np.testing.assert_allclose(held.chosen_logprob, model, rtol=1e-5)
