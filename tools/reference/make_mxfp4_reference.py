"""Writes, or checks, experts' weights that `transformers` dequantises from MXFP4.

    python tools/reference/make_mxfp4_reference.py            rewrite tests/reference/mxfp4
    python tools/reference/make_mxfp4_reference.py --check    fail if a fresh run differs

The file has blocks uint8 [E, out, G, 16], scales uint8 [E, out, G], weights float32 [E, in, out].
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FILE = Path(__file__).resolve().parents[2] / "tests" / "reference" / "mxfp4" / "experts.npz"
SHAPE = (2, 6, 3)  # experts, outputs and groups
SCALES = (16, 240)  # the smallest, and one more than the largest


def run() -> dict[str, np.ndarray]:
    """The arrays of the file."""
    draw = np.random.RandomState(0)
    blocks = draw.randint(0, 256, (*SHAPE, 16)).astype(np.uint8)
    scales = draw.randint(*SCALES, SHAPE).astype(np.uint8)
    wide = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    return {"blocks": blocks, "scales": scales, "weights": wide.float().numpy()}


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    checking, fresh = parser.parse_args().check, run()
    if not checking:
        FILE.parent.mkdir(exist_ok=True)
        np.savez_compressed(FILE, **fresh)  # type: ignore[arg-type]
    stored = np.load(FILE)
    problems = [
        f"mxfp4: {name} differ" for name in fresh if not np.array_equal(stored[name], fresh[name])
    ]
    print("\n".join(problems) or f"MXFP4 weights {'agree' if checking else 'written'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
