"""Checkpoints that want to hold the server up, and what people give instead of one: a line that
says what it is, at once."""

from __future__ import annotations

import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.checkpoint_files import check_folder
from jaxserve.config import ConfigError
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.models.rope import inverse_frequencies
from jaxserve.weights import CheckpointError, checkpoint_dtype, load_config
from tests.models.fixtures import hf_config, hf_tensors, load, refusal, write_checkpoint
from tests.server.processes import refused

HOSTILE: list[Any] = [
    -1, 0, 1, 2, 10**9, 10**400, 1e308, 1e-320, float("inf"), float("nan"), True, "", "x" * 100_000,
    [], [[]], [0] * 1000, {"a": 1},
]  # fmt: skip
SCALINGS: list[Any] = [
    {"rope_type": ["linear"]},
    {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": 1e29},
    {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 10**400},
    {"rope_type": "yarn", "factor": 4, "beta_fast": 1e29, "beta_slow": 1e-29},
    {"rope_type": "yarn", "factor": 4, "mscale": 1e29, "mscale_all_dim": 1e-29},
    {"rope_type": "linear", "factor": 2, "x" * 100_000: 1},
]
ABSENT = (
    "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "max_window_layers", "dtype",
    "sliding_window", "head_dim", "partial_rotary_factor", "attention_bias", "generation",
)  # fmt: skip


def opt(folder: Path) -> Path:
    write_checkpoint(folder, hf_config("opt"))
    return folder


@pytest.mark.parametrize("name", ["opt", "llama3", "qwen2"])
def test_no_field_is_more_than_refused(tmp_path: Path, name: str) -> None:
    """Whatever passes, its parameters can be listed."""
    hf = {**hf_config(name), "use_sliding_window": name == "qwen2"}
    for field in sorted({*hf, *ABSENT}):
        for value in HOSTILE + SCALINGS * (field == "rope_scaling"):
            (tmp_path / "config.json").write_text(json.dumps({**hf, field: value}))
            try:
                family, config, found = load_config(tmp_path)
                checkpoint_dtype(found)
            except CheckpointError as error:
                assert "\n" not in str(error) and len(str(error)) < 500
            else:
                assert len(jax.tree.leaves(family.param_specs(config))) < 1000
                if config.rope is not None:
                    inverse_frequencies(config.rope, config.head_dim)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, got 1000000000"),
        ({"max_position_embeddings": 10**10}, "max_position_embeddings must be at most 134217728"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config: bitsandbytes is not supported",
        ),
        ({"compression_config": {"format": "x"}}, r"compression_config: \{'format': 'x'\} is not"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ],
)
def test_what_config_json_may_not_say(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**hf_config("opt"), **change}))
    with pytest.raises(CheckpointError, match=says):
        checkpoint_dtype(load_config(tmp_path)[2])


def test_a_nested_or_endless_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a":' * 200_000)
    assert refusal(tmp_path) == f"cannot read {file}: its JSON is nested too deeply"
    os.truncate(file, 8 << 30)
    assert "it has 8,589,934,592 bytes, and 67,108,864 are allowed" in refusal(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert refusal(tmp_path) == f"cannot read {file}: it is no regular file"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "generation_config.json", "model.safetensors.index.json"]
)
def test_a_fifo_is_not_waited_for(tmp_path: Path, name: str) -> None:
    opt(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert f"cannot read {tmp_path / name}: it is no regular file" in refusal(tmp_path)


def test_a_shard_that_is_a_folder(tmp_path: Path) -> None:
    opt(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "first.safetensors")
    (tmp_path / "more.safetensors").mkdir()
    assert "more.safetensors: it is no regular file" in refusal(tmp_path)


def write_float8(file: Path, tensors: dict[str, np.ndarray], name: str) -> None:
    """Like safetensors, which NumPy has no float8 for, with one tensor of it."""
    header, data = {}, b""
    for key, value in tensors.items():
        dtype, stored = ("F8_E4M3", value.astype(np.uint8)) if key == name else ("F32", value)
        ends = [len(data), len(data) + stored.nbytes]
        header[key] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": ends}
        data += stored.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_float8_weights_by_name(tmp_path: Path) -> None:
    name = "model.decoder.layers.0.fc1.weight"
    opt(tmp_path)
    write_float8(tmp_path / "model.safetensors", hf_tensors(hf_config("opt")), name)
    assert refusal(tmp_path).startswith(f"tensor {name!r}: stored as F8_E4M3, which is not sup")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("quantize_config.json", "weights are quantized, but no tensor is"),
        ("hf_quant_config.json", "hf_quant_config.json: quantized weights of ModelOpt are not"),
    ],
)
def test_a_file_that_says_how_it_is_quantized(tmp_path: Path, file: str, says: str) -> None:
    (opt(tmp_path) / file).write_text("{}")
    assert says in refusal(tmp_path)


def test_tensors_that_nobody_uses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf = hf_config("llama3")
    tensors, prefix = hf_tensors(hf), "model.layers.0.self_attn"
    extra = np.zeros(2, np.float32)
    used = {**tensors, f"{prefix}.rotary_emb.inv_freq": extra}
    write_checkpoint(tmp_path, hf, used)
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
        assert "nothing uses" not in caplog.text
        write_checkpoint(tmp_path, hf, {**used, "bias": extra, "z": extra})
        load(tmp_path)
    assert "nothing uses tensor 'bias' and 1 more" in caplog.text
    write_checkpoint(tmp_path, hf, {**used, f"{prefix}.q_proj.bias": extra})
    assert f"a tensor '{prefix}.q_proj.bias', but by its config there are no such" in refusal(
        tmp_path
    )
    for name in (f"{prefix}.q_proj.weight_scale", f"{prefix}.k_scale", f"{prefix}.q_proj.g_idx"):
        write_checkpoint(tmp_path, hf, {**used, name: extra})
        assert f"tensor {name!r} is of quantized weights" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (None, "names no end-of-sequence token"),
        ([], "names no end-of-sequence token"),
        (10**9, "eos_token_id 1000000000 is outside of the vocabulary"),
        (10**10, "eos_token_id 10000000000 is outside"),
        ([2, -1], "eos_token_id -1 is outside"),
        (2, ""),
    ],
)
def test_no_end_of_sequence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: Any, says: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**hf_config("opt"), "eos_token_id": ends}))
    with caplog.at_level(logging.WARNING):
        config = load_config(tmp_path)[1]
    assert says in caplog.text and bool(says) == bool(caplog.text)
    # The others fit no array of a sampler's: every call with min_tokens failed.
    assert set(config.eos_token_ids) <= {2}


def test_what_is_given_instead_of_a_folder(tmp_path: Path) -> None:
    def said(path: Path | str) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_config(path)
        return str(caught.value)

    assert "; if it is a model of the Hugging Face Hub, download it first: hf download " in said(
        "Qwen/Qwen2.5-0.5B"
    )
    assert said(tmp_path / "a").endswith(f"no such checkpoint directory: {tmp_path / 'a'}")
    for name, content, says in (
        ("model.gguf", b"", "it does not begin as a GGUF file does; was it downloaded whole?"),
        ("model.gguf", b"GGUF", "it is cut off in its header"),
        ("blob", b"GGUF\x03", "it is cut off in its header"),
        ("model.safetensors", b"", f"give the folder that it is in, {tmp_path}"),
        ("pytorch_model.bin", b"", "it holds PyTorch weights"),
        ("notes.txt", b"", "it is a file; give the folder that holds config.json"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        assert says in said(file)
        file.unlink()
    os.mkfifo(tmp_path / "fifo")
    assert "it is neither a folder nor a file" in said(tmp_path / "fifo")
    assert "cannot look at" in said("a\0b") and "cannot look at" in said("a" * 5000)
    assert said("~nobody-of-this-name/a").startswith("no such checkpoint directory: ~nobody-of-th")


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user, before any of it is looked at."""
    (tmp_path / "model.bin").touch()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    for path in (tmp_path, tmp_path / "model.bin"):
        with pytest.raises(ValueError, match=f"^cannot look at '{path}': .*Permission denied$"):
            check_folder(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model-q4.gguf", "model-q4.gguf: it is cut off in its header"),
        ("adapter_config.json", "config.json is missing; adapter_config.json: an adapter (LoRA)"),
        ("params.json", "config.json is missing; params.json: give the checkpoint as Hugging"),
        ("snapshots/abc", "it is a folder of the Hub's cache: give {}/snapshots/abc"),
    ],
)
def test_a_folder_of_something_else(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert says.format(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pytorch_model.bin", "pytorch_model.bin holds PyTorch weights, which are not read; trans"),
        ("model.gguf", "to serve model.gguf, give that file"),
        ("tf_model.h5", "tf_model.h5 is not read"),
        ("README.md", "were its weights downloaded?"),
    ],
)
def test_weights_of_another_kind(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config("opt")))
    (tmp_path / name).touch()
    assert f"no *.safetensors files in {tmp_path}: {says}" in refusal(tmp_path)


def test_the_server_says_it_before_anything_is_imported() -> None:
    said = refused("--model=Qwen/Qwen2.5-0.5B", code=2, HF_HUB_OFFLINE="1")
    assert said.startswith("serve.py: model.path: there is no folder Qwen/Qwen2.5-0.5B, nor can ")
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B makes a folder" in said


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "null", '{"model": {"type": "BPE"}}', '{"model": ' * 1000, "\x00"],
)
def test_a_tokenizer_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model.path: cannot read the tokenizer .*\.json: .+"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_endless_or_a_fifo(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.touch()
    os.truncate(file, 8 << 30)
    with pytest.raises(ConfigError, match="it has 8,589,934,592 bytes"):
        load_tokenizer(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="it is no regular file"):
        load_tokenizer(tmp_path)
