"""Experts in checkpoints: stacked as they are loaded, and what is wrong with them is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from tests.models.fixtures import (
    assert_same,
    hf_config,
    hf_tensors,
    load,
    write_checkpoint,
)
from tests.models.quantized.test_quantized import widened


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_what_convert_writes_is_the_same(tmp_path: Path, name: str) -> None:
    for folder in ("hf", "safetensors"):
        (tmp_path / folder).mkdir()
    write_checkpoint(tmp_path / "hf", hf_config(name))
    convert.convert(tmp_path / "hf", tmp_path / "orbax", "float32")
    convert.convert(tmp_path / "orbax", tmp_path / "safetensors", "float32", into="safetensors")
    assert_same(load(tmp_path / "hf"), load(tmp_path / "orbax"))
    written: dict[str, np.ndarray] = {}
    for file in (tmp_path / "safetensors").glob("*.safetensors"):
        written |= load_file(file)
    wanted = hf_tensors(hf_config(name))
    assert written.keys() == wanted.keys()
    assert all(np.array_equal(written[tensor], wanted[tensor]) for tensor in wanted)


@pytest.mark.parametrize("how", ["int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_few_bits_say_what_they_stand_for(tmp_path: Path, how: str) -> None:
    """The router stays as it is."""
    one = {"num_hidden_layers": 1, "mlp_only_layers": []}
    hf = hf_config("qwen3_moe") | {"intermediate_size": 64, **one}
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
    assert load(target).layers[0].experts.up.kernel.q.dtype == np.int8


def test_random_experts_differ(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hf_config("qwen3_moe"))
    family, config, _ = load_config(tmp_path)
    params = load_params(None, family, config, dtype="float32", load_format="random")
    up = np.asarray(params.layers[0].experts.up.kernel)
    assert len(np.unique(up[:, 0, 0])) == 8
