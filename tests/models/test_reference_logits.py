"""Every family against transformers' logits: dense attention, and the paged pool. Some are compiled
as users have it, and in the slow lane all."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.dense import sequence_logits
from jaxserve.models.registry import FAMILIES, family_for
from tests.compiling import OPTIMISED
from tests.models.fixtures import NAMES, Reference, hf_config, load_reference, saved_config
from tests.models.paged import PagedRun

TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 12 * 2**-8


# Compiled as users have it, which takes three times as long.
AS_USERS_HAVE_IT = ("opt", "llama2", "mixtral", "gpt_oss", "deepseek_v2_lite")
Options = dict[str, bool | int | str]


def _options(name: str) -> Options:
    return OPTIMISED if name in AS_USERS_HAVE_IT else {}


@pytest.mark.promise(7)
def test_every_family_has_a_reference():
    covered = {hf_config(name)["model_type"] for name in NAMES}
    assert covered == {kind for family in FAMILIES for kind in family.model_types}


def _dense_logits(case: Reference, params: Any, options: Options) -> np.ndarray:
    """Of both texts, computed in float32."""

    def one(params: Any, tokens: jax.Array) -> jax.Array:
        return sequence_logits(case.family, params, case.config, tokens, dtype=jnp.float32)

    # One after the other: XLA's product of groups cannot be mapped over batches.
    both = jax.jit(
        lambda params, texts: jax.lax.map(functools.partial(one, params), texts),
        compiler_options=options,
    )
    return np.asarray(both(params, case.tokens))


@pytest.mark.promise(7)
@pytest.mark.parametrize("name", NAMES)
def test_dense_logits(name):
    case = load_reference(name)
    got = _dense_logits(case, case.params, _options(name))
    np.testing.assert_allclose(got, case.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NAMES} - {*AS_USERS_HAVE_IT}))
def test_dense_logits_as_users_have_them(name):
    case = load_reference(name)
    got = _dense_logits(case, case.params, OPTIMISED)
    np.testing.assert_allclose(got, case.logits, atol=TOLERANCE, rtol=0)


# Rounding Gemma's weights moves transformers' own logits by 14 roundings, Qwen3-Next's by 18 (one
# token in ten by more): the norm behind a delta net makes small results large. Mixtral is not
# among these: its router takes another expert for too many of the tokens.
@pytest.mark.parametrize(
    ("name", "roundings", "near"),
    [
        ("opt_post_norm", 12, 1),
        ("gemma2", 20, 1),
        ("gpt_oss", 12, 0.95),
        ("qwen3_5", 24, 0.95),
        pytest.param("qwen3_next", 48, 0.9, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", 48, 0.9, marks=pytest.mark.slow),
        *(
            pytest.param(name, 12, near, marks=pytest.mark.slow)
            for near, names in (
                (1, ("llama2", "qwen3", "granite")),
                (0.95, ("qwen2_moe", "qwen3_moe", "deepseek_v2_lite", "glm4_moe")),
                (0.9, ("deepseek_v3", "kimi_k2")),
            )
            for name in names
        ),
    ],
)
def test_dense_logits_of_bfloat16_weights_are_as_near_as_that_allows(name, roundings, near):
    """Weights of bfloat16 under float32 activations, as CPUs have it: off by some of bfloat16's
    roundings of 2**-8 of the largest logit, and by more than float32 would be. A router that
    nearly ties takes another expert, so one token in twenty of a model with experts may be off by
    any distance; one in ten where sigmoids, which are closer than softmaxes, decide."""
    case = load_reference(name)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), case.params)
    got = _dense_logits(case, rounded, _options(name))
    errors = np.abs(got - case.logits).max(axis=-1) / np.abs(case.logits).max()
    error = np.quantile(errors, near)
    assert TOLERANCE < error < roundings * 2**-8


@pytest.mark.parametrize("name", NAMES)
def test_config_saved_by_transformers_means_the_same(name):
    given, saved = hf_config(name), saved_config(name)
    family = family_for(given)
    assert family_for(saved) is family
    assert family.config_from_hf(saved) == family.config_from_hf(given)


def _prefill_then_decode(
    case: Reference,
    block_size: int,
    rows: int,
    tokens: int,
    options: Options,
    **run_options: str,
) -> list[np.ndarray]:
    """Both sequences: prefill chunks in one bucket of (rows, tokens), mixed steps, then decodes.

    Chunks fill the bucket, or not, and end before, on and after block edges.
    """
    sequences, length = case.tokens, case.tokens.shape[1]
    lengths = [length] * len(sequences)
    run = PagedRun(
        case.family,
        case.config,
        case.params,
        lengths,
        block_size,
        compiler_options=options,
        **run_options,
    )
    out: list[list[np.ndarray]] = [[] for _ in sequences]

    def step(counts: dict[int, int], rows: int, tokens: int) -> None:
        chunks = [(row, sequences[row][run.done[row] :][:n]) for row, n in counts.items()]
        for (row, _), logits in zip(chunks, run.step(chunks, rows, tokens), strict=True):
            out[row].append(logits)

    half = tokens // 2
    step({0: half}, rows, tokens)
    step({1: half + 1, 0: half - 1}, rows, tokens)  # full
    step({0: 1, 1: half - 1}, rows, tokens)  # one decodes while the other's chunk runs
    step({1: 1, 0: min(tokens - 1, length - run.done[0] - 2)}, rows, tokens)
    while run.done[1] < length:
        step({row: 1 for row in (0, 1) if run.done[row] < length}, rows, rows)
    return [np.concatenate(parts) for parts in out]


# One case of each kind of attention, and in the slow lane of each family; rope variants differ only
# in constants, which the dense test covers. The second pair of buckets has padding rows and cuts
# the last chunk short.
# `test_sharding.py` has opt and llama3, sharded.
SMALL, PADDED = (4, 2, 16), (8, 4, 24)
PAGED = [("opt", *PADDED), ("gpt_oss", *SMALL), ("deepseek_v2_lite", *PADDED), ("gemma2", *SMALL)]
PAGED += [("qwen3_5", *PADDED)]
MORE = [(name, *SMALL) for name in ("opt_post_norm", "llama2", "qwen2_moe", "smollm3")]
MORE += [(name, *PADDED) for name in ("qwen3", "phi4_mini", "mixtral", "gemma3")]
MORE += [("deepseek_v3", *SMALL), ("kimi_k2", *PADDED), ("glm4_moe", *PADDED)]
MORE += [("qwen3_next", *SMALL), ("qwen3_5_moe", *SMALL)]


@pytest.mark.promise(7)
@pytest.mark.parametrize(("name", "block_size", "rows", "tokens"), PAGED)
def test_paged_logits(name, block_size, rows, tokens):
    case = load_reference(name)
    got = _prefill_then_decode(case, block_size, rows, tokens, {})
    np.testing.assert_allclose(np.stack(got), case.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block_size", "rows", "tokens"), PAGED + MORE)
def test_paged_logits_as_users_have_them(name, block_size, rows, tokens):
    case = load_reference(name)
    got = _prefill_then_decode(case, block_size, rows, tokens, OPTIMISED)
    np.testing.assert_allclose(np.stack(got), case.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "name", ["llama2", pytest.param("deepseek_v2_lite", marks=pytest.mark.slow)]
)
def test_paged_logits_of_bfloat16_weights_and_cache_are_as_near_as_that_allows(name):
    """As CPUs serve it where numba is."""
    case = load_reference(name)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), case.params)
    case = case._replace(params=rounded)
    got = _prefill_then_decode(case, *SMALL, {}, pool_dtype="bfloat16", backend="numba")
    error = np.abs(np.stack(got) - case.logits).max() / np.abs(case.logits).max()
    assert TOLERANCE < error < BFLOAT16_TOLERANCE
