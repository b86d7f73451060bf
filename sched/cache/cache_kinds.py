"""What a request keeps in its cache blocks, which models may keep hidden vectors there, and from
which end blocks are filled.

The values equal those of `jaxserve.pallas_kernels.batch`, which does not import this package.
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


# Looking up a member of an enum takes longer than the comparison that needs it.
KV, HIDDEN = map(int, CacheKind)
LEFT, RIGHT = map(int, Direction)


ABSORBED, PROJECTED = "absorbed", "projected"
HIDDEN_READS = (ABSORBED, PROJECTED)
"""How hidden caches are read: with Wk folded into the query, or projected to K and V each time."""


def why_no_hidden_caches(d_model: int, num_heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why a model of this shape has no hidden caches; None if it has.

    A token's hidden vector must be smaller than its K and V together, and as large as one of them,
    because a block holds one or the other. The engine, the simulator and the compile check all use
    this.

    Args:
        d_model: Elements of a hidden vector.
        num_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Elements of a head.
    """
    kv_width = kv_heads * head_dim
    if d_model >= 2 * kv_width:
        return (
            f"a hidden vector has {d_model} elements, no fewer than the {2 * kv_width} of K and V, "
            f"which groups of {num_heads // kv_heads} heads share"
        )
    if kv_heads != num_heads or d_model != kv_width:
        return (
            f"a hidden vector has {d_model} elements, and {kv_heads} KV heads of {head_dim} for "
            f"{num_heads} heads make up blocks of another size"
        )
    return None


def default_hidden_read(*, rotary: bool) -> str:
    """How hidden caches are read by default. Wk cannot be folded into the query if keys are rotated
    by position."""
    return PROJECTED if rotary else ABSORBED


NOBODY = -1  # in place of a row: no request
