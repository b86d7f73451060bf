"""Prints llama.cpp's perplexity of a text's tokens with one GGUF file, in setup.sh's environment: a
child of quality.py. Counts as jaxserve/models/perplexity.py does.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from llama_side import Context, load
from measures import Shape


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", required=True, help="GGUF file")
    parser.add_argument("--tokens", type=Path, required=True, help=".npy, int [windows, tokens]")
    args = parser.parse_args()
    windows = np.load(args.tokens)
    context = Context(load(args.file), Shape(1, windows.shape[1], 1), {}, every=True)
    total = 0.0
    for window in windows:
        logits = context.logits(window).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_probs = logits[:-1] - np.log(np.exp(logits[:-1]).sum(axis=1, keepdims=True))
        total -= log_probs[np.arange(len(window) - 1), window[1:]].sum()
    print(math.exp(total / (windows.size - len(windows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
