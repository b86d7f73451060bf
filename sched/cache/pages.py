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
        beside: The page of other groups of layers for its tokens; None if there is none.
    """

    __slots__ = (
        *("after", "before", "beside", "depth", "finders", "host", "ids", "key", "kind", "note"),
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
        self.beside: BesidePage | None = None

    @property
    def is_known(self) -> bool:
        """Whether it is in the pool or in host memory."""
        return bool(self.ids) or self.host is not None

    @property
    def is_bare(self) -> bool:
        """Whether no page behind it is in the pool."""
        return not any(page.ids for page in self.after)


class BesidePage(Page):
    """A known block of K and one of V in each group of layers with a window, or the blocks of a
    state. It comes and goes by itself, and goes with `main` at the latest.

    Attributes:
        main: The page of its tokens in the group with all K and V.
    """

    __slots__ = ("main",)

    def __init__(self, main: Page, ids: tuple[int, ...]) -> None:
        super().__init__(beside_key(main.key), ids, None, main.kind)
        self.main, self.depth = main, main.depth


def beside_key(key: bytes) -> bytes:
    """The key of the page beside the one with this key."""
    return key + b"W"
