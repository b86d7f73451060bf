"""Pages: full blocks that can be found again, and how they follow each other."""

from __future__ import annotations

from typing import Any


class Page:
    """A block of K and one of V that are known, or one of hidden vectors.

    Attributes:
        kind: `CacheKind` of what it holds.
        key: Of its tokens and all before them, with its kind and the side from which it was filled.
        ids: Of its blocks; none while it is in host memory, and once it is forgotten.
        host: Its key in host memory; None where it is not there.
        before: The page of the tokens before; None for the first.
        depth: How many pages come before it.
        after: The pages right behind it.
        finders: Rows that wait and would find it, and none behind it.
        note: What retention knows of it.
        tenant: Whose it is: who has filled or read it last.
    """

    __slots__ = (
        *("after", "before", "depth", "finders", "host", "ids", "key", "kind", "note"),
        "tenant",
    )
    depth: int
    note: Any

    def __init__(self, key: bytes, ids: tuple[int, ...], before: Page | None, kind: int) -> None:
        self.key, self.ids, self.before, self.kind = key, ids, before, kind
        self.depth = 0 if before is None else before.depth + 1
        self.after: set[Page] = set()
        self.finders: set[int] = set()
        self.host: int | None = None
        self.tenant = 0

    @property
    def is_known(self) -> bool:
        """Whether it is in the pool or in host memory."""
        return bool(self.ids) or self.host is not None

    @property
    def is_bare(self) -> bool:
        """Whether none behind it is in the pool."""
        return not any(page.ids for page in self.after)
