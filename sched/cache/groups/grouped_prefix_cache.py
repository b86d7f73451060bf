"""The prefix cache of a pool with groups of layers that do not keep all K and V.

Each page may have another one beside it, with the blocks of these groups: their K and V of the same
tokens, or the state behind them. What is found together, `Groups.valid` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.sched.cache.groups.groups import Groups
from jaxserve.sched.cache.pages import BesidePage, Page, beside_key
from jaxserve.sched.cache.prefix_cache import PrefixCache
from jaxserve.sched.cache.retention import Retention


class GroupedPrefixCache(PrefixCache):
    """A `PrefixCache` of K and V in a `GroupedPool`. It has no host memory.

    Args:
        rows, retention: See `PrefixCache`.
        groups: The groups beside.
        block_size: Tokens of a block.
    """

    def __init__(
        self,
        rows: int,
        retention: Retention | None = None,
        *,
        groups: Groups,
        block_size: int,
    ) -> None:
        super().__init__(rows, retention)
        self._groups, self._block_size = groups, block_size
        # The last known page of rows that find fewer, since blocks beside are missing; and by page.
        self._cut_off: dict[int, Page] = {}
        self._cut_at: dict[Page, set[int]] = {}
        self._passed: dict[Page, None] = {}  # see `evict`

    def pages(self) -> Iterator[Page]:
        """See `PrefixCache`, with those beside others."""
        for page in super().pages():
            yield page
            if page.beside is not None:
                yield page.beside

    def register_beside(self, main: Page, ids: tuple[int, ...], row: int) -> None:
        """Adds the row's blocks of these ids beside the page, which has none there."""
        main.beside = BesidePage(main, ids)
        self._fill(main.beside, row)
        before: Page | None = main if self._groups.apart else None
        for _ in range(self._groups.apart):
            before = before and before.before
        if before is not None and before.beside is not None:
            self._passed[before.beside] = None

    def read(self, page: Page, row: int) -> None:
        """See `PrefixCache`."""
        super().read(page, row)
        self._passed.pop(page, None)

    def evict(self, blocks: int) -> list[int]:
        """See `PrefixCache`. First go snapshots with a later one behind them that no request has
        found: the later one is found in their place, unless a prompt ends between them."""
        found: list[int] = []
        for page in [page for page in self._passed if page in self._unread]:
            if len(found) >= blocks:
                break
            found += self._lose(page)
        return found + super().evict(blocks - len(found))

    def _length(self, keys: Sequence[bytes], end: bytes) -> int:
        pages = [self._pages.get(key + end) for key in keys[: super()._length(keys, end)]]

        def has(at: int) -> bool:
            page = pages[at]
            return page is not None and page.beside is not None

        return self._groups.valid(len(pages), self._block_size, has)

    def _shorten(self, row: int, chain: list[Page]) -> list[bytes]:
        groups, size, whole = self._groups, self._block_size, len(chain)
        end = chain[-1] if chain else None
        valid = groups.valid(whole, size, lambda at: chain[at].beside is not None)
        lacking = (chain[at] for at in groups.lacking(whole, valid, size))
        wants = [beside_key(page.key) for page in lacking if page.beside is None]
        del chain[valid:]
        if end is not None and len(chain) < whole:
            self._cut_off[row] = end
            self._cut_at.setdefault(end, set()).add(row)
        return wants

    def _unlist(self, row: int) -> None:
        super()._unlist(row)
        if (end := self._cut_off.pop(row, None)) is not None:
            self._cut_at[end].discard(row)
            if not self._cut_at[end]:
                del self._cut_at[end]

    def _forget(self, page: Page, *, evicted: bool = False) -> list[int]:
        if not isinstance(page, BesidePage):
            self._woken |= self._cut_at.get(page, set())
            own = [] if page.beside is None else self._forget(page.beside, evicted=evicted)
            return own + super()._forget(page, evicted=evicted)
        page.main.beside = None
        self._passed.pop(page, None)
        # Rows whose prefix ends there, or not far behind it, may find less.
        reach = page.depth + self._groups.reach(self._block_size)
        behind = [page.main]
        for one in behind:
            self._woken |= one.finders
            if one.depth < reach:
                behind += one.after
        return self._vacate(page, evicted=evicted)
