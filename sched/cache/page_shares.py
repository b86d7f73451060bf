"""Which tenant owns each page of the prefix cache, and which tenant loses the next page.

A page belongs to the tenant that filled or read it last, even while it is being read. The tenant
with the most blocks relative to its weight loses a page first. So no tenant loses pages while
another has more for its weight, and tenants may use what others leave. A page that only other
tenants' pages follow is passed on to one of them instead. A tenant that has not used any page for a
while has no share: otherwise part of the cache would be lost to the others for nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import chain

from jaxserve.sched.cache.pages import Page

IDLE = 600.0  # seconds without a use after which a tenant has no share
_LOOK = IDLE / 10  # seconds between checks for idle tenants


class Tenants:
    """Weights of tenants and when they last used pages, by tenant number.

    Attributes:
        now: Seconds.
        weight: Weight of each known tenant.
        used: When each tenant last used a page.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.weight: dict[int, float] = {}
        self.used: dict[int, float] = {}

    def use(self, tenant: int) -> None:
        """Records that the tenant uses pages now."""
        self.used[tenant] = self.now

    def is_idle(self, tenant: int) -> bool:
        """Whether the tenant has not used any page for a while."""
        return self.now - self.used.get(tenant, -math.inf) > IDLE


class PageShares:
    """The evictable pages of one level of the cache, by tenant, and how many blocks each tenant
    has."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._pages: dict[int, dict[Page, None]] = {}  # without empty dicts
        self._has: dict[int, int] = {}  # blocks, including those of pages that cannot be evicted
        self._most: list[tuple[float, int]] = []  # heap of negative bounds of tenants' values
        self._listed: dict[int, float] = {}  # by tenant, its valid entry in the heap
        self._idle: dict[int, None] = {}
        self._next_look = -math.inf

    def __contains__(self, page: Page) -> bool:
        return page in self._pages.get(page.tenant, ())

    def __iter__(self) -> Iterator[Page]:
        return chain.from_iterable(self._pages.values())

    def __bool__(self) -> bool:
        return bool(self._pages)

    def count(self, tenant: int, blocks: int) -> None:
        """Adds this many blocks to the tenant's, or removes them if negative."""
        has = self._has.get(tenant, 0) + blocks
        self._has[tenant] = has
        if not has:
            del self._has[tenant]
        elif blocks > 0 and tenant in self._listed:
            self._list(tenant)

    def has(self, tenant: int) -> int:
        """Blocks of the tenant."""
        return self._has.get(tenant, 0)

    def add(self, page: Page) -> None:
        """Makes the page evictable, after all other evictable pages of its tenant."""
        pages = self._pages.get(page.tenant)
        if pages is None:
            pages = self._pages[page.tenant] = {}
            self._list(page.tenant)
        pages[page] = None

    def remove(self, page: Page) -> None:
        """Removes an evictable page, which was evicted or is in use again."""
        pages = self._pages[page.tenant]
        del pages[page]
        if not pages:
            del self._pages[page.tenant]

    def first(self) -> dict[Page, None]:
        """Evictable pages of the tenant that loses first, in order; there must be some."""
        if len(self._pages) == 1:
            return next(iter(self._pages.values()))
        return self._pages[self._loser()]

    def next_page(self, first: Callable[[dict[Page, None]], Page]) -> Page:
        """The next page to evict; there must be some. No page behind it is evictable. If tenants
        share a prefix, a page that only other tenants' pages follow is passed on to one of them,
        since evicting it would evict their pages, too.

        Args:
            first: Chooses the page to evict first from a tenant's pages in order.
        """
        while True:
            page = end = first(self.first())
            while behind := [after for after in end.after if after in self]:
                end = min(behind, key=lambda after: after.key)
            if end is page:
                return page
            self._pass_on(page, end.tenant)

    def _pass_on(self, page: Page, heir: int) -> None:
        """Passes the page on to a tenant that has pages behind it, and also the pages before it as
        long as their tenant has more for its weight. The new tenant's pages still go in order, each
        before those that precede it."""
        tenant, before = page.tenant, page
        while True:
            more = before is page or self._value(tenant) > self._value(heir)
            if before.tenant == heir or (before.tenant == tenant and more):
                self.remove(before)
                blocks = len(before.ids) or 1
                self.count(before.tenant, -blocks)
                before.tenant = heir
                self.count(heir, blocks)
                self.add(before)
            if before.before is None or before.before not in self:
                return
            before = before.before

    def _loser(self) -> int:
        tenants = self._tenants
        if tenants.now >= self._next_look:
            self._next_look = tenants.now + _LOOK
            self._idle = dict.fromkeys(filter(tenants.is_idle, self._pages))
        while self._idle:
            tenant = next(iter(self._idle))
            if tenant in self._pages and tenants.is_idle(tenant):
                return tenant
            del self._idle[tenant]
        while True:
            value, tenant = -self._most[0][0], self._most[0][1]
            if tenant in self._pages and self._listed[tenant] == value:
                if (now := self._value(tenant)) == value:
                    return tenant
                self._listed[tenant] = now
                heapq.heapreplace(self._most, (-now, tenant))
                continue
            heapq.heappop(self._most)
            if self._listed.get(tenant) == value:
                del self._listed[tenant]

    def _list(self, tenant: int) -> None:
        value = self._value(tenant)
        if value > self._listed.get(tenant, -1.0):
            self._listed[tenant] = value
            heapq.heappush(self._most, (-value, tenant))
            if len(self._most) > 2 * len(self._pages) + 64:
                listed = self._listed.items()
                self._listed = {tenant: value for tenant, value in listed if tenant in self._pages}
                self._most = [(-value, tenant) for tenant, value in self._listed.items()]
                heapq.heapify(self._most)

    def _value(self, tenant: int) -> float:
        return self.has(tenant) / self._tenants.weight.get(tenant, 1.0)
