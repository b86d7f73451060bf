"""Sizes of the Pallas-TPU kernels by chip: how much is in flight, and how much a program works on.

A table, not an algorithm: change a number here after measuring it. The numbers follow from the
chips' VMEM (16, 128, 64, 128 and 64 MiB per core) and from the bytes in flight that their HBM needs
(bandwidth times latency is well below a megabyte); none of them has been measured on a chip.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of kernels on one chip.

    Attributes:
        vmem: Bytes of VMEM that a kernel may take.
        cores: TensorCores behind one device (megacore): programs are split over heads to feed them.
        chunk_bytes: Bytes of K (or V, or hidden vectors) of a chunk of context; four are in VMEM.
        chunk_tokens: Tokens of context of a chunk at most.
        tile: Queries of a prefill tile, a power of two.
        prefill_heads: KV heads of a prefill program at most.
        weight_bytes: Bytes of Wk (or Wv) for the heads that a projecting program works on.
        stage_bytes: Bytes of a granule's layers that one step of a move takes; some twenty are in
            VMEM.
    """

    vmem: int
    cores: int = 1
    chunk_bytes: int = 1 * MIB
    chunk_tokens: int = 512
    tile: int = 128
    prefill_heads: int = 8
    weight_bytes: int = 2 * MIB
    stage_bytes: int = MIB // 4


# The TPU interpreter: small, so that small tests have several chunks, tiles and head groups.
INTERPRET = Sizes(
    vmem=16 * MIB,
    cores=2,
    chunk_bytes=16 << 10,
    chunk_tokens=32,
    tile=32,
    prefill_heads=1,
    weight_bytes=8 << 10,
    stage_bytes=8 << 10,
)

# (chip, element bytes) -> sizes; element bytes 0 matches every dtype.
_TABLE: dict[tuple[str, int], Sizes] = {
    ("v4", 0): Sizes(vmem=14 * MIB, cores=2, chunk_bytes=3 * MIB // 2, weight_bytes=1 * MIB),
    ("v5e", 0): Sizes(vmem=64 * MIB, chunk_bytes=2 * MIB, tile=256, weight_bytes=8 * MIB),
    ("v5p", 0): Sizes(vmem=48 * MIB, cores=2, chunk_bytes=2 * MIB, tile=256, weight_bytes=4 * MIB),
    ("v6e", 0): Sizes(vmem=64 * MIB, chunk_bytes=2 * MIB, tile=256, weight_bytes=8 * MIB),
    ("7x", 0): Sizes(vmem=48 * MIB, chunk_bytes=2 * MIB, tile=256, weight_bytes=4 * MIB),
}
_SMALLEST = _TABLE["v4", 0]


def sizes(dtype: DTypeLike, interpret: bool) -> Sizes:
    """The sizes for the chip that is compiled for: the mesh's if one is set, else the default
    device's. A chip without an entry gets those of the smallest VMEM."""
    if interpret:
        return INTERPRET
    chip = str(pltpu.get_tpu_info().chip_version)
    for key in ((chip, jnp.dtype(dtype).itemsize), (chip, 0)):
        if key in _TABLE:
            return _TABLE[key]
    return _SMALLEST
