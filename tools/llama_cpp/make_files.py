"""Writes a model's GGUF files for the comparison, all made from one file in float32.

    .venv-llama/bin/python tools/llama_cpp/make_files.py --source=MODEL.gguf --folder=FOLDER
    .venv-llama/bin/python tools/llama_cpp/make_files.py --random=qwen2.5-0.5b --folder=FOLDER

llama.cpp dequantises and quantises, as in its `llama-quantize`. Existing files are kept.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measures import MAX_LEN, TYPES


def quantize(source: Path, target: Path, ftype: int) -> None:
    """Writes a file in another type. Raises RuntimeError if llama.cpp fails."""
    import llama_cpp  # not installed in tests

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = ftype, True
    part = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(bytes(source), bytes(part), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot write {target}")
    part.rename(target)


def shuffle(file: Path) -> None:
    """Reorders the channels of a Llama in float32, in place. The model computes the same, but its
    groups of 32 weights change: weights from a 4-bit file lie on that type's grid, and would lose
    nothing when rounded to it again."""
    import gguf

    reader = gguf.GGUFReader(file, "r+")
    tensors = {tensor.name.removesuffix(".weight"): tensor.data for tensor in reader.tensors}
    rng = np.random.default_rng(0)
    heads = int(reader.fields["llama.attention.head_count"].contents())
    width, inner = tensors["token_embd"].shape[1], len(tensors["blk.0.ffn_up"])
    by_width, by_inner = rng.permutation(width), rng.permutation(inner)
    by_head = rng.permutation(width // heads)
    for name, data in tensors.items():
        part = name.rpartition(".")[2]
        if part in ("attn_output", "ffn_down"):  # their outputs are on the other axis
            data[:] = data[by_width]
        else:
            data[:] = data[..., by_width]
        if part in ("ffn_gate", "ffn_up"):
            data[:] = data[by_inner]
        elif part == "ffn_down":
            data[:] = data[:, by_inner]
        elif part == "attn_v":
            data[:] = data.reshape(-1, len(by_head), width)[:, by_head].reshape(data.shape)
        elif part == "attn_output":
            data[:] = data.reshape(width, -1, len(by_head))[..., by_head].reshape(data.shape)
        data.flush()


def write_random(target: Path, config: dict[str, Any]) -> None:
    """A Qwen2 of a config.json's shape with random weights and no vocabulary.

    Args:
        target: The GGUF file, in float32.
        config: The model's config.
    """
    import gguf

    width, heads = config["hidden_size"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(target, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(MAX_LEN)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)
    for name, shape in shapes(config):
        if name.endswith("norm.weight"):
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            writer.add_tensor(name, rng.standard_normal(shape, np.float32) / np.float32(width**0.5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Qwen2 with tied embeddings."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "token_embd.weight", (config["vocab_size"], width)
    yield "output_norm.weight", (width,)
    for i in range(config["num_hidden_layers"]):
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", kv, width),
            ("attn_v", kv, width),
            ("attn_output", width, width),
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ):
            yield f"blk.{i}.{name}.weight", (rows, columns)
            if name in ("attn_q", "attn_k", "attn_v"):
                yield f"blk.{i}.{name}.bias", (rows,)
        yield f"blk.{i}.attn_norm.weight", (width,)
        yield f"blk.{i}.ffn_norm.weight", (width,)


def main() -> int:
    """Writes missing files; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--source", type=Path)
    group.add_argument("--random", metavar="PRESET")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    wide = args.folder / "F32.gguf"
    if not wide.exists() and args.random:
        sys.path.append(str(Path(__file__).resolve().parents[2]))  # jaxserve need not be installed
        from jaxserve.models.presets import preset

        part = wide.with_suffix(".part")
        write_random(part, preset(args.random))
        part.rename(wide)
    elif not wide.exists():
        part = args.folder / "sorted.gguf"
        quantize(args.source, part, TYPES["float32"].ftype)
        shuffle(part)
        part.rename(wide)
    for type_ in TYPES.values():
        target = args.folder / f"{type_.gguf}.gguf"
        if not target.exists():
            quantize(wide, target, type_.ftype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
