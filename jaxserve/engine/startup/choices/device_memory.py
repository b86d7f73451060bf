"""How much memory is free before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import jax

_MEMINFO = Path("/proc/meminfo")
_GROUPS = (  # limit and use of the control group that a container is: version 2, version 1
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_memory() -> tuple[str, int]:
    """Name of one device and its free bytes; for the CPU backend, those of the host."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return device.device_kind, int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return "this host", free_on_host()


def free_on_host() -> int:
    """Bytes that can be used without swapping, within the container's limit. All of the memory if
    the system does not say."""
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        free.append(int(fields["MemAvailable"].split()[0]) * 1024)  # it says kB
    except (OSError, KeyError, ValueError):
        pass
    for limit, use in _GROUPS:
        try:
            free.append(int(limit.read_text()) - int(use.read_text()))
        except (OSError, ValueError):  # there is no such group, or it has no limit ("max")
            continue
    return max(0, min(free))
