"""Parameters in huge pages: the same numbers, in fewer pages."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.weights import advise_huge_pages
from jaxserve.weights.huge_pages import SIZE

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
    if KERNEL >= (6, 1):  # before, the kernel does it when it comes by
        assert huge_kib(middle) >= 2 * SIZE // 1024


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.ones(4 * SIZE)
    before = huge_kib(array.unsafe_buffer_pointer() + array.nbytes // 2)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert advise_huge_pages([array]) is None
    assert huge_kib(array.unsafe_buffer_pointer() + array.nbytes // 2) == before
