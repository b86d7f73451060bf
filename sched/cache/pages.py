"""Pages: full blocks that can be found again, linked in the order of their tokens."""

from __future__ import annotations

from typing import Any


class Page:
    """A known block of K and one of V, or one block of hidden vectors.

    Attributes:
        kind: `CacheKind` of its content.
        key: Key of its tokens and all tokens before them, with the kind and the side from which it
        was filled.
        ids: Ids of its blocks; empty while it is in host memory, and once it is forgotten.
        host: Its key in host memory; None if it is not there.
        before: The page of the preceding tokens; None for the first.
        depth: Number of pages before it.
        after: The pages directly behind it.
        finders: Waiting rows whose prefix ends with this page.
        note: Data that the retention policy keeps for it.
        tenant: The tenant that filled or read it last.
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
        """Whether no page behind it is in the pool."""
        return not any(page.ids for page in self.after)
