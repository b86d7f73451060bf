"""Converts a Hugging Face directory or a GGUF file to an Orbax checkpoint, which restores onto any
sharding.

    jaxserve convert SRC DST [--dtype=auto|float32|bfloat16|float16]

DST gets params/ (Orbax), config.json and the tokenizer's files; serve it like any checkpoint. The
whole model passes through host memory.
"""

from __future__ import annotations

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
from jaxserve.command_line import Parser, exit_code
from jaxserve.config import DTYPES
from jaxserve.gguf.header import GGUFError, read_header
from jaxserve.gguf.tokenizer import tokenizer_config_json, tokenizer_json
from jaxserve.models.sharding import TENSOR
from jaxserve.progress import Show
from jaxserve.weights import CheckpointError, checkpoint_dtype, load_config, load_params
from jaxserve.weights.orbax_io import save_orbax
from jaxserve.writable import check_folder

COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
          "vocab.json", "merges.txt", "chat_template*", "LICENSE*")  # fmt: skip


def convert(source: Path, target: Path, dtype: str = "auto", *, progress: bool = False) -> None:
    """Writes the checkpoint in `source` to `target`.

    Args:
        dtype: of the stored parameters; "auto" is what config.json states, else float32.

    Raises:
        CheckpointError: `source` cannot be loaded, or `target` already holds other files, or cannot
            be written.
        OSError: there is no room for it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty directory")
    try:
        check_folder("DST", target)
    except ValueError as error:
        raise CheckpointError(str(error).removeprefix("--")) from None  # it is no flag
    family, config, hf = load_config(source)
    chosen = (checkpoint_dtype(hf) or jnp.dtype("float32")) if dtype == "auto" else jnp.dtype(dtype)
    # A mesh of the CPU alone: an accelerator may be too small for the whole model.
    mesh = Mesh(np.asarray(jax.devices("cpu")[:1]), (TENSOR,))
    show = Show.where_wanted(progress)
    gguf = find_gguf(source)
    load_format = "safetensors" if gguf is None else "gguf"
    params = load_params(
        source, family, config, dtype=chosen, mesh=mesh, load_format=load_format, progress=show
    )
    target.mkdir(parents=True, exist_ok=True)
    save_orbax(target, params)
    hf.pop("torch_dtype", None)
    hf["dtype"] = chosen.name
    _write_json(target / "config.json", hf)
    if gguf is not None:
        header = read_header(gguf)
        _write_json(target / "tokenizer.json", tokenizer_json(header))
        _write_json(target / "tokenizer_config.json", tokenizer_config_json(header))
        return
    for pattern in COPIED:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = Parser(prog="jaxserve convert", description=__doc__)
    parser.add_argument(
        "source", type=Path, metavar="SRC", help="Hugging Face directory, or a GGUF file"
    )
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    args = parser.parse_args(argv)
    try:
        convert(args.source, args.target, args.dtype, progress=True)
    except (CheckpointError, GGUFError, OSError) as error:
        print(f"jaxserve convert: {error}", file=sys.stderr)
        return exit_code(error)
    print(f"wrote {args.target}")
    return 0
