"""Quantised weights: what they stand for, and what a model makes of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.base import with_quantization
from jaxserve.models.dense import sequence_logits
from jaxserve.models.fused import fuse, fused_specs, param_bytes
from jaxserve.models.layers import embed_rows, matmul
from jaxserve.models.quantized import Quantized, Scheme, dequantize, parse_quantization
from jaxserve.models.sharding import check_tensor
from jaxserve.weights import load_config, load_params, load_preset
from jaxserve.weights.quantize import quantize
from tests.models.fixtures import hf_config, load_reference, write_checkpoint

ERROR = {"int8": 0.015, "int4": 0.12, "fp8": 0.03}


def is_quantized(one) -> bool:
    return isinstance(one, Quantized)


def widened(params, leaves, dtype=jnp.float32):
    """The parameters with what quantised ones stand for in their place."""
    return jax.tree.map(
        lambda leaf, one: (
            dequantize(one, dtype, transposed=leaf.is_table) if is_quantized(one) else one
        ),
        leaves,
        params,
    )


def in_groups(name: str) -> dict:
    """The config.json of a reference case whose widths are multiples of 32."""
    hf = hf_config(name)
    return {**hf, "intermediate_size": 64} if "intermediate_size" in hf else hf


@pytest.mark.parametrize(
    ("how", "transposed"),
    [
        ("int8", True),
        ("int8:group=32", False),
        ("int4", False),
        ("int4:group=32,zero", True),
        ("fp8", True),
    ],
)
def test_a_weight_stays_what_it_was(how, transposed):
    scheme = parse_quantization(how).scheme
    weights = jax.random.normal(jax.random.key(0), (128, 64)) * jnp.linspace(0.01, 1, 64)
    small = quantize(weights.T if transposed else weights, scheme, transposed=transposed)
    back = dequantize(small, jnp.float32, transposed=transposed)
    back = back.T if transposed else back
    error = jnp.linalg.norm(back - weights, axis=0) / jnp.linalg.norm(weights, axis=0)
    assert float(error.max()) < ERROR[scheme.kind]
    x = jax.random.normal(jax.random.key(1), (3, 128))
    got = matmul(x, small, transposed=transposed)
    np.testing.assert_allclose(got, x @ back, rtol=1e-4, atol=1e-4)
    if transposed:
        rows = embed_rows(small, jnp.array([5, 0, 99]), jnp.float32)
        np.testing.assert_array_equal(rows, back.T[jnp.array([5, 0, 63])])


@settings(max_examples=10)
@given(st.lists(st.integers(-8, 7), min_size=32, max_size=32), st.floats(1e-4, 1e4))
def test_numbers_of_a_grid_are_kept(numbers, scale):
    """A group that lies on a grid of its own scale comes back, for some scale near it."""
    weights = np.array([*numbers, -8, 7], np.float32)[:32, None] * np.float32(scale)
    small = quantize(jnp.asarray(weights), Scheme("int8"))
    back = np.asarray(dequantize(small, jnp.float32))
    most = np.abs(weights).max()
    assert np.abs(back - weights).max() <= most / 127 * 0.51 + 1e-30


@pytest.mark.parametrize("sign", [1, -1])
def test_the_number_without_an_opposite_goes_to_the_end_that_needs_it(sign):
    """Without a zero point the scale may be negative."""
    weights = sign * np.resize(np.arange(-8, 8, dtype=np.float32), (32, 1)) * 0.5
    small = quantize(jnp.asarray(weights), Scheme("int4", 32, scale="bfloat16"))
    np.testing.assert_array_equal(dequantize(small, jnp.float32), weights)


def test_scales_are_fitted_to_the_numbers_that_they_make():
    """No ratio that is tried makes as small an error."""
    weights = np.asarray(jax.random.normal(jax.random.key(0), (32, 256)))
    scale = np.asarray(quantize(jnp.asarray(weights), Scheme("int4", 32)).scale)
    q = np.clip(np.round(weights / scale), -8, 7)
    best = (weights * q).sum(axis=0) / (q * q).sum(axis=0)
    assert np.median(abs(scale / best - 1)) < 1e-3


def test_groups_of_zeros():
    small = quantize(jnp.zeros((64, 4)), Scheme("int4", 32, True, "bfloat16"))
    assert not np.asarray(dequantize(small, jnp.float32)).any()
    assert np.asarray(small.scale.astype(jnp.float32)).all()


@pytest.mark.parametrize(
    "text", ["int5", "int4:group=48", "fp8:group=32", "int8:zero", "int4:", "int4:group=", "INT8"]
)
def test_unknown_ways(text):
    if text == "int4:":
        assert parse_quantization(text) == parse_quantization("int4")
        return
    with pytest.raises(ValueError, match="must be int8, int4 or fp8"):
        parse_quantization(text)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama3", "int8"),
        ("llama3", "int4"),
        ("llama3", "fp8"),
        ("opt", "int4:group=32,zero"),
        ("gemma2", "int8:group=32"),
    ],
)
def test_logits_are_those_of_its_own_wide_weights(tmp_path, name, how):
    write_checkpoint(tmp_path, {**in_groups(name), "num_hidden_layers": 1})
    family, plain, _ = load_config(tmp_path)
    config = with_quantization(family, plain, how)
    params = load_params(tmp_path, family, config, dtype="float32")
    assert is_quantized(params.embed_tokens)
    wide = widened(params, family.leaves(config))
    fused = fuse(params, config)
    assert is_quantized(fused.layers[0].attn.qkv.kernel)
    tokens = load_reference(name).tokens[0]
    want = sequence_logits(family, wide, plain, tokens)
    for own in (params, fused):
        got = sequence_logits(family, own, config, tokens, dtype="float32")
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("how", ["int4:group=32,zero", "fp8"])
def test_bytes_and_random_weights(how):
    family, config, _ = load_preset("opt-125m")
    config = dataclasses.replace(config, num_layers=1, vocab_size=512)
    wide = param_bytes(config, "float32")
    config = with_quantization(family, config, how)
    params = load_params(None, family, config, dtype="float32", load_format="random")
    kinds = {"int8": 0.25, "int4": 0.125, "fp8": 0.25}
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert stored == param_bytes(config, "float32")
    positions = params.embed_positions.nbytes
    share = (stored - positions) / (wide - positions)
    assert kinds[config.quantization.scheme.kind] < share < 1.25 * kinds["int8"]
    up = dequantize(params.layers[0].up.kernel, jnp.float32)
    assert float(up.std()) == pytest.approx(config.init_std, rel=0.1)
    specs = fused_specs(family, config, 1)
    shapes = jax.tree.map(lambda spec: spec.shape, specs)
    assert shapes == jax.tree.map(lambda one: one.shape, fuse(params, config))


def test_groups_that_divide_nothing():
    family, config, _ = load_preset("opt-125m")
    odd = dataclasses.replace(config, d_ff=100)
    with pytest.raises(ValueError, match=r"layers\.0\.fc2: groups of 32 do not divide 100 inputs"):
        with_quantization(family, odd, "int4")
    grouped = with_quantization(family, config, "int4:group=128")
    check_tensor(grouped, 6)
    with pytest.raises(ValueError, match="would cut the groups of 128"):
        check_tensor(grouped, 12)
    with pytest.raises(ValueError, match="quantised already"):
        with_quantization(family, grouped, "int8")


def test_a_weight_that_is_nan_is_found_after_rounding():
    """Its group's scale is NaN, which is refused as any parameter that is NaN."""
    weight = np.ones((64, 8), np.float32)
    weight[3, 5] = np.nan
    for how in ("int8", "int4:group=32,zero", "fp8"):
        made = quantize(jnp.asarray(weight), parse_quantization(how).scheme)
        assert np.isnan(np.asarray(made.scale, np.float32)).any(), how
