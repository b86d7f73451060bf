"""Blocks of GGUF files that are kept: they stand for what the library makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import dequantize as by_library
from gguf import quantize as to_blocks

from jaxserve.commands import convert
from jaxserve.config import ServedModelConfig
from jaxserve.engine.startup.choices.model_options import load_shape
from jaxserve.models.base import with_quantization
from jaxserve.models.dense import sequence_logits
from jaxserve.models.fused import fuse
from jaxserve.models.quantized import BLOCKS, Quantized
from jaxserve.weights import load_config, load_params
from jaxserve.weights.gguf.blocks import split
from tests.models.gguf_files import metadata_of, tensors_of, write_gguf
from tests.models.quantized.test_quantized import widened
from tests.models.test_gguf import WIDE

TIED = {**WIDE, "tie_word_embeddings": True}


def blocks_of(kind: Type, rows: int, seed: int = 0) -> np.ndarray:
    """Random blocks of 256 numbers a row, for types that the library does not write."""
    rng = np.random.default_rng(seed)
    if kind != Type.Q4_K:
        return to_blocks(rng.normal(0, 0.05, (rows, 256)).astype(np.float32), kind)
    blocks = rng.integers(0, 256, (rows, 144), np.uint8)
    blocks[:, :4] = rng.uniform(-2e-4, 2e-4, (rows, 2)).astype(np.float16).view(np.uint8)
    return blocks


def written(path: Path, kinds: Mapping[str, Type], hf: Mapping[str, object] = WIDE) -> Path:
    """A file whose matrices have these types, by what their names contain; the rest is F32."""
    tensors, types = tensors_of(hf), {}
    for name, tensor in tensors.items():
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        if kind is not None and tensor.ndim == 2:
            tensors[name] = blocks_of(kind, len(tensor), len(name))
            types[name] = kind
    return write_gguf(path, metadata_of(hf), tensors, types)


def load(path: Path, how: str = ""):
    family, config, _ = load_config(path)
    config = with_quantization(family, config, how)
    return load_params(path, family, config, dtype="float32"), family, config


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_stands_for_what_the_library_makes_of_it(kind):
    stored = blocks_of(Type[kind], 40)
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144}[kind]
    found = split(kind, stored.reshape(40, -1, size))
    scheme = BLOCKS[kind]
    assert found.q.dtype == np.int8 and found.scale.dtype == scheme.scale
    wide = found.q * np.repeat(found.scale.astype(np.float32), 32, axis=0)
    if scheme.minimum:
        wide += np.repeat(found.minimum, 32, axis=0)
    if scheme.bits == 4:
        assert (found.q.min(), found.q.max()) == (-8, 7)
    want = by_library(stored, Type[kind])
    ends = 2.0**-23 * np.abs(want).max() if kind == "Q4_K" else 0
    np.testing.assert_allclose(wide.T, want, rtol=0, atol=ends)


@pytest.mark.parametrize("kind", BLOCKS)
def test_logits_are_those_of_the_wide_ones(tmp_path, kind):
    everything = {"blk": Type[kind], "token_embd": Type[kind]}
    path = written(tmp_path / "m.gguf", everything, TIED)
    params, family, config = load(path)
    assert config.quantization.scheme == config.quantization.table == BLOCKS[kind]
    assert not config.quantization.wide and not config.quantization.others
    wide, _, plain = load(path, "none")
    assert plain.quantization is None
    got = widened(params, family.leaves(config))
    ends = 1e-7 if kind == "Q4_K" else 0  # of values up to 0.2
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=0, atol=ends), got, wide)
    tokens = jnp.arange(16)
    want = sequence_logits(family, wide, plain, tokens)
    found = sequence_logits(family, fuse(params, config), config, tokens)
    np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-4)
    assert sum(one.nbytes for one in jax.tree.leaves(params)) < 0.3 * sum(
        one.nbytes for one in jax.tree.leaves(wide)
    )


MIXED = {
    "attn_v": Type.Q8_0,
    "ffn_down": Type.Q5_0,
    "ffn_up": Type.Q8_0,
    "blk": Type.Q4_0,
    "token_embd": Type.Q4_K,
    "output.": Type.Q5_0,
}


def test_each_weight_is_kept_by_its_own_type(tmp_path, caplog):
    with caplog.at_level("INFO"):
        params, family, config = load(written(tmp_path / "m.gguf", MIXED))
    assert "layers.0.self_attn and 0 more: q, k and v are of several types" in caplog.text
    (layer,) = params.layers
    bits = {name: getattr(layer, name).kernel for name in ("gate", "up", "down")}
    assert bits["gate"].bits == 4 and bits["up"].bits == 8
    wide = [bits["down"], *(getattr(layer.attn, part).kernel for part in "qkv"), params.lm_head]
    assert not any(isinstance(one, Quantized) for one in wide)
    assert params.embed_tokens.bits == 4 and params.embed_tokens.minimum is not None
    got, want = widened(params, family.leaves(config)), load(tmp_path, "none")[0]
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=0, atol=1e-7), got, want)


def test_they_can_be_quantised_anew(tmp_path):
    path = written(tmp_path / "m.gguf", {"blk": Type.Q4_1})
    found, _, config = load(path, "int8")
    assert config.quantization.scheme.kind == "int8" and not config.quantization.dequantizable
    assert found.layers[0].up.kernel.minimum is None


def test_convert(tmp_path, capsys):
    path = written(tmp_path / "m.gguf", MIXED)
    assert convert.main([str(path), str(tmp_path / "orbax")]) == 0
    params, _, config = load(path)
    again, _, stored = load(tmp_path / "orbax")
    assert stored.quantization == dataclasses.replace(config.quantization, dequantizable=False)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert convert.main([str(tmp_path / "orbax"), str(tmp_path / "x"), "--quantize=none"]) == 2
    assert "quantised already, not to be made 'none'" in capsys.readouterr().err
    into = tmp_path / "safetensors"
    assert convert.main([str(path), str(into), "--format=safetensors"]) == 0
    wide, _, config = load(into)
    assert config.quantization is None
    jax.tree.map(np.testing.assert_array_equal, wide, load(path, "none")[0])


@pytest.mark.parametrize(("platform", "kept"), [("cpu", True), ("gpu", False)])
def test_only_cpus_keep_the_table_of_logits(tmp_path, monkeypatch, platform, kept):
    path = written(tmp_path / "m.gguf", {"blk": Type.Q4_0, "token_embd": Type.Q8_0}, TIED)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    _, config, _ = load_shape(ServedModelConfig(path=str(path)))
    assert ("model.embed_tokens" not in config.quantization.wide) == kept
