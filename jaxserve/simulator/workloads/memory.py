"""Memory of workloads, estimated before it is allocated."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.simulator.workloads.workload import WorkloadError

# Measured as the growth of a simulation's peak resident memory, including its summary.
BYTES_A_REQUEST = 300
BYTES_AN_OUTPUT_TOKEN = 100
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def check_memory(name: str, requests: int, output_tokens: int) -> None:
    """Raises WorkloadError, with both sizes, if a workload needs more memory than there is."""
    needed, there_is = memory_for(requests, output_tokens), machine_memory()
    if needed > there_is:
        raise WorkloadError(
            f"{name}: {requests:,} requests with {output_tokens:,} tokens to write would take "
            f"about {needed / 1e9:,.0f} GB of memory; there are {there_is / 1e9:,.0f} GB"
        )


def memory_for(requests: int, output_tokens: int) -> int:
    """Estimated bytes."""
    return requests * BYTES_A_REQUEST + output_tokens * BYTES_AN_OUTPUT_TOKEN


def machine_memory() -> int:
    """Bytes that this process may use: the machine's, or the limit of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CONTAINER.read_text(encoding="ascii").strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdigit() else memory
