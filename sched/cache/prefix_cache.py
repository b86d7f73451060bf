"""The prefix cache: finds full blocks again by the key of their tokens.

A key stands for all tokens up to the end of its block (`jaxserve/engine/block_keys.py`), so blocks
form a tree: a request that finds one finds all before it. A block that nobody reads stays until its
room is needed, and counts as free. vLLM calls this automatic prefix caching, SGLang a radix cache.

K and V of some tokens and their hidden vectors are different pages. A row finds the longer chain of
the two kinds, or K and V if they are equally long, and starts with a cache of that kind.

Waiting rows know what they would find (`found`), and this is kept up to date as blocks come and go:
`_wanted` has the next page that a row lacks, and the last page that it finds knows the row. Rows
affected by changes look again once per step (`settle`), however many blocks have changed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxserve.sched.cache.cache_kinds import HIDDEN, KV, LEFT
from jaxserve.sched.cache.host_pages import HostPages
from jaxserve.sched.cache.page_shares import PageShares, Tenants
from jaxserve.sched.cache.pages import Page
from jaxserve.sched.cache.prefix_sketch import PrefixSketch
from jaxserve.sched.cache.retention import Reader, Retention
from jaxserve.sched.request import Tier
from jaxserve.sched.row_columns import grow_columns

_NOBODY: frozenset[int] = frozenset()
_X = b"X"  # suffix of the keys of hidden vectors


class PrefixCache:
    """Pages by key, and the waiting rows that would find them.

    Args:
        rows: Rows of the request table.
        retention: Chooses which page is evicted first; None for `lru`.
        host: Host memory that takes evicted pages of K and V; None for none.
        hidden: Whether any request has a hidden cache.

    Attributes:
        found: int64 by row, pages that a waiting row would find.
        kind: int8 by row, `CacheKind` of those pages.
        num_hidden: Pages of hidden vectors.
        num_unread: Blocks of pages that nobody reads.
        num_evicted: Pages that were evicted so far and are not in host memory either.
        num_reused: Found pages that were read so far.
        moved: Rows that may find other pages than when this set was last emptied.
        ends: Pages with finders.
        num_queried: int64 by tier, prompt tokens of started requests with keys, so far.
        num_hit: int64 by tier, those of them that were found.
        num_host_hit: int64 by tier, those of them that were in host memory.
        hopeless: See `Retention.hopeless`.
        tenants: Which tenants have used pages, and when.
        sketch: Sketch of all pages, and of the blocks of requests that have not ended.
    """

    def __init__(
        self,
        rows: int,
        retention: Retention | None = None,
        host: HostPages | None = None,
        *,
        hidden: bool = False,
    ) -> None:
        self.retention, self.host, self._hidden = retention or Retention(), host, hidden
        self.found, self.kind = np.zeros(rows, np.int64), np.zeros(rows, np.int8)
        self.num_hidden = 0
        self.num_unread = self.num_evicted = self.num_reused = 0
        self.num_queried, self.num_hit, self.num_host_hit = np.zeros((3, len(Tier)), np.int64)
        self.sketch = PrefixSketch()
        self.hopeless = set[int]()
        self.retention.hopeless = self.hopeless
        self._pages: dict[bytes, Page] = {}
        self._of_block: dict[int, Page] = {}
        self.tenants = Tenants() if host is None else host.tenants
        self._unread = PageShares(self.tenants)
        self._readers: dict[int, Reader] = {}  # by row
        self._keys: dict[int, list[bytes]] = {}  # by row
        self._sides: dict[int, int] = {}  # by row
        self._most: dict[int, int] = {}  # by waiting row, pages that it may find
        self._chain: dict[int, list[Page]] = {}  # by waiting row, pages that it finds
        self._changed: set[int] = set()
        self.moved: set[int] = set()
        self.ends: set[Page] = set()
        self._wanted: dict[bytes, set[int]] = {}
        self._wants: dict[int, tuple[bytes, ...]] = {}  # by waiting row, keys of the next pages
        self._woken: set[int] = set()  # rows that may find more or less than they did

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_on_host(self) -> int:
        """Pages in host memory."""
        return 0 if self.host is None else len(self.host)

    def follow(self, rows: int) -> None:
        """Makes room for rows up to `rows`."""
        grow_columns(self, rows, found=0, kind=KV)

    # Rows.

    def add(
        self,
        row: int,
        keys: Sequence[bytes],
        side: int = LEFT,
        tier: int = Tier.REALTIME,
        tenant: int = 0,
        program: int = -1,
    ) -> None:
        """Adds a request.

        Args:
            row: Its row.
            keys: Keys of the full blocks of its prompt, in order.
            side: The side from which it fills blocks (`Direction`). It does not find blocks that
            were filled from the other side, where tokens lie elsewhere.
            tier: Its tier.
            tenant: Its tenant.
            program: Number of its program; -1 for none.
        """
        self._readers[row] = Reader(tier, len(keys), tenant, program)
        self.tenants.use(tenant)
        self._sides[row], self._keys[row] = side, []
        self.extend(row, keys)

    def look(self, now: float, running: int) -> None:
        """A plan is about to be made, see `Retention.look`."""
        self.tenants.now = now
        if self.retention.look(now, running):
            self.moved.update(self._chain)

    def extend(self, row: int, keys: Sequence[bytes]) -> None:
        """Adds the keys of the row's next full blocks."""
        side, mine = self._sides[row], self._keys[row]
        keys = keys if side == LEFT else [key + b"R" for key in keys]
        self.sketch.add(keys, len(mine))
        mine += keys

    def longest(self, keys: Sequence[bytes], side: int = LEFT) -> int:
        """How many of the blocks with these keys, in order, are cached. Any thread may ask; the
        answer may be one step old."""
        end = b"" if side == LEFT else b"R"
        found = self._length(keys, end)
        return max(found, self._length(keys, end + _X)) if self.num_hidden else found

    def has(self, key: bytes) -> bool:
        """Whether a page has this key (`Page.key`). Any thread may ask."""
        return key in self._pages

    def _length(self, keys: Sequence[bytes], end: bytes) -> int:
        return bisect.bisect_left(keys, True, key=lambda key: key + end not in self._pages)

    def keys(self, row: int) -> Sequence[bytes]:
        """Keys of the row's full blocks, in order."""
        return self._keys.get(row, ())

    def num_keys(self, row: int) -> int:
        """How many of the row's blocks have keys."""
        return len(self._keys.get(row, ()))

    def knows(self, row: int) -> bool:
        """Whether the row's request was added and has not ended."""
        return row in self._keys

    def side(self, row: int) -> int:
        """The side from which the row fills blocks (`Direction`)."""
        return self._sides.get(row, int(LEFT))

    def watch_row(self, row: int, most: int) -> None:
        """Looks up what a waiting row would find, at most `most` pages, now and whenever pages
        change."""
        if row in self._keys:
            self._most[row], self._chain[row] = min(most, len(self._keys[row])), []
            self._look(row)

    def claim_hit(self, row: int) -> list[Page]:
        """Stops watching a row that starts. Returns the pages that it finds, in order."""
        self.settle()
        chain = self._chain.get(row)
        if chain is None:
            return []
        self._unlist(row)
        del self._chain[row], self._most[row]
        self._tell(row, 0, KV)
        return chain

    def remove(self, row: int) -> None:
        """Removes a request that has ended."""
        self.claim_hit(row)
        self.hopeless.discard(row)
        self.sketch.add(self._keys.pop(row, ()), count=-1)
        self._sides.pop(row, None)
        self._readers.pop(row, None)

    def finds_all(self, row: int) -> bool:
        """Whether a waiting row finds all that it may."""
        return bool(self.found[row] == self._most.get(row, 0))

    def chain(self, row: int) -> Sequence[Page]:
        """The pages that a waiting row finds, in order."""
        self.settle()
        return self._chain.get(row, ())

    def finders(self, blocks: Iterable[int]) -> list[int]:
        """Waiting rows that would find any of these blocks."""
        self.settle()
        behind = [page for block in blocks if (page := self._of_block.get(block)) is not None]
        seen = dict.fromkeys(behind)
        for page in behind:
            new = [after for after in page.after if after not in seen]
            seen.update(dict.fromkeys(new))
            behind += new
        return [row for page in behind for row in page.finders]

    def first_found(self) -> list[int]:
        """K blocks of the first pages that waiting rows find."""
        self.settle()
        return [chain[0].ids[0] for chain in self._chain.values() if chain and chain[0].ids]

    def take_changed(self) -> list[int]:
        """Rows whose `found` has changed since the last call."""
        self.settle()
        rows, self._changed = sorted(self._changed), set()
        return rows

    def settle(self) -> None:
        """Lets waiting rows look again if pages have come or gone. Then `found`, `moved` and `ends`
        are up to date."""
        if not self._woken:
            return
        woken, self._woken = self._woken, set()
        for row in woken & self._chain.keys():
            chain = self._chain[row]
            while chain and not chain[-1].is_known:  # if a page is forgotten, so are all behind it
                chain.pop()
            self._unlist(row)
            self._look(row)

    def _look(self, row: int) -> None:
        """Extends what the row finds, or switches to the other kind if that is longer."""
        keys, most, chain = self._keys[row], self._most[row], self._chain[row]
        if chain and chain[0].kind == HIDDEN:
            chain = []
        while len(chain) < most and (page := self._pages.get(keys[len(chain)])) is not None:
            chain.append(page)
        if self.host is not None and chain and not chain[-1].ids:
            here = bisect.bisect_left(chain, True, key=lambda page: not page.ids)
            if not self.host.pays(here, len(chain)):
                del chain[here:]
        wants = keys[len(chain) : most][:1]
        if self._hidden:
            hidden = self._length(keys[:most], _X) if self.num_hidden else 0
            wants += [key + _X for key in keys[hidden:most][:1]]
            if hidden > len(chain):
                chain = [self._pages[key + _X] for key in keys[:hidden]]
        wants += self._shorten(row, chain)
        self._chain[row] = chain
        if chain:
            chain[-1].finders.add(row)
            self.ends.add(chain[-1])
        self._wants[row] = tuple(wants)
        for key in wants:
            self._wanted.setdefault(key, set()).add(row)
        self._tell(row, len(chain), chain[0].kind if chain else KV)

    def _shorten(self, row: int, chain: list[Page]) -> list[bytes]:
        """Removes pages that a row cannot find together from the end. Returns the keys of further
        pages that would change this."""
        return []

    def _tell(self, row: int, found: int, kind: int) -> None:
        self.moved.add(row)
        if self.found[row] != found or self.kind[row] != kind:
            self.found[row], self.kind[row] = found, kind
            self._changed.add(row)

    def _unlist(self, row: int) -> None:
        """Removes the row from its last page's finders and from the rows that want the next
        page."""
        if chain := self._chain[row]:
            end = chain[-1]
            end.finders.discard(row)
            if not end.finders:
                self.ends.discard(end)
        for key in self._wants.pop(row, ()):
            wanted = self._wanted.get(key, set())
            wanted.discard(row)
            if not wanted:
                self._wanted.pop(key, None)

    # Pages.

    def page(self, row: int, index: int, kind: int = KV) -> Page | None:
        """The page of that kind for the row's block of that index, if there is one."""
        keys, end = self._keys.get(row, ()), _X if kind == HIDDEN else b""
        return self._pages.get(keys[index] + end) if index < len(keys) else None

    def register(self, row: int, index: int, ids: tuple[int, ...], kind: int = KV) -> Page:
        """Adds a page for the row's full block of that index, which is in these blocks. The page
        must not be in the pool yet, and those before it must be.

        Args:
            row: The row.
            index: Index of the block.
            ids: Its blocks: one of K and one of V, or one of hidden vectors.
            kind: `CacheKind` of the page.

        Returns:
            The page.
        """
        keys, page = self._keys[row], self.page(row, index, kind)
        if page is None:
            before = self.page(row, index - 1, kind) if index else None
            key = keys[index] + (_X if kind == HIDDEN else b"")
            page = self._pages[key] = Page(key, ids, before, kind)
            self.num_hidden += kind == HIDDEN
            self.sketch.add(keys[index : index + 1], index)
            if before is not None:
                before.after.add(page)
        elif self.host is not None:
            self.host.drop(page)
            page.ids = ids
        self._fill(page, row)
        return page

    def adopt(self, row: int, index: int) -> int | None:
        """Adds a page to host memory, whose content another engine has sent.

        Args:
            row: A waiting row, which finds it from now on.
            index: Index of the block; those before it are pages.

        Returns:
            Its key in host memory; None if there is no room.
        """
        key, before = self._keys[row][index], self.page(row, index - 1) if index else None
        page = Page(key, (), before, KV)
        self._give(page, row)
        kept = None if self.host is None else self.host.adopt(page)
        if kept is not None:
            self._pages[key] = page
            self.sketch.add((key,), index)
            if before is not None:
                before.after.add(page)
            self._woken |= self._wanted.pop(key, _NOBODY)
            self.trim_host()
        return page.host

    def _fill(self, page: Page, row: int) -> None:
        """Records that the row has filled the blocks of a new page."""
        self._give(page, row)
        self._unread.count(page.tenant, len(page.ids))
        self.retention.made(page, self._readers[row])
        for block in page.ids:
            self._of_block[block] = page
        self._woken |= self._wanted.pop(page.key, _NOBODY)

    def page_of(self, block: int) -> Page | None:
        """The page in this block."""
        return self._of_block.get(block)

    def release_readers(self, ids: Sequence[int]) -> list[int]:
        """Records that nobody reads these blocks any more. Known blocks stay. The pages of one row
        are in order, and the last is evicted first. Returns the ids of free blocks."""
        free = [block for block in ids if block not in self._of_block]
        pages = dict.fromkeys(map(self._of_block.get, ids))
        pages.pop(None, None)
        for page in reversed([*pages]):
            assert page is not None
            self._unread.add(page)
            self.num_unread += len(page.ids)
            self.tenants.use(page.tenant)
            self.retention.stay(page)
            if any(after.ids and after not in self._unread for after in page.after):
                free += self.forget(page)  # readers of the children have a copy of it
        return free

    def stay_again(self, row: int) -> None:
        """Tells the retention anew of the row's pages that nobody reads, the last one first."""
        for index in reversed(range(self.num_keys(row))):
            page = self.page(row, index)
            for one in (page, page and page.beside):
                if one is not None and one in self._unread:
                    self.retention.leave(one)
                    self.retention.stay(one)

    def read(self, page: Page, row: int) -> None:
        """Records that the row reads the page that it has found."""
        self._leave(page)
        self._unread.count(page.tenant, -len(page.ids))
        self._give(page, row)
        self._unread.count(page.tenant, len(page.ids))
        self.retention.hit(page, self._readers[row])

    def _give(self, page: Page, row: int) -> None:
        """Makes the row's tenant the tenant of the page."""
        page.tenant = self._readers[row].tenant
        self.tenants.use(page.tenant)

    def _leave(self, page: Page) -> bool:
        """Takes the page, which will be read or evicted, off the evictable ones. Returns whether it
        was one."""
        if page not in self._unread:
            return False
        self._unread.remove(page)
        self.num_unread -= len(page.ids)
        self.retention.leave(page)
        return True

    def evict(self, blocks: int) -> list[int]:
        """Evicts pages that nobody reads from the pool until this many blocks are free, to host
        memory if that pays. Returns the ids; fewer if there are no more."""
        found: list[int] = []
        if self.host is not None:
            self.host.look()
        while len(found) < blocks and self._unread:
            page = self._unread.next_page(self.retention.first)
            if self.host is not None and page.kind == KV and self.host.keeps(page):
                ids = page.ids
                found += self._vacate(page, evicted=True)
                self.host.put(page, ids)
            else:
                found += self._lose(page)
        return found

    def trim_host(self) -> None:
        """Drops pages from host memory if there is no room for them."""
        while self.host is not None and (page := self.host.surplus()) is not None:
            self._lose(page)

    def _lose(self, page: Page) -> list[int]:
        """Evicts the page and all pages behind it."""
        before = len(self._pages)
        found = self.forget(page, evicted=True)
        self.num_evicted += before - len(self._pages)
        return found

    def forget(self, page: Page, *, evicted: bool = False) -> list[int]:
        """Forgets the page and all pages behind it, because its content changes or must not be
        found any more. evicted: whether it makes room for others. Returns the blocks that become
        free."""
        found: list[int] = []
        behind = [page]
        for one in behind:
            behind += one.after
        for one in reversed(behind):
            found += self._forget(one, evicted=evicted)
        return found

    def clear(self) -> list[int]:
        """Forgets all pages. Returns the blocks that become free."""
        found: list[int] = []
        for page in sorted(self._pages.values(), key=lambda page: -page.depth):
            found += self._forget(page)
        return found

    def pages(self) -> Iterator[Page]:
        """All pages."""
        return iter(self._pages.values())

    def _forget(self, page: Page, *, evicted: bool = False) -> list[int]:
        """Forgets a page with no pages behind it. Returns its blocks if nobody reads them."""
        del self._pages[page.key]
        key = page.key
        if page.kind == HIDDEN:
            key, self.num_hidden = key[: -len(_X)], self.num_hidden - 1
        self.sketch.add((key,), page.depth, -1)
        before = page.before
        if before is not None:
            before.after.remove(page)
            if page.finders:  # they still find the pages before it
                if before.finders:
                    before.finders |= page.finders
                else:
                    before.finders = page.finders
                self.ends.add(before)
        self._woken |= page.finders
        self.ends.discard(page)
        found = self._vacate(page, evicted=evicted)
        page.finders = set()
        if self.host is not None:
            self.host.drop(page)
        return found

    def _vacate(self, page: Page, *, evicted: bool) -> list[int]:
        """Takes the page out of its blocks. Returns them if nobody reads them."""
        if not page.ids:
            return []
        for block in page.ids:
            del self._of_block[block]
        free = list(page.ids) if self._leave(page) else []
        self._unread.count(page.tenant, -len(page.ids))
        page.ids = ()
        self.retention.gone(page, evicted=evicted)
        before = page.before
        if before is not None and before in self._unread and before.is_bare:
            self.retention.bare(before)
        return free
