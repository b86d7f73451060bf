"""gpt-oss: what its config and its checkpoints say, wide and in MXFP4, and what is wrong with
them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
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
from jaxserve.weights import CheckpointError, load_config, load_params
from jaxserve.weights.mxfp4 import decode
from jaxserve.weights.quantize import quantize
from tests.engine import mixed_caches
from tests.models.fixtures import REFERENCE, hf_config, hf_tensors, write_checkpoint
from tests.models.test_broken_checkpoints import load, refusal

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


def test_columns_of_gate_and_up_lie_by_turns(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config("gpt_oss"))
    write_checkpoint(tmp_path, hf_config("gpt_oss"))
    layer = load(tmp_path).layers[1]
    for first, part in enumerate((layer.experts.gate, layer.experts.up)):
        both, bias = tensors[f"{EXPERTS}.gate_up_proj"], tensors[f"{EXPERTS}.gate_up_proj_bias"]
        np.testing.assert_array_equal(part.kernel, both[..., first::2])
        np.testing.assert_array_equal(part.bias, bias[..., first::2])
    np.testing.assert_array_equal(layer.experts.down.kernel, tensors[f"{EXPERTS}.down_proj"])
    sinks = tensors["model.layers.1.self_attn.sinks"]
    np.testing.assert_array_equal(layer.attn.sinks, sinks)


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
    same = jax.tree.map(np.array_equal, got, load(tmp_path / "wide"))
    assert all(jax.tree.leaves(same))
    convert.convert(tmp_path / "packed", tmp_path / "orbax", "bfloat16")
    again = jax.tree.map(np.array_equal, got.layers[0].experts.gate.kernel, _gate(tmp_path))
    assert again


def _gate(folder: Path) -> Any:
    """The wide one of the Orbax checkpoint, whose numbers bfloat16 has all."""
    family, config, hf = load_config(folder / "orbax")
    assert "quantization_config" not in hf
    params = load_params(folder / "orbax", family, config, dtype="float32")
    return params.layers[0].experts.gate.kernel


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_mxfp4_made_other_few_bits(tmp_path: Path, how: str) -> None:
    """From the wide weights; biases, router and sinks stay."""
    hf = hf_config("gpt_oss") | MXFP4
    write_checkpoint(tmp_path, hf, packed(hf_tensors(hf)))
    family, plain, _ = load_config(tmp_path)
    config = with_quantization(family, plain, how)
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


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: np.ndarray) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _without(f"{EXPERTS}.down_proj"),
            f"the checkpoint has no tensor '{EXPERTS}.down_proj'",
        ),
        (
            _without(f"{EXPERTS}.gate_up_proj_bias"),
            f"the checkpoint has no tensor '{EXPERTS}.gate_up_proj_bias'",
        ),
        (
            _without("model.layers.2.self_attn.sinks"),
            "the checkpoint has no tensor 'model.layers.2.self_attn.sinks'",
        ),
        (
            _with(f"{EXPERTS}.gate_up_proj", np.zeros((8, 32, 64), np.float32)),
            f"tensor '{EXPERTS}.gate_up_proj': expected shape [8, 32, 128], found [8, 32, 64]",
        ),
        (
            _with(f"{EXPERTS}.down_proj", np.full((8, 64, 32), np.nan, np.float32)),
            "parameter 'layers.1.experts.down.kernel' is NaN or infinite in float32",
        ),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, change: Callable[[Tensors], object], says: str
) -> None:
    tensors = hf_tensors(hf_config("gpt_oss"))
    change(tensors)
    write_checkpoint(tmp_path, hf_config("gpt_oss"), tensors)
    assert refusal(tmp_path).endswith(says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _without(f"{EXPERTS}.down_proj_scales"),
            f"the checkpoint has no tensor '{EXPERTS}.down_proj_scales', but "
            f"'{EXPERTS}.down_proj_blocks'",
        ),
        (
            _without(f"{EXPERTS}.down_proj_blocks"),
            f"the checkpoint has no tensor '{EXPERTS}.down_proj_blocks', but "
            f"'{EXPERTS}.down_proj_scales'",
        ),
        (
            _with(f"{EXPERTS}.down_proj_scales", np.zeros((8, 32, 1), np.uint8)),
            f"tensor '{EXPERTS}.down_proj_scales': expected shape [8, 32, 2], found [8, 32, 1]",
        ),
        (
            _with(f"{EXPERTS}.down_proj_scales", np.full((8, 32, 2), 255, np.uint8)),
            f"tensor '{EXPERTS}.down_proj_scales': a scale is NaN",
        ),
        (
            _with(f"{EXPERTS}.down_proj_blocks", np.zeros((8, 32, 2, 8), np.uint8)),
            f"tensor '{EXPERTS}.down_proj_blocks': expected shape [experts, out, in / 32, 16], "
            "found [8, 32, 2, 8]",
        ),
        (
            _with(f"{EXPERTS}.down_proj_blocks", np.zeros((8, 32, 2, 16), np.int8)),
            f"tensor '{EXPERTS}.down_proj_blocks': stored as I8, not as bytes (U8)",
        ),
    ],
)
def test_what_is_wrong_with_mxfp4_is_named(
    tmp_path: Path, change: Callable[[Tensors], object], says: str
) -> None:
    hf = hf_config("gpt_oss") | MXFP4
    tensors = packed(hf_tensors(hf))
    change(tensors)
    write_checkpoint(tmp_path, hf, tensors)
    assert refusal(tmp_path).endswith(says)


def test_mxfp4_of_another_size_is_named(tmp_path: Path) -> None:
    hf = hf_config("gpt_oss") | MXFP4
    write_checkpoint(tmp_path, hf | {"intermediate_size": 32}, packed(hf_tensors(hf)))
    assert "gate_up_proj': expected shape [8, 32, 64], found [8, 32, 128]" in refusal(tmp_path)


def test_safetensors_are_not_written(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    write_checkpoint(tmp_path / "hf", hf_config("gpt_oss"))
    with pytest.raises(CheckpointError, match="gate_up_proj would have to be joined again"):
        convert.convert(tmp_path / "hf", tmp_path / "out", into=convert.SAFETENSORS)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 9}, r"at most num_local_experts \(8\), got 9"),
        ({"swiglu_limit": -1}, "swiglu_limit must be a number above 0, got -1"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
    ],
)
def test_what_it_cannot_be_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf_config("gpt_oss") | change)
