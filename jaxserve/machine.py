"""Where a measurement was taken: profiles, benchmarks and experiments all write it down."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from jaxserve import __version__

PACKAGES = ("jax", "jaxlib", "numpy")


def versions() -> dict[str, str]:
    """Package name to version, jaxserve's and Python's own included."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "jaxserve": __version__, **found}


def machine() -> dict[str, Any]:
    """The CPU, its memory in GiB and what else was running, ready for JSON.

    cores: those that this process may use. load_average: over the last minute; much above 0 before
    a run means company.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
