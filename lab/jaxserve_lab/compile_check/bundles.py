"""Loops of a TPU's kernels, from the bundles of instructions that its compiler dumps. One bundle is
issued per cycle, so a loop's bundles are the cycles of an iteration that never waits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# The final instructions, not the eighty stages before them.
FLAGS = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|\d+) +(LB)? *(?:[A-Z]{2})?: *(>*) *\{(\})?")
_FILE = re.compile(r"^\d+-(.*?)(?:\.\d+)?-\d+-final_bundles\.txt$")


@dataclass(frozen=True)
class Loops:
    """The loops of one kernel.

    Attributes:
        name: The kernel's.
        bundles: Bundles of the whole kernel.
        cycles: Cycles of an iteration of each loop, in the order of the code, without inner loops.
    """

    name: str
    bundles: int
    cycles: tuple[int, ...]


def kernel_loops(folder: Path, kernels: set[str]) -> list[Loops]:
    """The loops of the named kernels, read from `folder`, the dump of one compilation. A kernel
    that occurs in each layer is returned once."""
    loops: dict[str, Loops] = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        name = _FILE.match(path.name)
        if name and name[1] in kernels and name[1] not in loops:
            loops[name[1]] = loops_in(name[1], path.read_text(encoding="utf-8"))
    return list(loops.values())


def loops_in(name: str, text: str) -> Loops:
    """The loops of one listing: LB marks a loop's first bundle, and each bundle has a ">" for each
    loop around it."""
    cycles: list[int] = []
    open_loops: list[int] = []  # by depth, indices into `cycles`
    bundles = 0
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        bundles += 1
        if not match[3]:  # an empty bundle, for a delay, has no mark
            del open_loops[len(match[2]) :]
        if match[1]:
            del open_loops[len(match[2]) - 1 :]
            open_loops.append(len(cycles))
            cycles.append(0)
        if open_loops:
            cycles[open_loops[-1]] += 1
    return Loops(name, bundles, tuple(cycles))
