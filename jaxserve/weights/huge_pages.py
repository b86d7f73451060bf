"""Parameters in huge pages: with pages of 4 KiB, a step over all weights has thousands of TLB
misses."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable

import jax

SIZE = 2 << 20  # bytes of a huge page on x86 and most others
COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1: at once, not in the background


def advise_huge_pages(arrays: Iterable[jax.Array]) -> threading.Thread | None:
    """Asks Linux to move arrays in a CPU's memory to huge pages, if programs may ask for them
    (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled, the default of most distributions).
    Refused pages stay as they are.

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
                # Consecutive allocations may share a page.
                pages.update(range(first // SIZE, (first + shard.data.nbytes - 1) // SIZE + 1))
    if not pages:
        return None
    thread = threading.Thread(target=_ask, args=(pages,), name="huge-pages", daemon=True)
    thread.start()
    return thread


def _ask(pages: set[int]) -> None:
    """Asks for huge pages. Pages that were reused or freed meanwhile do no harm."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for page in sorted(pages):
        for advice in (mmap.MADV_HUGEPAGE, COLLAPSE):
            madvise(page * SIZE, SIZE, advice)
