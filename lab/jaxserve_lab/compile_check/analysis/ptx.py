"""Registers and spills of GPU kernels: NVIDIA's assembler over the PTX that XLA made."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve_lab.compile_check.analysis.launches import shared_memory

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)


class AssemblerError(RuntimeError):
    """ptxas refused a kernel; the message ends with its last line."""


@dataclass(frozen=True)
class KernelUse:
    """Resources of one GPU kernel.

    Attributes:
        name: The kernel's name.
        registers: Registers per thread.
        spill_stores: Bytes that a thread spills to memory.
        spill_loads: Bytes that it reads back.
        shared: Bytes of shared memory that a launch asks for.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int = 0


def kernel_uses(folder: Path, ptxas: Path) -> list[KernelUse]:
    """Assembles every kernel in `folder`, the dump of one compilation, with `ptxas`, and reads
    each kernel's use. AssemblerError if one is refused."""
    uses: dict[str, KernelUse] = {}
    shared = shared_memory(folder)
    for path in sorted(folder.glob("*.ptx")):
        source = path.read_text(encoding="utf-8")
        machine = _TARGET.search(source)
        if machine is None:  # XLA also writes empty modules
            continue
        ran = subprocess.run(
            [ptxas, "-v", f"-arch={machine[1]}", path, "-o", folder / "assembled"],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise AssemblerError(f"ptxas: {ran.stderr.strip().splitlines()[-1]}")
        uses.update((use.name, use) for use in parse(ran.stderr))
    return [replace(use, shared=shared.get(use.name, 0)) for use in uses.values()]


def parse(log: str) -> list[KernelUse]:
    """The kernels in the log of `ptxas -v`, which does not know a launch's shared memory."""
    uses, name, spills = [], "", (0, 0)
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name = entry[1]
        elif spill := _SPILLS.search(line):
            spills = int(spill[1]), int(spill[2])
        elif name and (used := _USED.search(line)):
            uses.append(KernelUse(name, int(used[1]), *spills))
            name, spills = "", (0, 0)
    return uses
