"""Experts in checkpoints: stacked as they are loaded, and what is wrong with them is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.commands import convert
from jaxserve.models.base import with_quantization
from jaxserve.models.dense import sequence_logits
from jaxserve.models.fused import fuse
from jaxserve.models.quantized import dequantize
from jaxserve.models.sharding import check_tensor
from jaxserve.weights import CheckpointError, load_config, load_params, transpose_loaded
from jaxserve.weights.quantize import quantize
from tests.models.fixtures import hf_config, hf_tensors, write_checkpoint
from tests.models.quantized.test_quantized import widened
from tests.models.test_broken_checkpoints import load, refusal

Tensors = dict[str, np.ndarray]
BLOCK = "model.layers.1.block_sparse_moe"


def test_each_expert_is_where_its_number_says(tmp_path: Path) -> None:
    tensors = hf_tensors(hf_config("mixtral"))
    write_checkpoint(tmp_path, hf_config("mixtral"))
    experts = load(tmp_path).layers[1].experts
    assert experts.down.kernel.shape == (8, 64, 32)
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        kernel = getattr(experts, part).kernel
        for number in range(8):
            stored = tensors[f"{BLOCK}.experts.{number}.{name}.weight"]
            np.testing.assert_array_equal(kernel[number], stored.T)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_what_convert_writes_is_the_same(tmp_path: Path, name: str) -> None:
    for folder in ("hf", "safetensors"):
        (tmp_path / folder).mkdir()
    write_checkpoint(tmp_path / "hf", hf_config(name))
    convert.convert(tmp_path / "hf", tmp_path / "orbax", "float32")
    convert.convert(tmp_path / "orbax", tmp_path / "safetensors", "float32", into="safetensors")
    same = jax.tree.map(np.array_equal, load(tmp_path / "hf"), load(tmp_path / "orbax"))
    assert all(jax.tree.leaves(same))
    written: Tensors = {}
    for file in (tmp_path / "safetensors").glob("*.safetensors"):
        written |= load_file(file)
    wanted = hf_tensors(hf_config(name))
    assert written.keys() == wanted.keys()
    assert all(np.array_equal(written[tensor], wanted[tensor]) for tensor in wanted)


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, value: np.ndarray) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            _without(f"{BLOCK}.experts.3.w2.weight"),
            f"the checkpoint has no tensor '{BLOCK}.experts.3.w2.weight'",
        ),
        (_without(f"{BLOCK}.gate.weight"), f"the checkpoint has no tensor '{BLOCK}.gate.weight'"),
        (
            _with(f"{BLOCK}.experts.7.w1.weight", np.zeros((63, 32), np.float32)),
            f"tensor '{BLOCK}.experts.7.w1.weight': expected shape [64, 32], found [63, 32]",
        ),
        (
            _with(f"{BLOCK}.experts.8.w1.weight", np.zeros((64, 32), np.float32)),
            "by its config.json layers have 8 experts, but the checkpoint has a tensor "
            f"'{BLOCK}.experts.8.w1.weight'",
        ),
        (
            _with(f"{BLOCK}.experts.5.w3.weight", np.full((64, 32), np.nan, np.float32)),
            "parameter 'layers.1.experts.up.kernel' is NaN or infinite in float32",
        ),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, change: Callable[[Tensors], object], says: str
) -> None:
    tensors = hf_tensors(hf_config("mixtral"))
    change(tensors)
    write_checkpoint(tmp_path, hf_config("mixtral"), tensors)
    assert refusal(tmp_path).endswith(says)


def test_experts_of_a_dense_layer_are_named(tmp_path: Path) -> None:
    hf = hf_config("qwen3_moe")
    write_checkpoint(tmp_path, {**hf, "mlp_only_layers": [0, 1]}, hf_tensors(hf))
    assert "no tensor 'model.layers.0.mlp.gate_proj.weight'" in refusal(tmp_path)


def test_packed_experts_that_are_not_packed(tmp_path: Path) -> None:
    hf = hf_config("qwen3_moe")
    write_checkpoint(tmp_path, hf)
    stored = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    write_checkpoint(tmp_path, hf | stored)
    assert "says that weights are quantized, but no tensor is" in refusal(tmp_path)


@pytest.mark.parametrize(
    "how", ["int4", *(pytest.param(how, marks=pytest.mark.slow) for how in ("int8", "fp8"))]
)
def test_few_bits_say_what_they_stand_for(tmp_path: Path, how: str) -> None:
    """The router stays as it is."""
    hf = hf_config("qwen3_moe") | {"intermediate_size": 64}
    write_checkpoint(tmp_path, hf)
    family, plain, _ = load_config(tmp_path)
    config = with_quantization(family, plain, how)
    given: dict[str, Any] = {"dtype": "float32"}
    small = load_params(tmp_path, family, config, **given)
    wide = load_params(tmp_path, family, plain, **given).layers[0].experts
    experts = small.layers[0].experts
    assert np.array_equal(experts.router.kernel, wide.router.kernel)
    assert experts.down.kernel.scale.shape == (8, 1, 32)
    for part in ("gate", "up", "down"):
        stood = dequantize(getattr(experts, part).kernel, jnp.float32)
        was = getattr(wide, part).kernel
        one = quantize(was[5], config.quantization.scheme)
        assert np.isclose(stood[5], dequantize(one, jnp.float32), atol=1e-6).mean() > 0.99
        assert np.abs(stood - was).mean() < 0.05
    same = widened(small, family.leaves(config))
    tokens = jnp.arange(20)
    want = sequence_logits(family, fuse(same, plain), plain, tokens)
    turned = transpose_loaded(fuse(small, config), "float32")
    got = sequence_logits(family, turned, config, tokens, dtype=jnp.float32)
    np.testing.assert_allclose(got, want, atol=1e-3)
    with pytest.raises(ValueError, match=r"mesh\.tensor=2: a model with experts is quantised on"):
        check_tensor(config, 2)


def test_quantised_experts_are_written_as_orbax_only(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    write_checkpoint(tmp_path / "hf", hf_config("qwen3_moe"))
    target = tmp_path / "out"
    with pytest.raises(CheckpointError, match="quantised experts are not written so; use orbax"):
        convert.convert(tmp_path / "hf", target, quantize="int8", into=convert.SAFETENSORS)
    convert.convert(tmp_path / "hf", target, "float32", quantize="int8")
    family, config, _ = load_config(target)
    params = load_params(target, family, config, dtype="float32")
    assert params.layers[0].experts.up.kernel.q.dtype == np.int8


def test_random_experts_differ(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hf_config("qwen3_moe"))
    family, config, _ = load_config(tmp_path)
    params = load_params(None, family, config, dtype="float32", load_format="random")
    up = np.asarray(params.layers[0].experts.up.kernel)
    assert len(np.unique(up[:, 0, 0])) == 8
