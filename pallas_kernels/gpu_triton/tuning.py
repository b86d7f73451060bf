"""Sizes of the Pallas-Triton kernels by GPU generation: tiles, warps, pipeline stages.

A table, not an algorithm: change a number here after measuring it. Chosen without a GPU, by the
compiler's numbers of registers, spills and shared memory. Tiles are in tokens and powers of two.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that sizes depend on.

    Attributes:
        capability: 80 for sm_80.
        processors: Streaming multiprocessors.
    """

    capability: int
    processors: int


A100 = Gpu(80, 108)
H100 = Gpu(90, 132)
# A block of threads gets at most 99 KiB of shared memory; sm_80 has 163 and sm_90 has 227.
SMALL_SHARED_MEMORY = (86, 89, 120, 121)
NAMED = {"a100": A100, "h100": H100, "h200": H100}


@dataclasses.dataclass(frozen=True)
class Launch:
    """Compiler parameters of one kernel, with its tile.

    Attributes:
        tile: Tokens of context per iteration.
        queries: Rows of a query tile (query tokens times the heads of a group).
        warps: num_warps.
        stages: num_stages. Loads that wait for a block id take two stages, so that 3 stages buffer
            one tile, 5 buffer two, and so on.
        chunk: Elements of a hidden vector in one step of its projection.
        resident: Programs that a multiprocessor holds at once, by their registers and shared
            memory.
    """

    tile: int
    queries: int = 16
    warps: int = 4
    stages: int = 3
    chunk: int = 64
    resident: int = 1


# kernel -> {(capability, element bytes, padded head_dim): Launch}. 0 bytes or head_dim: any. Among
# entries not above the device's capability, an exact element size has priority (for 1 byte, 2 bytes
# come next), then an exact head_dim, then the highest capability.
_TABLE: dict[str, dict[tuple[int, int, int], Launch]] = {
    "decode": {
        (80, 2, 0): Launch(32, warps=4, stages=5, resident=4),
        (80, 2, 256): Launch(16, warps=4, stages=5, resident=3),
        (80, 4, 0): Launch(32, warps=8, stages=2, resident=2),
        (80, 4, 256): Launch(16, warps=8, stages=2, resident=2),
        (90, 2, 0): Launch(64, warps=4, stages=5, resident=3),
        (90, 2, 256): Launch(32, warps=4, stages=4, resident=2),
        (90, 1, 0): Launch(128, warps=4, stages=2, resident=2),
        (90, 1, 256): Launch(32, warps=4, stages=4, resident=2),
    },
    "prefill": {
        (80, 2, 0): Launch(64, queries=128, warps=8, stages=5),
        (80, 2, 256): Launch(32, queries=64, warps=8, stages=5),
        (80, 1, 0): Launch(32, queries=128, warps=8, stages=5),
        (80, 1, 256): Launch(32, queries=64, warps=8, stages=5),
        (80, 4, 0): Launch(16, queries=32, warps=4, stages=2),
        (80, 4, 256): Launch(16, queries=16, warps=8, stages=2),
        (90, 2, 0): Launch(128, queries=128, warps=8, stages=3),
        (90, 2, 256): Launch(64, queries=128, warps=8, stages=3),
        (90, 1, 0): Launch(128, queries=128, warps=8, stages=2),
        (90, 1, 256): Launch(64, queries=128, warps=8, stages=2),
    },
    # Decodes with a few drafted tokens: tiled like prefills, memory-bound like decodes.
    "few": {
        (80, 2, 0): Launch(32, queries=64, warps=4, stages=5, resident=4),
        (80, 2, 256): Launch(16, queries=32, warps=4, stages=5, resident=3),
        (80, 4, 0): Launch(16, queries=32, warps=8, stages=2, resident=2),
        (80, 4, 256): Launch(16, queries=16, warps=8, stages=2, resident=2),
        (90, 2, 0): Launch(64, queries=64, warps=4, stages=5, resident=3),
        (90, 2, 256): Launch(32, queries=64, warps=4, stages=4, resident=2),
        (90, 1, 0): Launch(128, queries=64, warps=4, stages=2, resident=2),
        (90, 1, 256): Launch(32, queries=64, warps=4, stages=4, resident=2),
    },
    # All heads' sums over latent vectors: a few tokens, and chunks.
    "latent": {
        (80, 1, 0): Launch(32, queries=16, warps=8, stages=3),
        (80, 2, 0): Launch(32, queries=16, warps=4, stages=3, resident=2),
        (80, 4, 0): Launch(16, queries=16, warps=8, stages=1),
    },
    "latent_prompts": {
        (80, 1, 0): Launch(32, queries=32, warps=8, stages=3),
        (80, 2, 0): Launch(32, queries=64, warps=8, stages=3),
        (80, 4, 0): Launch(16, queries=16, warps=8, stages=1),
        (90, 2, 0): Launch(32, queries=32, warps=8, stages=3, resident=2),
    },
    "absorbed_scores": {
        (80, 2, 0): Launch(64, warps=4, stages=3, resident=2),
        (80, 2, 256): Launch(32, warps=4, stages=3, resident=2),
        (80, 4, 0): Launch(16, warps=8, stages=2, resident=2),
        (90, 2, 0): Launch(64, warps=4, stages=4, resident=2),
    },
    "absorbed_sums": {
        (80, 2, 0): Launch(32, warps=4, stages=5, resident=2),
        (80, 4, 0): Launch(32, warps=8, stages=2, resident=2),
        (90, 2, 0): Launch(64, warps=4, stages=5, resident=2),
    },
    "projected": {
        (80, 2, 0): Launch(64, queries=64, warps=8, stages=3, chunk=32),
        (80, 2, 256): Launch(32, queries=32, warps=8, stages=2),
        (80, 4, 0): Launch(16, queries=16, warps=8, stages=2, chunk=32),
        (90, 2, 0): Launch(64, queries=128, warps=8, stages=3, chunk=32),
    },
    "projected_decode": {
        (80, 2, 0): Launch(64, warps=8, stages=4),
        (80, 2, 256): Launch(32, warps=8, stages=3),
        (80, 4, 0): Launch(16, warps=8, stages=2, chunk=32),
    },
    # One program copies `tile` elements of a slot.
    "copy": {(80, 0, 0): Launch(2048, warps=4, stages=1)},
}

# Approximate tokens of context per program of a decode. Fewer would not balance better: shares are
# equal, and one wave has several hundred programs.
DECODE_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How `stream_k.cut` cuts a sequence of tiles into shares.

    Attributes:
        programs: Number of shares, some of which may stay empty.
        least: Least tiles of a share.
        fill: Number of shares that fill the GPU.
        most: Most tiles of a share: more work makes more shares than `fill`. Exceeded only if
            `programs` shares would not suffice.
    """

    programs: int
    least: int
    fill: int
    most: int


_target: list[Gpu] = []


@contextlib.contextmanager
def compiling_for(gpu: Gpu) -> Iterator[None]:
    """Within the context, kernels are traced with this GPU's sizes, to compile without the
    hardware."""
    _target.append(gpu)
    try:
        yield
    finally:
        _target.pop()


def target() -> Gpu:
    """The GPU that kernels are sized for: the named one, else the first local one, else an A100."""
    if _target:
        return _target[-1]
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return A100
    capability = int(str(device.compute_capability).replace(".", ""))
    known = H100 if capability >= H100.capability else A100
    return Gpu(capability, getattr(device, "core_count", known.processors))


def launch(kernel: str, itemsize: int, head_dim: int) -> Launch:
    """The sizes of a kernel for elements of `itemsize` bytes and a padded head_dim. Elements of one
    byte are multiplied as two bytes, and use those sizes unless they have their own."""
    table, gpu = _TABLE[kernel], target()
    sizes = (0, itemsize, 2) if itemsize == 1 else (0, itemsize)
    fits = [
        key
        for key in table
        if key[0] <= gpu.capability and key[1] in sizes and key[2] in (0, head_dim)
    ]
    entry = table[max(fits, key=lambda key: (key[1] == itemsize, key[1] != 0, key[2] != 0, key[0]))]
    if gpu.capability not in SMALL_SHARED_MEMORY:
        return entry
    return dataclasses.replace(
        entry,
        tile=max(16, entry.tile // 2),
        queries=max(16, entry.queries // 2),
        stages=min(entry.stages, 2),
        chunk=max(16, entry.chunk // 2),
    )


def cutting(launch: Launch, tiles: int, tokens: int | None = None, least: int = 2) -> Cutting:
    """Chooses how to cut a sequence of tiles into shares.

    Args:
        launch: The sizes of the kernel.
        tiles: Most tiles of the sequence.
        tokens: Approximate tokens of context per share, if that makes more shares than the GPU
            holds at once; None for no more shares than it holds.
        least: Least tiles of a share.
    """
    fill = target().processors * launch.resident
    most = tiles if tokens is None else max(least, tokens // launch.tile)
    programs = min(max(fill, -(-tiles // most)), max(1, -(-tiles // least)))
    return Cutting(programs, least, fill, most)
