"""Converts a Hugging Face directory or a GGUF file to a checkpoint that loads faster or is smaller.

    jaxserve convert SRC DST [--dtype=auto|float32|bfloat16|float16]
    jaxserve convert SRC DST --quantize=int4:group=32 --check=some.txt
    jaxserve convert SRC DST --quantize=int8 --format=safetensors
    jaxserve convert smollm2 DST

DST gets params/ (Orbax, which restores onto any sharding), or safetensors, quantised ones in
compressed-tensors' format; config.json and the tokenizer's files. Serve it like any checkpoint. The
whole model passes through host memory. --quantize is as model.quantization; safetensors keep
embeddings and the output table as they are. --check compares how well SRC and DST predict a text.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint_files import find_gguf
from jaxserve.checkpoints.hub import local_path
from jaxserve.command_line import Parser, exit_code
from jaxserve.config import DTYPES, ConfigError
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.gguf.config import generation_config_json
from jaxserve.gguf.header import GGUFError, read_header
from jaxserve.gguf.tokenizer import tokenizer_config_json, tokenizer_json
from jaxserve.models.base import Family, Leaf, ModelConfig, with_quantization
from jaxserve.models.perplexity import perplexity
from jaxserve.models.quantized import NONE
from jaxserve.models.sharding import TENSOR
from jaxserve.progress import Show
from jaxserve.weights import CheckpointError, checkpoint_dtype, load_config, load_params
from jaxserve.weights.export import compressed_config, save_safetensors
from jaxserve.weights.orbax_io import save_orbax
from jaxserve.weights.quantized_config import as_json
from jaxserve.writable import check_folder

ORBAX, SAFETENSORS = "orbax", "safetensors"
COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
          "vocab.json", "merges.txt", "chat_template*", "LICENSE*", "additional_chat_templates/*",
          "modules.json", "*_Pooling/config.json")  # fmt: skip


def convert(
    source: Path,
    target: Path,
    dtype: str = "auto",
    *,
    quantize: str = "",
    into: str = ORBAX,
    progress: bool = False,
) -> None:
    """Writes the checkpoint in `source` to `target`.

    Args:
        dtype: of the stored parameters that are not quantised; "auto" takes it from config.json, or
        float32.
        quantize: as `model.quantization`; "" keeps the weights as they are, but dequantises those
        of a GGUF file for SAFETENSORS.
        into: ORBAX or SAFETENSORS.

    Raises:
        CheckpointError: `source` cannot be loaded or quantised like this, or `target` has other
        files or cannot be written.
        OSError: the disk is full.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty directory")
    try:
        check_folder("DST", target)
    except ValueError as error:
        raise CheckpointError(str(error).removeprefix("--")) from None  # not a flag here
    family, config, hf = load_config(source)
    if into == SAFETENSORS and (joined := family.joined_tensor(config)) is not None:
        raise CheckpointError(
            f"--format={SAFETENSORS}: {joined} would have to be joined again, which is not "
            f"supported; use {ORBAX}"
        )
    if into == SAFETENSORS and config.quantization is not None:
        # compressed-tensors has no minimums, and one quantisation for all weights.
        quantize = quantize or (NONE if config.quantization.dequantizable else "")
    try:
        config = with_quantization(family, config, quantize)
    except ValueError as error:
        raise CheckpointError(f"--quantize: {error}") from None
    if into == SAFETENSORS and config.quantization is not None and config.experts is not None:
        raise CheckpointError(
            f"--format={SAFETENSORS}: quantised experts are not written so; use {ORBAX}"
        )
    if quantize and config.quantization is not None and into == SAFETENSORS:
        config = _with_wide_tables(family, config)
    chosen = (checkpoint_dtype(hf) or jnp.dtype("float32")) if dtype == "auto" else jnp.dtype(dtype)
    gguf = find_gguf(source)
    params = load_params(
        source,
        family,
        config,
        dtype=chosen,
        mesh=_cpu_mesh(),
        load_format="auto",
        progress=Show.where_wanted(progress),
    )
    target.mkdir(parents=True, exist_ok=True)
    for field in ("torch_dtype", "quantization_config", "compression_config"):
        hf.pop(field, None)
    hf["dtype"] = chosen.name
    if into == ORBAX:
        save_orbax(target, params)
        if config.quantization is not None:
            hf["quantization_config"] = as_json(config.quantization)
    else:
        save_safetensors(target, params, family, config, chosen)
        if config.quantization is not None:
            ignore = sorted({*config.quantization.wide, "lm_head"})
            hf["quantization_config"] = compressed_config(config.quantization.scheme, ignore)
    _write_json(target / "config.json", hf)
    if gguf is not None:
        header = read_header(gguf)
        _write_json(target / "tokenizer.json", tokenizer_json(header))
        _write_json(target / "tokenizer_config.json", tokenizer_config_json(header))
        if sampling := generation_config_json(header):
            _write_json(target / "generation_config.json", sampling)
        return
    for pattern in COPIED:
        for path in source.glob(pattern):
            there = target / path.relative_to(source)
            there.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, there)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def compare(source: Path, target: Path, text: Path) -> str:
    """Compares how two checkpoints of one model predict a text. Returns a line.

    Raises:
        CheckpointError: a checkpoint cannot be loaded, or the text has fewer than two tokens.
        ConfigError: the tokenizer cannot be loaded.
        OSError: the text cannot be read.
    """
    tokens: np.ndarray | None = None
    found = []
    for folder in (source, target):
        family, config, _ = load_config(folder)
        if tokens is None:
            tokenizer = load_tokenizer(folder, config.vocab_size)
            given = text.read_text(encoding="utf-8", errors="replace")[:_MOST_CHARACTERS]
            tokens = np.asarray(tokenizer.encode(given), np.int32)
            if len(tokens) < 2:
                raise CheckpointError(f"--check: {text} has fewer than two tokens")
        mesh = _cpu_mesh()
        params = load_params(folder, family, config, dtype="float32", mesh=mesh)
        found.append(perplexity(family, params, config, tokens, dtype="float32", mesh=mesh))
        del params
    before, after = found
    return f"perplexity of {text.name}: {before:.4f} -> {after:.4f} ({after / before - 1:+.2%})"


_MOST_CHARACTERS = 1 << 20


def _cpu_mesh() -> Mesh:
    """A mesh of the CPU alone: an accelerator may be too small for the whole model."""
    return Mesh(np.asarray(jax.devices("cpu")[:1]), (TENSOR,))


def _with_wide_tables(family: Family, config: ModelConfig) -> ModelConfig:
    """The model with tables of the vocabulary that are not quantised."""
    assert config.quantization is not None
    leaves: list[Leaf] = jax.tree.leaves(family.leaves(config))
    tables = {leaf.name for leaf in leaves if leaf.is_table}
    wide = tuple(sorted(tables.union(config.quantization.wide)))
    quantization = dataclasses.replace(config.quantization, wide=wide)
    return dataclasses.replace(config, quantization=quantization)


def _found(model: str) -> Path:
    try:
        return Path(local_path(model))
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = Parser(prog="jaxserve convert", description=__doc__)
    parser.add_argument(
        "source", metavar="SRC", help="Hugging Face directory, GGUF file, or a name as serve takes"
    )
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument(
        "--quantize", default="", metavar="HOW", help="int8, int4:group=N[,zero], fp8, none"
    )
    parser.add_argument("--format", choices=(ORBAX, SAFETENSORS), default=ORBAX)
    parser.add_argument(
        "--check", type=Path, metavar="TEXT", help="a text file to compare SRC and DST on"
    )
    args = parser.parse_args(argv)
    try:
        source = _found(args.source)
        convert(
            source,
            args.target,
            args.dtype,
            quantize=args.quantize,
            into=args.format,
            progress=True,
        )
        print(f"wrote {args.target}")
        if args.check is not None:
            print(compare(source, args.target, args.check))
    except (CheckpointError, ConfigError, GGUFError, OSError) as error:
        print(f"jaxserve convert: {error}", file=sys.stderr)
        return exit_code(error)
    return 0
