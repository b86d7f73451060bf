"""Cost models: features, formulas worked out by hand, and the fit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import (
    BatchFeatures,
    Coefficients,
    InferMaxCostModel,
    LinearCostModel,
    experts_read,
)
from jaxserve.sched.cost.cost_model_fit import (
    FitError,
    Sample,
    columns,
    fit,
    fitted,
    least_squares,
)
from jaxserve.sched.cost.padding import Padding

UNIT = Coefficients(
    per_token=1.0,
    token_bias=2.0,
    decode_kv=3.0,
    decode_bias=4.0,
    per_decode=5.0,
    prefill_quad=6.0,
    prefill_bias=7.0,
    per_prefill=8.0,
    prefill_m=9.0,
    hidden_token=10.0,
    projected_token=12.0,
    copied_slot=13.0,
    swapped_slot=11.0,
    hidden_prefill=14.0,
    sampled_row=15.0,
    batch_bias=16.0,
    per_expert=17.0,
)


def features(counts: list[int], contexts: list[int], decoding: list[bool]) -> BatchFeatures:
    return BatchFeatures.from_rows(np.array(counts), np.array(contexts), np.array(decoding))


def test_the_features_of_a_mixed_batch() -> None:
    found = features([1, 1, 4, 2], [10, 20, 0, 6], [True, True, False, False])
    # Decodes read their cache and the token being fed; chunks cost c^2 + 2cm.
    assert found == BatchFeatures(8, 8, 11 + 21, 2, 16 + (4 + 24), 2, 6)


def test_hidden_caches_are_read_in_place_of_kv() -> None:
    counts, contexts = np.array([1, 1, 4, 2]), np.array([10, 20, 5, 6])
    decoding, hidden = np.array([True, True, False, False]), np.array([False, True, False, True])
    found = BatchFeatures.from_rows(counts, contexts, decoding, hidden=hidden, projected_tokens=3)
    plain = BatchFeatures.from_rows(counts, contexts, decoding, hidden=np.zeros(4, bool))
    assert plain == BatchFeatures.from_rows(counts, contexts, decoding)
    assert (plain.decode_kv, plain.prefill_m, plain.hidden_tokens) == (11 + 21, 5 + 6, 0)
    assert (found.decode_kv, found.prefill_m) == (11, 5)
    assert (found.hidden_tokens, found.hidden_prefill) == (21, 6)
    # The arithmetic of attention is that of any cache.
    assert (found.prefill_quad, found.projected_tokens) == (plain.prefill_quad, 3)


def test_several_batches_of_decodes_at_once() -> None:
    many = BatchFeatures.of_decodes(np.array([2, 1]), np.array([10, 4]))
    one_by_one = [features([1, 1], [3, 5], [True, True]), features([1], [3], [True])]
    model = LinearCostModel(UNIT, 3)
    expected = [model.batch_time(f) for f in one_by_one]
    assert model.batch_time(many).tolist() == expected


def test_the_linear_model_is_the_formula() -> None:
    model = LinearCostModel(UNIT, num_layers=2)
    moved = {"projected_tokens": 2, "copied_slots": 3, "saved_slots": 1, "loaded_slots": 4}
    mixed = BatchFeatures(8, 16, 32, 2, 44, 2, 6, 3, **moved, hidden_prefill=5, sampled_rows=4)
    layer = 16 * 1 + 2 + (32 * 3 + 4 + 2 * 5) + (44 * 6 + 7 + 2 * 8 + 6 * 9) + 30 + 24 + 39 + 55
    layer += 5 * 14 + 4 * 15 + 16
    assert model.batch_time(mixed) == 2 * layer
    # The biases of a part that is absent are left out.
    assert model.batch_time(BatchFeatures(2, 2, 10, 2, 0, 0, 0)) == 2 * (4 + 30 + 4 + 10 + 16)
    assert model.batch_time(BatchFeatures(3, 3, 0, 0, 9, 1, 0)) == 2 * (5 + 54 + 7 + 8 + 16)
    # One token alone is no batch; what one is rounded up to is.
    assert model.batch_time(BatchFeatures(1, 1, 5, 1, 0, 0, 0)) == 2 * (3 + 15 + 4 + 5)
    assert model.batch_time(BatchFeatures(1, 4, 5, 1, 0, 0, 0)) == 2 * (6 + 15 + 4 + 5 + 16)


def test_overlapped_copies_take_the_longer_way_of_the_link() -> None:
    model = LinearCostModel(UNIT, num_layers=2, overlapped=True)
    alone = BatchFeatures(2, 2, 10, 2, 0, 0, 0)
    assert model.batch_time(alone) == 2 * 64  # 5 slots and a bit of the link, 11 each
    for saved, loaded, seconds in ((5, 5, 128), (6, 5, 2 * 66), (0, 6, 2 * 66), (9, 7, 2 * 99)):
        moved = alone._replace(saved_slots=saved, loaded_slots=loaded)
        assert model.batch_time(moved) == seconds
    several = alone._replace(saved_slots=np.array([0, 6, 9]), loaded_slots=np.array([5, 0, 7]))
    assert model.batch_time(several).tolist() == [128, 132, 198]


def test_a_step_tells_a_fit_what_it_was_as_long_as() -> None:
    model = LinearCostModel(UNIT, num_layers=2, overlapped=True)
    batch = BatchFeatures(2, 2, 10, 2, 0, 0, 0)
    short, long = (batch._replace(saved_slots=n, loaded_slots=2) for n in (5, 6))
    mixture = replace(model, num_experts=4, experts_per_token=2)
    for made, features in itertools.product((model, mixture), (batch, short, long)):
        priced = np.array(columns(features, made)) @ fitted(made)
        assert 2 * priced == made.batch_time(features)
    names = list(UNIT.as_dict())
    seen = [names[i] for i in np.flatnonzero(columns(long, model))]
    assert seen == ["swapped_slot"]
    assert not columns(short, model)[names.index("swapped_slot")]
    # Otherwise both add up, whichever way they go.
    adds = replace(model, overlapped=False)
    assert columns(long, adds) == columns(long)
    assert columns(long)[names.index("swapped_slot")] == 8
    both = batch._replace(saved_slots=np.array([5, 6]), loaded_slots=np.array([2, 2]))
    stacked = np.stack([np.broadcast_to(c, 2) for c in columns(both, model)])
    np.testing.assert_array_equal(stacked.T, [columns(short, model), columns(long, model)])


def test_the_papers_model_floors_the_mean_and_adds_the_residual() -> None:
    model = InferMaxCostModel(LinearCostModel(UNIT, 1), (0.5, 0.25, 0.125), 1.5)
    # Two decodes over 21 tokens: 10 each; 2 tokens count as 8; attention terms times 1.5.
    found = model.batch_time(BatchFeatures(2, 2, 21, 2, 0, 0, 0))
    assert found == (2 + 2) + (0.5 + 0.25 * 8 + 0.125 * 64) + 1.5 * (4 + 3 * 20) + 10
    one = model.batch_time(BatchFeatures(3, 3, 0, 0, 9, 1, 5))
    assert one == (2 + 3) + (0.5 + 2 + 8) + (7 + 54 + 45) + 8


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_bad_coefficients_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="per_token"):
        Coefficients(value, 0, 0, 0, 0, 0, 0, 0, 0)


def test_padding_goes_to_the_next_bucket() -> None:
    padding = Padding((1, 4, 8), (16, 64))
    assert padding.padded(3, True) == 4
    assert padding.padded(17, False) == 64
    assert padding.padded(np.array([1, 5]), True).tolist() == [1, 8]
    mixed = BatchFeatures.from_rows(
        np.array([1, 5]), np.array([3, 0]), np.array([True, False]), padding=padding
    )
    assert (mixed.num_tokens, mixed.padded_tokens) == (6, 16)


def test_a_group_reads_whole_chunks_as_often_as_its_longest() -> None:
    padding = Padding((1, 4, 8), (16,), decode_group=2, decode_chunk=16)
    lengths = np.array([3, 40, 17, 16, 33])
    # 40 and 33 in three chunks each, 17 and 16 in two, 3 and nobody in one.
    assert padding.read(lengths, 8) == 2 * 16 * (3 + 2 + 1)
    # A step of one row has no group, and reads what there is.
    assert padding.read(lengths[1:2], 1) == 40
    with pytest.raises(ValueError, match="decode_chunk must be at least 1, got 0"):
        Padding((1,), (16,), decode_group=2, decode_chunk=0)


def samples(noise: float, seed: int = 0) -> tuple[LinearCostModel, list[Sample]]:
    true = LinearCostModel(Coefficients(2e-6, 1e-4, 1e-8, 2e-5, 1e-6, 3e-10, 5e-5, 2e-6, 1e-8), 4)
    rng = np.random.default_rng(seed)
    found = []
    for i in range(120):
        decodes = int(rng.integers(1, 32)) if i % 3 != 1 else 0
        chunks = int(rng.integers(1, 4)) if i % 3 != 0 else 0
        counts = np.concatenate([np.ones(decodes, int), rng.integers(2, 300, chunks)])
        contexts = rng.integers(0, 2000, decodes + chunks)
        decoding = np.arange(decodes + chunks) < decodes
        f = BatchFeatures.from_rows(counts, contexts, decoding)
        found.append(Sample(f, float(true.batch_time(f) * np.exp(noise * rng.normal()))))
    return true, found


def test_the_fit_finds_the_coefficients_back() -> None:
    true, found = samples(noise=0.0)
    result = fit(found, 4)
    for name, value in true.coefficients.as_dict().items():
        assert result.model.coefficients.as_dict()[name] == pytest.approx(value, rel=1e-4), name
    assert set(result.r2) == {"decode", "prefill", "mixed", "all"}
    assert all(value > 0.999999 for value in result.r2.values())
    assert result.leave_out_error < 1e-6


def test_the_fit_of_noisy_steps_reports_its_error() -> None:
    _, found = samples(noise=0.1)
    result = fit(found, 4)
    assert 0.05 < result.mean_error < 0.12
    assert result.mean_error < result.leave_out_error < 0.15
    assert all(value >= 0 for value in result.model.coefficients.as_dict().values())
    assert 0.8 < result.r2["all"] < 1


def test_too_few_samples_are_refused() -> None:
    _, found = samples(noise=0.0)
    with pytest.raises(FitError, match="at least 10"):
        fit(found[:9], 4)
    with pytest.raises(FitError, match="positive"):
        fit([*found, Sample(found[0].features, 0.0)], 4)


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (128, 8), (4, 4), (3, 1)])
def test_experts_read_are_as_many_as_draws_hit(num_experts: int, per_token: int) -> None:
    tokens = np.array([0, 1, 2, 7, 40, 5000])
    read = experts_read(num_experts, per_token, tokens)
    share = per_token / num_experts
    np.testing.assert_allclose(read, num_experts * (1 - (1 - share) ** tokens), rtol=1e-12)
    assert (read[0], read[-1]) == (0, num_experts)
    assert read[1] == pytest.approx(per_token)
    assert [experts_read(num_experts, per_token, int(n)) for n in tokens] == read.tolist()
    rng = np.random.default_rng(0)
    drawn = [
        len({e for _ in range(7) for e in rng.permutation(num_experts)[:per_token].tolist()})
        for _ in range(2000)
    ]
    assert np.mean(drawn) == pytest.approx(read[3], rel=0.02)


def test_a_batch_pays_for_the_experts_that_it_reads() -> None:
    dense = LinearCostModel(UNIT, 3)
    model = LinearCostModel(UNIT, 3, num_experts=8, experts_per_token=2)
    sizes = np.array([1, 2, 64])
    batch = BatchFeatures.of_decodes(sizes, 10 * sizes)
    more = model.batch_time(batch) - dense.batch_time(batch)
    np.testing.assert_allclose(more, 3 * 17 * 8 * (1 - 0.75**sizes), rtol=1e-9)
    # Padding is no token that goes to an expert.
    padded = batch._replace(padded_tokens=sizes + 100)
    np.testing.assert_allclose(model.batch_time(padded) - dense.batch_time(padded), more)
    with pytest.raises(ValueError, match=r"experts_per_token must be 1 to num_experts, 8, got 9"):
        LinearCostModel(UNIT, 3, num_experts=8, experts_per_token=9)
    with pytest.raises(ValueError, match=r"experts_per_token must be 0 to num_experts, 0, got 1"):
        LinearCostModel(UNIT, 3, experts_per_token=1)


def _mixture() -> tuple[LinearCostModel, list[BatchFeatures]]:
    true = replace(UNIT, **dict.fromkeys(UNIT.as_dict(), 0.0))
    true = replace(true, per_token=2e-6, token_bias=1e-4, decode_kv=1e-8, per_expert=4e-5)
    rows = [*(2**i for i in range(9)), 3, 5, 12, 24, 48, 96]
    batches = [features([1] * n, [100 * (n % 7)] * n, [True] * n) for n in rows]
    batches += [features([n], [0], [False]) for n in (16, 64, 256, 512)]
    return LinearCostModel(true, 4, num_experts=64, experts_per_token=4), batches


def test_what_an_expert_takes_is_fitted() -> None:
    true, batches = _mixture()
    samples = [Sample(batch, float(true.batch_time(batch))) for batch in batches]
    found = fit(samples, 4, true.experts)
    assert found.model.experts == (64, 4)
    assert found.worst_error < 1e-6
    assert found.model.coefficients.per_expert == pytest.approx(4e-5, rel=1e-3)
    without = fit(samples, 4)
    assert without.model.experts == (0, 0) and without.model.coefficients.per_expert == 0
    assert without.worst_error > 0.1  # no line is such a curve
    assert least_squares(samples, 4, true.experts).coefficients.per_expert > 0


def test_models_without_experts_are_fitted_as_if_there_were_none() -> None:
    """To the last bit: no column more takes part in a sum."""
    assert len(columns(features([1], [3], [True]))) == len(UNIT.as_dict()) - 1
    assert len(fitted(LinearCostModel(UNIT, 1))) == len(UNIT.as_dict()) - 1
    mixture = LinearCostModel(UNIT, 1, num_experts=4, experts_per_token=1)
    assert columns(features([1], [3], [True]), mixture)[-1] == 1.0
    assert fitted(mixture)[-1] == 17.0
