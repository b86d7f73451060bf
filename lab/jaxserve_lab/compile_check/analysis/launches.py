"""Launches of XLA for GPUs, read from its dumped lists: shared memory, and command buffers. For
Mosaic GPU's kernels, which XLA does not know, Mosaic's own dump is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_SHARED = re.compile(r" (\S+) grid: \[[^\]]*\] threads: \[[^\]]*\] +shared_memory: (\d+) bytes")
_MOSAIC = re.compile(r"smem_scratch_bytes=(\d+)")
_LINE = re.compile(r"^( *)\d+: (k\w+) +(?:\[[^\]]*\] *)?(.*)$")
_BUFFER = "kCommandBuffer"


def shared_memory(folder: Path) -> dict[str, int]:
    """Bytes of shared memory that a launch asks for, by kernel, in the dump of a compilation."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*thunk_sequence.txt"):
        sizes |= shared_in(path.read_text(encoding="utf-8"))
    for path in folder.glob("*.resources.txt"):  # Mosaic GPU's files, for kernel NAME_0
        match = _MOSAIC.search(path.read_text(encoding="utf-8"))
        if match is not None:
            name = path.name.removesuffix(".resources.txt").rpartition("_")[0]
            sizes[f"{name}_mosaic_gpu_kernel"] = int(match[1])
    return sizes


def shared_in(thunks: str) -> dict[str, int]:
    """The same from the text of one dumped list."""
    return {name: int(shared) for name, shared in _SHARED.findall(thunks)}


def outside_buffers(folder: Path) -> list[str]:
    """Names of kernels that are launched outside any command buffer (a CUDA graph, which the host
    launches as a whole). Raises RuntimeError if the dump has no list."""
    paths = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt"))
    if not paths:
        raise RuntimeError("XLA has dumped no list of launches")
    return [name for path in paths for name in outside_in(path.read_text(encoding="utf-8"))]


def outside_in(thunks: str) -> list[str]:
    """The same from the text of one dumped list, in which the contents of a command buffer are
    indented."""
    return list(_outside(thunks))


def _outside(thunks: str) -> Iterator[str]:
    inside: int | None = None  # the indent of the current buffer
    for line in thunks.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent, kind, name = len(match[1]), match[2], match[3].split(" grid:")[0].strip()
        if inside is not None and indent > inside:
            continue
        inside = indent if kind == _BUFFER else None
        if kind != _BUFFER:
            yield name or kind
