"""GGUF files load as the Hugging Face checkpoints that they were made of."""

from __future__ import annotations

import dataclasses
import json
import logging
import struct
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import dequantize, quantize
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.checkpoint_files import check_folder, find_gguf
from jaxserve.commands.convert import convert
from jaxserve.config import ConfigError
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.gguf.config import config_json
from jaxserve.gguf.header import OTHER_TYPES, TYPES, GGUFError, read_header
from jaxserve.gguf.tokenizer import tokenizer_config_json
from jaxserve.models.registry import family_for
from jaxserve.models.rope import inverse_frequencies
from jaxserve.weights import (
    CheckpointError,
    checkpoint_dtype,
    load_config,
    load_params,
    load_sampling_defaults,
)
from jaxserve.weights.gguf.tensors import GGUFTensors
from tests.models.fixtures import (
    assert_same,
    hf_config,
    hf_tensors,
    load,
    refusal,
    write_checkpoint,
)
from tests.models.gguf_files import (
    WRITTEN,
    metadata_of,
    tensors_of,
    write_gguf,
    write_reference,
)

CASES = ("llama2", "llama3", "llama_yarn", "llama_linear", "llama_bias", "mistral", "yi",
         "qwen2", "qwen2_yarn", "qwen3", "gemma2", "gemma3", "phi3", "phi4_mini", "granite",
         "smollm3", "olmo2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2",
         "deepseek_v2_lite")  # fmt: skip
UNSAID: dict[str, dict[str, Any]] = {  # GGUF has no place for these
    "gemma2": {"query_pre_attn_scalar": 16},  # which goes by the number of layers
    "gemma3": {"query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layer_interval": 4, "no_rope_layers": None},
    "qwen2_moe": {"norm_topk_prob": False},
    "gpt_oss": {"swiglu_limit": 7.0},
}
WIDE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.promise(44)
@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_checkpoint_it_was_made_of(name: str, tmp_path: Path) -> None:
    hf = hf_config(name)
    hf |= UNSAID.get(name, {})
    if name == "llama_yarn":
        hf["rope_parameters"] = {**hf["rope_parameters"], "mscale": None, "truncate": True}
    if name.startswith("deepseek"):
        scaling = hf.get("rope_scaling") or {}
        hf["rope_scaling"] = scaling and {**scaling, "mscale": scaling["mscale_all_dim"]}
    if name.endswith("_moe"):  # all layers have experts
        hf |= {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False}
    path = write_reference(tmp_path / "model.gguf", hf)
    _, config, found = load_config(tmp_path)
    expected = family_for(hf).config_from_hf(hf)
    frequencies = (inverse_frequencies(each.rope, each.head_dim) for each in (config, expected))
    np.testing.assert_allclose(*frequencies, rtol=1e-5)
    assert (config.rope.kind, config.rope.amplitude) == (
        expected.rope.kind,
        pytest.approx(expected.rope.amplitude),
    )
    eps = pytest.approx(expected.norm_eps)
    assert dataclasses.replace(config, rope=expected.rope) == dataclasses.replace(
        expected, norm_eps=eps, init_std=config.init_std
    )
    assert checkpoint_dtype(found) == np.float32
    # Gemma's scales have 1 in them, which rounds.
    off = 2**-22 if name.startswith("gemma") else 0
    other = tmp_path / "safetensors"
    other.mkdir()
    write_checkpoint(other, hf)
    stored = load(other)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=off), load(path), stored
    )


def test_the_largest_gemma_scales_scores_by_its_width(tmp_path: Path) -> None:
    """As its config.json says: 168 where heads have 128 elements."""
    hf = hf_config("gemma3")
    given = metadata_of({**hf, "hidden_size": 5376, "num_attention_heads": 32})
    for layers, scalar in ((62, 168), (48, 16)):
        metadata = given | {"gemma3.block_count": layers}
        path = write_gguf(tmp_path / f"{layers}.gguf", metadata, tensors_of(hf))
        assert config_json(read_header(path))["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize("kind", WRITTEN)
def test_types_of_tensors(kind: Type, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata_of(WIDE), tensors_of(WIDE), kind)
    _, config, hf = load_config(path)
    stored = {Type.F16: np.float16, Type.BF16: "bfloat16"}.get(kind)
    assert checkpoint_dtype(hf) == stored
    with GGUFTensors(path, config) as files:
        for name, tensor in hf_tensors(WIDE).items():
            whole = tuple(slice(size) for size in tensor.shape)
            found = files.read(name, whole).astype(np.float32)
            # Rounding a row is no matter of its place: the order of rows is changed back exactly.
            exact = dequantize(quantize(tensor, kind), kind) if tensor.ndim == 2 else tensor
            np.testing.assert_array_equal(found, exact, name)
            part = (slice(32, 48), *(slice(64, 128) for _ in tensor.shape[1:]))
            np.testing.assert_array_equal(files.read(name, part).astype(np.float32), exact[part])


def _k_scales(packed: np.ndarray) -> tuple[list[int], list[int]]:
    """The eight scales and minima of six bits in twelve bytes, by the format's description."""
    b = [int(x) for x in packed]
    scales = [b[i] & 63 for i in range(4)]
    minima = [b[i + 4] & 63 for i in range(4)]
    scales += [(b[i + 8] & 15) | (b[i] >> 6) << 4 for i in range(4)]
    minima += [(b[i + 8] >> 4) | (b[i + 4] >> 6) << 4 for i in range(4)]
    return scales, minima


def _one_by_one(kind: Type, block: np.ndarray) -> list[float]:
    """The 256 elements of a block, each by itself."""
    half = block.view(np.float16).astype(np.float32)
    found = []
    if kind == Type.Q6_K:
        low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
        for i in range(256):
            part, j = divmod(i, 128)
            nibble = low[64 * part + j % 64] >> (0 if j < 64 else 4) & 15
            top = high[32 * part + j % 32] >> 2 * (j // 32) & 3
            value = int(nibble) + 16 * int(top) - 32
            found.append(float(half[104] * np.float32(scales[i // 16]) * np.float32(value)))
        return found
    d, least = half[0], half[1]
    scales, minima = _k_scales(block[4:16])
    high, low = block[16:48], block[48:] if kind == Type.Q5_K else block[16:]
    for i in range(256):
        group = i // 32
        value = int(low[32 * (group // 2) + i % 32] >> 4 * (group % 2) & 15)
        if kind == Type.Q5_K:
            value += 16 * int(high[i % 32] >> group & 1)
        found.append(float(d * np.float32(scales[group]) * value - least * minima[group]))
    return found


@pytest.mark.parametrize(("kind", "size"), [(Type.Q4_K, 144), (Type.Q5_K, 176), (Type.Q6_K, 210)])
def test_types_that_the_library_does_not_write(kind: Type, size: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = tensors_of(WIDE)
    for name in ("blk.0.ffn_up.weight", "blk.0.attn_k.weight"):
        blocks = random.integers(0, 256, (tensors[name].shape[0], size), np.uint8)
        blocks[:, -2:] = blocks[:, :2] = blocks[:, 2:4] = np.array([0.01], np.float16).view(
            np.uint8
        )
        tensors[name] = blocks
    path = write_gguf(tmp_path / "m.gguf", metadata_of(WIDE), tensors, kind)
    _, config, _ = load_config(path)
    with GGUFTensors(path, config) as files:
        up = files.read("model.layers.0.mlp.up_proj.weight", (slice(3, 5), slice(0, 256)))
        for row in (0, 1):
            stored = tensors["blk.0.ffn_up.weight"][3 + row]
            np.testing.assert_allclose(up[row], _one_by_one(kind, stored), rtol=1e-5, atol=1e-6)
        k = files.read("model.layers.0.self_attn.k_proj.weight", (slice(0, 2), slice(0, 256)))
        expected = _one_by_one(kind, tensors["blk.0.attn_k.weight"][2])  # of a pair, the first
        np.testing.assert_allclose(k[1], expected, rtol=1e-5, atol=1e-6)


def test_all_types_are_as_the_library_has_them() -> None:
    for number, kind in TYPES.items():
        assert (kind.name, GGML_QUANT_SIZES[Type(number)]) == (Type(number).name, kind[1:])
    for number, name in OTHER_TYPES.items():
        assert number not in TYPES
        assert number not in list(Type) or Type(number).name == name


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.IQ4_NL, Type.TQ1_0, Type.MXFP4])
def test_types_that_the_library_reads(kind: Type, tmp_path: Path) -> None:
    """They are made wide, as it makes them, in the order of rows that the model wants."""
    random = np.random.default_rng(0)
    block, size = GGML_QUANT_SIZES[kind]
    tensors, stored = tensors_of(WIDE), {}
    for name in ("blk.0.ffn_up.weight", "blk.0.attn_k.weight", "token_embd.weight"):
        rows, columns = tensors[name].shape
        shape = (rows, columns // block, size)
        # The scale of each kind is a float16 somewhere; small ones everywhere are finite.
        blocks = random.integers(0, 0x3C, shape, np.uint8).reshape(rows, -1)
        tensors[name] = stored[name] = blocks
    path = write_gguf(tmp_path / "m.gguf", metadata_of(WIDE), tensors, kind)
    params = load(path)
    want = {name: dequantize(blocks, kind) for name, blocks in stored.items()}
    np.testing.assert_array_equal(params.embed_tokens, want["token_embd.weight"])
    np.testing.assert_array_equal(params.layers[0].up.kernel, want["blk.0.ffn_up.weight"].T)
    heads = want["blk.0.attn_k.weight"].reshape(2, -1, 2, 256).swapaxes(1, 2).reshape(-1, 256)
    np.testing.assert_array_equal(params.layers[0].attn.k.kernel, heads.T)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.MXFP4])
def test_experts_are_made_wide(kind: Type, tmp_path: Path) -> None:
    """Beside matrices that are kept as they are stored, in a model whose experts are apart here and
    together in Hugging Face's."""
    hf = hf_config("gpt_oss") | {"swiglu_limit": 7.0}
    tensors = tensors_of(hf)
    experts = [name for name in tensors if name.endswith("_exps.weight")]
    kinds = {name: kind for name in experts}
    for name in experts if kind is Type.MXFP4 else ():
        shape = (*tensors[name].shape[:-1], tensors[name].shape[-1] // 32 * 17)
        tensors[name] = np.random.default_rng(0).integers(100, 130, shape, np.uint8)
    kinds |= {f"blk.{i}.attn_{part}.weight": Type.Q8_0 for i in range(4) for part in "qkv"}
    path = write_gguf(tmp_path / "m.gguf", metadata_of(hf), tensors, kinds)
    assert load_config(path)[1].quantization is not None
    params = load(path)
    for part in ("gate", "up", "down"):
        name = f"blk.1.ffn_{part}_exps.weight"
        stored = tensors[name] if kind is Type.MXFP4 else quantize(tensors[name], kind)
        found = getattr(params.layers[1].experts, part)
        want = dequantize(stored, kind).swapaxes(1, 2)
        np.testing.assert_array_equal(found.kernel, want)
        np.testing.assert_array_equal(found.bias, tensors[name.replace("weight", "bias")])


def test_what_makes_k_and_v_of_few_numbers_may_be_two_tensors(tmp_path: Path) -> None:
    hf = hf_config("deepseek_v2_lite")
    hf["rope_scaling"] = {**hf["rope_scaling"], "mscale": hf["rope_scaling"]["mscale_all_dim"]}
    metadata, tensors = metadata_of(hf), tensors_of(hf)
    whole = load(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    heads, plain, values = (
        hf[n] for n in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    for name in [name for name in tensors if name.endswith("attn_kv_b.weight")]:
        both = tensors.pop(name).reshape(heads, plain + values, -1)
        tensors[name.replace("kv_b", "k_b")] = both[:, :plain].swapaxes(1, 2)
        tensors[name.replace("kv_b", "v_b")] = both[:, plain:]
    rank, rotated = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    metadata |= {  # as it is written for a cache of these numbers
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length": rank + rotated,
        "deepseek2.attention.value_length": rank,
        "deepseek2.attention.key_length_mla": plain + rotated,
        "deepseek2.attention.value_length_mla": values,
    }
    assert_same(load(write_gguf(tmp_path / "b.gguf", metadata, tensors)), whole)


def test_experts_by_themselves_as_the_first_files_had_them(tmp_path: Path) -> None:
    hf = hf_config("mixtral")
    tensors = tensors_of(hf)
    whole = load(write_gguf(tmp_path / "a.gguf", metadata_of(hf), tensors))
    for name in [name for name in tensors if "_exps." in name]:
        for number, one in enumerate(tensors.pop(name)):
            tensors[name.replace("_exps.", f".{number}.")] = one
    assert_same(load(write_gguf(tmp_path / "b.gguf", metadata_of(hf), tensors)), whole)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"general__architecture": "bert"}, "general.architecture is 'bert', which is not supp"),
        ({"llama__block_count": None}, "it has no llama.block_count"),
        ({"llama__embedding_length": 0}, "llama.embedding_length must be a positive integer"),
        ({"llama__embedding_length": "wide"}, "llama.embedding_length must be a positive integer"),
        ({"llama__context_length": 2**31}, "llama.context_length must be at most 134217728"),
        ({"llama__rope__freq_base": float("nan")}, "llama.rope.freq_base must be a number above 0"),
        ({"llama__attention__head_count_kv": [4, 4, 2]}, "head_count_kv differs between layers"),
        ({"llama__rope__dimension_count": 4, "llama__attention__key_length": 8},
         "llama.rope.dimension_count is 4, and heads have 8"),
        ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type is 'longrope', which is n"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "attn_factor is 2.0; only 1 is supported"),
        ({"llama__expert_count": 8}, "num_experts_per_tok is missing"),
        ({"split__count": 3}, "it is a part of a model that was split; merge its parts first"),
        ({"tokenizer__ggml__eos_token_id": 61}, "tokenizer.ggml.eos_token_id is 61, which is none"),
        ({"llama__block_count": 2}, "has a tensor 'blk.2."),
        ({"llama__block_count": 4}, "has no tensor for 'model.layers.3."),
        ({"llama__feed_forward_length": 64}, "expected shape [64, 32], found [48, 32]"),
    ],
)  # fmt: skip
def test_what_is_refused(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    said = refusal(write_reference(tmp_path / "model.gguf", hf_config("llama2"), **more))
    assert says in said


def test_tensors_that_nothing_uses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf = hf_config("llama2")
    tensors = tensors_of(hf)
    extra = tensors | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    said = refusal(write_gguf(tmp_path / "a.gguf", metadata_of(hf), extra))
    assert "has a tensor 'blk.0.attn_q.bias', but by its config there are no such biases" in said
    extra = tensors | {"cls.weight": np.zeros((2, 32), np.float32)}
    with caplog.at_level(logging.WARNING):
        load(write_gguf(tmp_path / "b.gguf", {**metadata_of(hf), "llama.new": 1.0}, extra))
    assert "nothing uses tensor 'cls.weight'" in caplog.text
    assert "nothing uses the field llama.new" in caplog.text
    del tensors["output_norm.weight"]
    said = refusal(write_gguf(tmp_path / "c.gguf", metadata_of(hf), tensors))
    assert said.endswith("the checkpoint has no tensor for 'model.norm.weight'")


def test_no_end_token_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = {"tokenizer__ggml__eos_token_id": None}
    path = write_reference(tmp_path / "model.gguf", hf_config("llama2"), **more)
    with caplog.at_level(logging.WARNING):
        assert load_config(path)[1].eos_token_ids == ()
    assert "names no end-of-sequence token (eos_token_id in its metadata)" in caplog.text


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    tensors = tensors_of(WIDE)
    blocks = quantize(tensors["blk.0.ffn_up.weight"], Type.Q8_0)
    blocks[7, :2] = np.array([np.nan], np.float16).view(np.uint8)
    tensors["blk.0.ffn_up.weight"] = blocks
    said = refusal(write_gguf(tmp_path / "m.gguf", metadata_of(WIDE), tensors, Type.Q8_0))
    assert "parameter 'layers.0.up.kernel.scale' is NaN or infinite" in said


def test_a_file_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    whole = write_reference(tmp_path / "whole.gguf", hf_config("qwen2")).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, 1500, 7), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="it is cut off"):
            load_config(path)


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def head(fields: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields)


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF", "it is cut off in its header"),
        (head(version=9), "GGUF version 9 is not supported"),
        (head(version=3 << 24), "it is big-endian"),
        (head(fields=HUGE), "its header has 18,446,744,073,709,551,615 fields, and 4,096 are allo"),
        (head(tensors=HUGE), "its header has 18,446,744,073,709,551,615 tensors"),
        (head(1) + struct.pack("<Q", HUGE), "the name of a field has 18,446,744,073,709,551,615 b"),
        (head(1) + field("a", 9, struct.pack("<IQ", 4, HUGE)), "'a' has 18,446,744,073,709,551,61"),
        (head(1) + field("a", 9, struct.pack("<IQ", 4, 1 << 22)), "it is cut off in its header"),
        (head(1) + field("a", 9, struct.pack("<IQ", 8, 1 << 22)), "it is cut off in its header"),
        (head(1) + field("a", 9, struct.pack("<IQ", 9, 1)), "'a' has values of kind 9"),
        (head(1) + field("a", 77, b""), "'a' has values of kind 77"),
        (head(1) + field("a", 8, struct.pack("<Q", 2) + b"\xff\xff"), "'a' is not UTF-8"),
        (head(2) + 2 * field("a", 7, b"\1"), "it has the field 'a' twice"),
        (head(0, 1) + struct.pack("<Q1sI", 1, b"t", 99), "tensor 't' has 99 dimensions"),
        (head(0, 1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 99, 0), "'t' is of GGML type 99; kn"),
        (head(0, 1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 64, 40, 0), "of GGML type NVFP4 (40); k"),
        (head(0, 1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 8, 0), "shape [33] is not possible"),
        (head(0, 1) + struct.pack("<Q1sIQQIQ", 1, b"t", 2, HUGE, HUGE, 0, 0), "tensor 't' ends at"),
        (head(0, 1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 0, HUGE), "it is cut off: tensor 't'"),
        (
            head(1) + field("general.alignment", 4, struct.pack("<I", 3)),
            "which is not a power of two",
        ),
    ],
)
def test_headers_that_count_more_than_there_is(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert says in refusal(tmp_path / "m.gguf")


def test_a_field_of_ten_million_digits_is_shown_short(tmp_path: Path) -> None:
    more = {"general__architecture": "9" * 1_000_000}
    assert len(refusal(write_reference(tmp_path / "m.gguf", hf_config("llama2"), **more))) < 400


def test_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata_of(WIDE), tensors_of(WIDE), Type.Q4_0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "is Q4_0, which the package gguf reads: pip install gguf" in refusal(path)
    write_gguf(path, metadata_of(WIDE), tensors_of(WIDE), Type.F16)
    load(path)  # needs none


def test_where_it_is_looked_for(tmp_path: Path) -> None:
    path = write_reference(tmp_path / "model.gguf", hf_config("llama2"))
    assert find_gguf(path) == find_gguf(tmp_path) == path
    check_folder(path)
    check_folder(tmp_path)
    (tmp_path / "mmproj-f16.gguf").touch()  # of pictures
    assert find_gguf(tmp_path) == path
    (tmp_path / "other.gguf").touch()
    assert f"it has 2 GGUF files: give one of them, such as {path}" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama2")))
    assert "to serve model.gguf, give that file" in refusal(tmp_path)


def test_load_formats(tmp_path: Path) -> None:
    path = write_reference(tmp_path / "model.gguf", hf_config("llama2"))
    family, config, _ = load_config(path)
    load_params(path, family, config, dtype="float32", load_format="gguf")
    with pytest.raises(CheckpointError, match=r"load_format is orbax, but .* is GGUF"):
        load_params(path, family, config, dtype="float32", load_format="orbax")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"load_format is gguf, but .* is not a GGUF file"):
        load_params(tmp_path, family, config, dtype="float32", load_format="gguf")


def test_a_header_is_read_once(tmp_path: Path) -> None:
    path = write_reference(tmp_path / "model.gguf", hf_config("llama2"))
    first = read_header(path)
    assert read_header(path) is first
    write_reference(path, hf_config("qwen2"))
    assert read_header(path).metadata["general.architecture"] == "qwen2"


def test_converted_it_is_the_assert_same(tmp_path: Path) -> None:
    hf = hf_config("llama3")
    more: dict[str, Any] = {"tokenizer__chat_template": "{{ messages[0].content }}"}
    more |= {"general__sampling__top_k": 20, "general__sampling__temp": 0.5}
    path = write_reference(tmp_path / "model.gguf", hf, **more)
    convert(path, tmp_path / "out")
    for each in (path, tmp_path / "out"):
        assert load_sampling_defaults(each) == {"temperature": 0.5, "top_k": 20}
    (family, config, _), (_, before, _) = load_config(tmp_path / "out"), load_config(path)
    assert config == before
    assert_same(load_params(tmp_path / "out", family, config, dtype="float32"), load(path))
    tokenizers = (load_tokenizer(each) for each in (path, tmp_path / "out"))
    assert len({each.definition() for each in tokenizers}) == 1
    assert "messages[0].content" in (tmp_path / "out" / "tokenizer_config.json").read_text()
    with pytest.raises(CheckpointError, match="exists and is not an empty directory"):
        convert(path, tmp_path / "out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    more = {"tokenizer__ggml__merges": ["! !"], "tokenizer__chat_template": "{{ messages }}"}
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    return write_reference(path, hf_config("llama3"), **more).read_bytes()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_bytes_that_are_changed(whole: bytes, data: st.DataObject) -> None:
    """Whatever a damaged file says, it is refused in a line, or loads."""
    content = bytearray(whole)
    header = whole.index(b"output_norm.weight")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, header))
        new = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(new)] = new
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        for read in (
            load_config,
            load_tokenizer,
            lambda path: tokenizer_config_json(read_header(path)),
        ):
            try:
                read(path)
            except (CheckpointError, ConfigError, GGUFError) as error:
                assert "\n" not in str(error) and len(str(error)) < 1000
