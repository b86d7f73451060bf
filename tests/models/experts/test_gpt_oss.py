"""gpt-oss: what its config and its checkpoints say, wide and in MXFP4, and what is wrong with
them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.commands import convert
from jaxserve.config import ConfigError
from jaxserve.engine.startup.choices.model_options import choose_read
from jaxserve.models.base import with_quantization
from jaxserve.models.families.gpt_oss import config_from_hf
from jaxserve.models.quantized import dequantize
from jaxserve.models.registry import family_for
from jaxserve.models.rope import Rope
from jaxserve.weights import load_config, load_params
from jaxserve.weights.mxfp4 import decode
from jaxserve.weights.quantize import quantize
from tests.engine import mixed_caches
from tests.models.fixtures import (
    REFERENCE,
    assert_same,
    hf_config,
    hf_tensors,
    load,
    refusal,
    write_checkpoint,
)
from tests.models.test_broken_checkpoints import Change, filled, whole, without

Tensors = dict[str, np.ndarray]
CHUNKS = "mixed_chunks"
EXPERTS = "model.layers.1.mlp.experts"
MXFP4 = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
}


def packed(tensors: Tensors) -> Tensors:
    """The checkpoint with random MXFP4 in place of its experts' matrices."""
    draw = np.random.default_rng(0)
    found = {}
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = value
            continue
        experts, inputs, outputs = value.shape
        shape = (experts, outputs, inputs // 32)
        found[f"{name}_blocks"] = draw.integers(0, 256, (*shape, 16), np.uint8)
        found[f"{name}_scales"] = draw.integers(120, 125, shape, np.uint8)
    return found


def made_wide(tensors: Tensors) -> Tensors:
    """The same, as transformers saves it when it has made it wide."""
    found = {name: value for name, value in tensors.items() if value.dtype != np.uint8}
    for name in tensors:
        if name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            found[weight] = np.ascontiguousarray(
                decode(tensors[name], tensors[f"{weight}_scales"]).swapaxes(1, 2)
            )
    return found


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    stored = np.load(REFERENCE / "mxfp4" / "experts.npz")
    got = decode(stored["blocks"], stored["scales"]).swapaxes(1, 2)
    np.testing.assert_array_equal(got, stored["weights"])
    assert len(np.unique(np.abs(got))) > 100


def test_mxfp4_is_read_wide_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = hf_config("gpt_oss")
    tensors = packed(hf_tensors(hf))
    for folder, given, stored in (
        ("packed", hf | MXFP4, tensors),
        ("wide", hf, made_wide(tensors)),
    ):
        (tmp_path / folder).mkdir()
        write_checkpoint(tmp_path / folder, given, stored)
    with caplog.at_level(logging.INFO):
        got = load(tmp_path / "packed")
    assert "its MXFP4 weights, 0.00 GiB, are made wide (float32) and take 0.00 GiB" in caplog.text
    assert_same(got, load(tmp_path / "wide"))
    convert.convert(tmp_path / "packed", tmp_path / "orbax", "bfloat16")
    # Whose numbers bfloat16 has all.
    assert "quantization_config" not in load_config(tmp_path / "orbax")[2]
    again = load(tmp_path / "orbax").layers[0].experts.gate.kernel
    np.testing.assert_array_equal(again, got.layers[0].experts.gate.kernel)


def test_mxfp4_made_other_few_bits(tmp_path: Path) -> None:
    """From the wide weights; biases, router and sinks stay."""
    two = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    hf = hf_config("gpt_oss") | MXFP4 | two
    write_checkpoint(tmp_path, hf, packed(hf_tensors(hf)))
    family, plain, _ = load_config(tmp_path)
    config = with_quantization(family, plain, "int4")
    small = load_params(tmp_path, family, config, dtype="float32").layers[1]
    wide = load_params(tmp_path, family, plain, dtype="float32").layers[1]
    assert np.array_equal(small.experts.router.kernel, wide.experts.router.kernel)
    assert np.array_equal(small.experts.up.bias, wide.experts.up.bias)
    assert np.array_equal(small.attn.sinks, wide.attn.sinks)
    for part in ("gate", "up", "down"):
        stood = dequantize(getattr(small.experts, part).kernel, jnp.float32)
        one = quantize(getattr(wide.experts, part).kernel[5], config.quantization.scheme)
        assert np.isclose(stood[5], dequantize(one, jnp.float32), atol=1e-6).mean() > 0.99


def test_hidden_caches_are_refused() -> None:
    """Of layers that are alike, too."""
    hf = hf_config("gpt_oss") | {"num_key_value_heads": 4, "head_dim": 8}
    config = config_from_hf(hf | {"layer_types": ["full_attention"] * 4})
    assert not config.kinds
    with pytest.raises(ConfigError, match=r"hidden_read=projected: .* are capped or have sinks"):
        choose_read("projected", CHUNKS, mixed_caches.make(CHUNKS), config)


BYTES: dict[str, Any] = {"dtype": np.uint8}
BLOCKS, SCALES = f"{EXPERTS}.down_proj_blocks", f"{EXPERTS}.down_proj_scales"


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        ({}, without(SCALES), f"the checkpoint has no tensor '{SCALES}', but '{BLOCKS}'"),
        ({}, without(BLOCKS), f"the checkpoint has no tensor '{BLOCKS}', but '{SCALES}'"),
        ({}, filled(SCALES, 8, 32, 1, **BYTES),
         f"tensor '{SCALES}': expected shape [8, 32, 2], found [8, 32, 1]"),
        ({}, filled(SCALES, 8, 32, 2, value=255, **BYTES), f"tensor '{SCALES}': a scale is NaN"),
        ({}, filled(BLOCKS, 8, 32, 2, 8, **BYTES),
         f"tensor '{BLOCKS}': expected shape [experts, out, in / 32, 16], found [8, 32, 2, 8]"),
        ({}, filled(BLOCKS, 8, 32, 2, 16, dtype=np.int8),
         f"tensor '{BLOCKS}': stored as I8, not as bytes (U8)"),
        ({"intermediate_size": 32}, whole,
         "gate_up_proj': expected shape [8, 32, 64], found [8, 32, 128]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_mxfp4_is_named(
    tmp_path: Path, config: dict[str, Any], change: Change, says: str
) -> None:
    hf = hf_config("gpt_oss") | MXFP4
    tensors = packed(hf_tensors(hf))
    change(tensors)
    write_checkpoint(tmp_path, hf | config, tensors)
    assert refusal(tmp_path).endswith(says)


def test_a_config_without_fields_is_that_of_the_large_model() -> None:
    hf = {"model_type": "gpt_oss"}
    config = config_from_hf(hf)
    assert family_for(hf).num_params(config) == pytest.approx(116.8e9, rel=0.01)
    assert config.rope == Rope(
        kind="yarn", theta=150000.0, factor=32.0, original_max=4096, low=1.0, high=32.0,
        truncate=False, amplitude=config.rope.amplitude,
    )  # fmt: skip
    assert config.max_position == 131072
    assert [kind.sliding_window for kind in config.layer_kinds[:3]] == [128, None, 128]
    assert (config.experts.limit, config.experts.alpha) == (7.0, 1.702)
