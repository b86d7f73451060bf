"""Whether a CPU multiplies bfloat16 faster than float32.

By its instructions alone: what is timed as a server starts depends on what else the machine does,
and the type decides what is answered, how long steps take and which of them are compiled already.
docs/performance.md has what both types gave where it was measured.
"""

from __future__ import annotations

from pathlib import Path

INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # Linux's names, x86 and Arm


def has_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has products of bfloat16. False where Linux does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = (line.partition(":") for line in lines)
    found = (value.split() for key, _, value in flags if key.strip() in ("flags", "Features"))
    return not INSTRUCTIONS.isdisjoint(next(found, []))
