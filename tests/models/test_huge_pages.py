"""Parameters in huge pages: the same numbers, in fewer pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.weights import advise_huge_pages
from jaxserve.weights.huge_pages import COLLAPSE, SIZE

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])


def huge_kib(address: int) -> int:
    """KiB in huge pages of the mapping that an address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *values = line.split()
        if "-" in name and not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            inside = first <= address < last
        elif inside and name == "AnonHugePages:":
            return int(values[0])
    raise AssertionError("the address is in no mapping")


def collapses() -> bool:
    """Whether the kernel makes a huge page of small ones now: memory may be in too many pieces."""
    with mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.write(b"1" * 2 * SIZE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(area))
        page = -(-first // SIZE) * SIZE
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return not any(madvise(page, SIZE, advice) for advice in (mmap.MADV_HUGEPAGE, COLLAPSE))


@pytest.mark.skipif(
    not ENABLED.exists() or "[madvise]" not in ENABLED.read_text(encoding="utf-8"),
    reason="nobody may ask for huge pages here, or all have them",
)
def test_numbers_stay_and_pages_grow() -> None:
    arrays = [jnp.arange(SIZE, dtype=jnp.int32) + i for i in range(3)]  # 4 pages each
    thread = advise_huge_pages(arrays)
    assert thread is not None
    thread.join()
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(array, np.arange(SIZE, dtype=np.int32) + i)
    middle = arrays[1].unsafe_buffer_pointer() + arrays[1].nbytes // 2
    # Before 6.1 the kernel does it when it comes by.
    if KERNEL >= (6, 1) and collapses():
        assert huge_kib(middle) >= 2 * SIZE // 1024


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.ones(4 * SIZE)
    before = huge_kib(array.unsafe_buffer_pointer() + array.nbytes // 2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert advise_huge_pages([array]) is None
    assert huge_kib(array.unsafe_buffer_pointer() + array.nbytes // 2) == before
