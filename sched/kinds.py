"""What a request keeps in its cache blocks, and from which end it fills them.

The values are those of `jaxserve.pallas_kernels.batch`, which knows nobody above it.
"""

from __future__ import annotations

import enum


class CacheKind(enum.IntEnum):
    """KV: K blocks and V blocks. HIDDEN: one set of blocks with the QKV projection's input
    (Apt-Serve section 4.3)."""

    KV = 0
    HIDDEN = 1


class Direction(enum.IntEnum):
    """LEFT fills a block from slot 0 up, RIGHT from the last slot down (BROS section 5.1)."""

    LEFT = 0
    RIGHT = 1


# Looking a member up in an enum takes longer than the comparison it is for.
KV, HIDDEN = map(int, CacheKind)
LEFT, RIGHT = map(int, Direction)
