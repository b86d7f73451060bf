"""Compares how quantisation in jaxserve and llama.cpp changes the perplexity of a text.

    python tools/llama_cpp/quality.py --text=TEXT

With SmolLM2 and the same tokens in the same windows on both sides; each is relative to itself in
bfloat16. Weights are quantised as `--config.model.quantization` does, and multiplied as an engine
does on a CPU with bfloat16: activations are rounded to bfloat16, in llama.cpp to 8 bits.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from measures import TYPES
from side_by_side import HERE, add_places, files

from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.models.base import with_quantization
from jaxserve.models.perplexity import MOST_WINDOWS, WINDOW, perplexity
from jaxserve.weights import load_config, load_params, transpose_loaded

BASE = "bfloat16"
# By type, the largest growth of the perplexity, and whether llama.cpp's growth is the limit.
MOST = {"int8": 1.005}
AS_GOOD_AS = {"int4": "int4-zero", "int4-zero": "int4-zero"}


def ours(wide: Path, type_: str, windows: np.ndarray) -> float:
    """jaxserve's perplexity with weights from a file in float32."""
    family, config, _ = load_config(wide)
    fields = TYPES[type_].fields
    config = with_quantization(family, config, fields.get("model__quantization", ""))
    dtype = fields.get("model__dtype", BASE)
    params = transpose_loaded(load_params(wide, family, config, dtype=dtype), dtype)
    return perplexity(family, params, config, windows.ravel(), dtype=jnp.float32, mesh=None)


def theirs(python: str, file: Path, windows: np.ndarray) -> float:
    """llama.cpp's perplexity."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as tokens:
        np.save(tokens.name, windows)
        command = [python, str(HERE / "perplexity.py"), f"--file={file}", f"--tokens={tokens.name}"]
        return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--windows", type=int, default=MOST_WINDOWS, help=f"of {WINDOW} tokens")
    add_places(parser)
    args = parser.parse_args(argv)
    folder, _ = files(args, "smollm2")
    wide = folder / "F32.gguf"
    text = args.text.read_text(encoding="utf-8")
    tokens = np.asarray(load_tokenizer(wide).encode(text), np.int32)
    count = min(len(tokens) // WINDOW, args.windows)
    windows = tokens[: count * WINDOW].reshape(count, WINDOW)
    print(f"{count} windows of {WINDOW} tokens of {args.text.name}\n")
    print("| weights | jaxserve | over bfloat16 | llama.cpp | over BF16 | |")
    print("|---|---|---|---|---|---|")
    perplexities: dict[str, tuple[float, float]] = {}
    for type_ in sorted(TYPES, key=lambda each: (each != BASE, each == "int4")):
        both = (
            ours(wide, type_, windows),
            theirs(args.llama_python, folder / f"{TYPES[type_].gguf}.gguf", windows),
        )
        base = perplexities.setdefault(BASE, both)
        perplexities[type_] = both
        own, other = (a / b for a, b in zip(both, base, strict=True))
        most = MOST.get(type_)
        if type_ in AS_GOOD_AS:
            most = perplexities[AS_GOOD_AS[type_]][1] / base[1]
        verdict = "" if most is None else f"at most {most - 1:+.2%}: "
        verdict += "" if most is None else "met" if own <= most else "missed"
        print(
            f"| {type_}, {TYPES[type_].gguf} | {both[0]:.3f} | {own - 1:+.2%} "
            f"| {both[1]:.3f} | {other - 1:+.2%} | {verdict} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
