"""Parameters in huge pages: of 4 KiB a step over all weights misses the processor's table of pages
thousands of times."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable

import jax

SIZE = 2 << 20  # bytes of a huge page, as x86 and most others have them
COLLAPSE = 25  # MADVCOLLAPSE, since Linux 6.1: now, and not when the kernel comes by


def advise_huge_pages(arrays: Iterable[jax.Array]) -> threading.Thread | None:
    """Has Linux move arrays in a CPU's memory to huge pages, where it lets programs ask for them
    (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled, as most distributions have it). What
    it refuses stays as it is.

    Returns:
        The thread that asks, since the kernel copies about 300 MB a second; None if there is
        nothing to ask for.
    """
    if sys.platform != "linux":
        return None
    pages: set[int] = set()
    for array in arrays:
        if array.nbytes and {device.platform for device in array.devices()} == {"cpu"}:
            for shard in array.addressable_shards:
                first = shard.data.unsafe_buffer_pointer()
                # Neighbours lie in one page: allocations follow one another.
                pages.update(range(first // SIZE, (first + shard.data.nbytes - 1) // SIZE + 1))
    if not pages:
        return None
    thread = threading.Thread(target=_ask, args=(pages,), name="huge-pages", daemon=True)
    thread.start()
    return thread


def _ask(pages: set[int]) -> None:
    """If some are of something else by now, or of nothing, no harm is done."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in sorted(pages):
        for advice in (mmap.MADV_HUGEPAGE, COLLAPSE):
            madvise(page * SIZE, SIZE, advice)
