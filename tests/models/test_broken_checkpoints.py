"""Checkpoints that are damaged, or are not what they say: one line that names what is wrong."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.commands import convert
from tests.models.fixtures import (
    ROOT,
    assert_same,
    hf_config,
    hf_tensors,
    load,
    refusal,
    write_checkpoint,
)

INDEX = "model.safetensors.index.json"
OPT, LLAMA = "model.decoder.layers.1", "model.layers.0"
MIXTRAL, GPT_OSS = "model.layers.1.block_sparse_moe", "model.layers.1.mlp.experts"
DEEPSEEK = "model.layers.2.self_attn"
V3 = "model.layers.1.mlp"
Change = Callable[[dict[str, np.ndarray]], object]


def whole(tensors: dict[str, np.ndarray]) -> None:
    """Changes nothing."""


def without(name: str) -> Change:
    """Takes a tensor out."""
    return lambda tensors: tensors.pop(name)


def filled(name: str, *shape: int, value: int = 0, dtype: Any = np.float32) -> Change:
    """Puts another tensor in the place of one."""
    return lambda tensors: tensors.update({name: np.full(shape, value, dtype)})


def spoiled(name: str, value: float) -> Change:
    """Puts a number in one place of a tensor."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][3, 5] = value

    return change


@pytest.mark.parametrize(
    ("name", "config", "change", "says"),
    [
        ("opt", {}, without(f"{OPT}.fc2.bias"), f"has no tensor '{OPT}.fc2.bias'"),
        ("opt", {}, filled(f"{OPT}.fc1.weight", 64, 31),
         f"'{OPT}.fc1.weight': expected shape [64, 32], found [64, 31]"),
        ("opt", {}, filled(f"{OPT}.fc1.weight", 64, 32, dtype=np.int8),
         f"'{OPT}.fc1.weight': stored as I8"),
        *(
            ("opt", {}, spoiled(f"{OPT}.fc1.weight", value),
             "parameter 'layers.1.up.kernel' is NaN or infinite in float32")
            for value in (np.nan, np.inf, -np.inf)
        ),
        ("opt", {"num_hidden_layers": 2}, whole,
         "num_hidden_layers is 2, but the checkpoint has a tensor 'model.decoder.layers.2."),
        ("opt", {"quantization_config": "gptq"}, whole,
         "config.json: quantization_config must be an object, got 'gptq'"),
        ("opt", {"quantization_config": [1]}, whole, "must be an object, got [1]"),
        ("llama3", {}, without("lm_head.weight"), "set tie_word_embeddings to true"),
        ("llama3", {"num_hidden_layers": 2}, whole, "has a tensor 'model.layers.2."),
        ("phi3", {}, filled(f"{LLAMA}.self_attn.qkv_proj.weight", 63, 32),
         "qkv_proj.weight': expected shape [64, 32], found [63, 32]"),
        ("phi3", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
         whole, "are quantized, but no tensor is"),
        ("mixtral", {}, without(f"{MIXTRAL}.experts.3.w2.weight"),
         f"has no tensor '{MIXTRAL}.experts.3.w2.weight'"),
        ("mixtral", {}, filled(f"{MIXTRAL}.experts.7.w1.weight", 63, 32),
         f"'{MIXTRAL}.experts.7.w1.weight': expected shape [64, 32], found [63, 32]"),
        ("mixtral", {}, filled(f"{MIXTRAL}.experts.8.w1.weight", 64, 32),
         "by its config.json layers have 8 experts, but the checkpoint has a tensor "
         f"'{MIXTRAL}.experts.8.w1.weight'"),
        ("mixtral", {}, spoiled(f"{MIXTRAL}.experts.5.w3.weight", np.nan),
         "parameter 'layers.1.experts.up.kernel' is NaN or infinite in float32"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, whole,
         "no tensor 'model.layers.0.mlp.gate_proj.weight'"),
        ("gpt_oss", {}, without("model.layers.2.self_attn.sinks"), "layers.2.self_attn.sinks'"),
        ("gpt_oss", {}, filled(f"{GPT_OSS}.gate_up_proj", 8, 32, 64),
         f"'{GPT_OSS}.gate_up_proj': expected shape [8, 32, 128], found [8, 32, 64]"),
        ("deepseek_v2_lite", {}, filled(f"{DEEPSEEK}.kv_a_proj_with_mqa.weight", 31, 32),
         "kv_a_proj_with_mqa.weight': expected shape [32, 32], found [31, 32]"),
        ("deepseek_v2_lite", {}, filled(f"{DEEPSEEK}.kv_a_proj_with_mqa.bias", 32),
         f"has a tensor '{DEEPSEEK}.kv_a_proj_with_mqa.bias', but by its config there are no such"),
        *(
            (name, {}, without(f"{V3}.gate.e_score_correction_bias"),
             f"has no tensor '{V3}.gate.e_score_correction_bias'")
            for name in ("deepseek_v3", "kimi_k2", "glm4_moe")
        ),
        ("deepseek_v3", {}, filled(f"{V3}.gate.e_score_correction_bias", 8),
         "gate.e_score_correction_bias': expected shape [12], found [8]"),
        ("deepseek_v3", {"kv_lora_rank": 16}, whole,
         "kv_a_proj_with_mqa.weight': expected shape [24, 32], found [32, 32]"),
        ("deepseek_v3", {"n_routed_experts": 8}, whole,
         f"'{V3}.gate.weight': expected shape [8, 32], found [12, 32]"),
        ("deepseek_v3", {"n_shared_experts": 2}, whole,
         f"'{V3}.shared_experts.gate_proj.weight': expected shape [40, 32], found [20, 32]"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, whole,
         f"no tensor '{V3}.gate_proj.weight'"),
        ("deepseek_v3", {"num_hidden_layers": 1}, whole,
         "num_hidden_layers is 1, but the checkpoint has a tensor 'model.layers.2."),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}, whole,
         "a tensor 'model.layers.0.self_attn.k_proj.bias', but by its config there are no such"),
        ("glm4_moe", {}, without("model.layers.0.self_attn.q_norm.weight"),
         "has no tensor 'model.layers.0.self_attn.q_norm.weight'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, name: str, config: dict[str, Any], change: Change, says: str
) -> None:
    tensors = hf_tensors(hf_config(name))
    change(tensors)
    write_checkpoint(tmp_path, hf_config(name) | config, tensors)
    assert says in refusal(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        *(
            ({"x.weight": file}, "weight_map: 'x.weight' is in no file")
            for file in (5, None, ["a.safetensors"], {"a": 1}, "../a.safetensors", "")
        ),
        *((none, "has no weight_map") for none in ({}, [], "x", 3)),
    ],
)
def test_an_index_of_something_else(tmp_path: Path, weight_map: object, says: str) -> None:
    write_checkpoint(tmp_path, hf_config("opt"))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    said = refusal(tmp_path)
    assert INDEX in said and says in said


@pytest.fixture
def orbax(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    write_checkpoint(tmp_path / "hf", hf_config("opt"))
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    return tmp_path / "orbax"


def test_a_damaged_orbax_checkpoint_is_one_line(orbax: Path) -> None:
    """In a process of its own: threads of the library's write to its stderr."""
    for path in (orbax / "params").rglob("d/*"):
        os.truncate(path, min(100, path.stat().st_size))
    script = (
        "import sys; from tests.models.fixtures import Path, refusal; "
        "print(refusal(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", script, str(orbax)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"cannot read {orbax / 'params'}: ")
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_a_healthy_one_is_loaded_without_a_word(
    orbax: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absl = logging.getLogger("absl")
    before = absl.level
    absl.setLevel(logging.INFO)
    try:
        load(orbax)
        assert absl.level == logging.INFO
    finally:
        absl.setLevel(before)
    assert [record for record in caplog.records if record.name == "absl"] == []


def test_a_place_that_cannot_be_written_is_found_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reading(*_: object, **__: object) -> None:
        raise AssertionError("read before it was known where to write")

    write_checkpoint(tmp_path, hf_config("opt"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(convert, "load_params", reading)
    assert convert.main([str(tmp_path), str(tmp_path / "file" / "out")]) == 2
    assert (
        capsys.readouterr().err == f"jaxserve convert: DST: {tmp_path / 'file'} is not a folder\n"
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"layer_types": ["full_attention", "full_attention", *["linear_attention"] * 3]},
            "layers.0.self_attn.*layer_types.*full_attention",
        ),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types has no full_attention"),
        ({"layer_types": ["linear_attention", "mamba"]}, "layer_types must be a list of 5"),
        ({"full_attention_interval": 5}, "layers.1.linear_attn.*layer_types.*linear_attention"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
        ({"linear_num_key_heads": 1}, "linear_num_key_heads 1 is not a multiple of num_key_value"),
        ({"linear_key_head_dim": 16}, "expected shape.*linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 3}, "conv1d.*expected shape.*linear_"),
        ({"is_causal": False}, "is_causal"),
    ],
)
def test_states_that_are_not_there(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    hf = hf_config("qwen3_next")
    write_checkpoint(tmp_path, {**hf, **changed}, hf_tensors(hf))
    assert re.search(said, refusal(tmp_path))


def test_a_state_without_a_tensor(tmp_path: Path) -> None:
    hf = hf_config("qwen3_5")
    tensors = hf_tensors(hf)
    del tensors["model.layers.2.linear_attn.A_log"]
    write_checkpoint(tmp_path, hf, tensors)
    assert re.search(r"no tensor .*A_log.*layer_types", refusal(tmp_path))


def test_images_and_further_tokens_of_qwen_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = hf_config("qwen3_5")
    rope = {"rope_theta": 1000.0, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    hf = {"model_type": "qwen3_5", "text_config": {**text, "rope_parameters": rope}}
    hf |= {"vision_config": {"depth": 1}, "tie_word_embeddings": True}
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in hf_tensors(text).items()
    }
    one = np.zeros((1, 1), np.float32)
    tensors |= {"model.visual.blocks.0.weight": one, "mtp.layers.0.fc.weight": one}
    write_checkpoint(tmp_path, hf, tensors)
    with caplog.at_level(logging.INFO):
        found = load(tmp_path)
    assert "images are refused" in caplog.text and "1 tensors mtp.*" in caplog.text
    (tmp_path / "alone").mkdir()
    write_checkpoint(tmp_path / "alone", text)
    assert_same(found, load(tmp_path / "alone"))
