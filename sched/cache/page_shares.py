"""Whose pages are in the prefix cache, and who loses the next one.

A page counts for the tenant that has filled or read it last, also while somebody reads it. The
tenant with the most blocks for its weight loses first, so nobody loses any while another one has
more than it for its weight, and what one leaves, others use. A page that only pages of others are
behind goes to one of them instead. A tenant that has used none for a while has no share to keep:
others would be left with a part of the cache for nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import chain

from jaxserve.sched.cache.pages import Page

IDLE = 600.0  # seconds without a use after which a tenant has no share
_LOOK = IDLE / 10  # how often that is looked at


class Tenants:
    """What is known of tenants, by number.

    Attributes:
        now: Seconds.
        weight: Of each that has come.
        used: When each last used a page.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.weight: dict[int, float] = {}
        self.used: dict[int, float] = {}

    def use(self, tenant: int) -> None:
        """The tenant uses pages now."""
        self.used[tenant] = self.now

    def is_idle(self, tenant: int) -> bool:
        """Whether it has used none for a while."""
        return self.now - self.used.get(tenant, -math.inf) > IDLE


class PageShares:
    """The pages of one level of the cache that may go, by tenant, and how much each has there."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._pages: dict[int, dict[Page, None]] = {}  # none is empty
        self._has: dict[int, int] = {}  # blocks, those of pages included that may not go
        self._most: list[tuple[float, int]] = []  # a heap: negative, at least what a tenant has
        self._listed: dict[int, float] = {}  # what counts of it, by tenant
        self._idle: dict[int, None] = {}
        self._next_look = -math.inf

    def __contains__(self, page: Page) -> bool:
        return page in self._pages.get(page.tenant, ())

    def __iter__(self) -> Iterator[Page]:
        return chain.from_iterable(self._pages.values())

    def __bool__(self) -> bool:
        return bool(self._pages)

    def count(self, tenant: int, blocks: int) -> None:
        """The tenant has so many blocks more, or fewer."""
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
        """The page may go, after all others of its tenant that may."""
        pages = self._pages.get(page.tenant)
        if pages is None:
            pages = self._pages[page.tenant] = {}
            self._list(page.tenant)
        pages[page] = None

    def remove(self, page: Page) -> None:
        """The page, which might go, has gone, or may not any more."""
        pages = self._pages[page.tenant]
        del pages[page]
        if not pages:
            del self._pages[page.tenant]

    def first(self) -> dict[Page, None]:
        """Those that may go of the tenant that loses first, in order; there must be some."""
        if len(self._pages) == 1:
            return next(iter(self._pages.values()))
        return self._pages[self._loser()]

    def next_page(self, first: Callable[[dict[Page, None]], Page]) -> Page:
        """The next page to go; there must be some. None behind it may go. Where tenants share a
        beginning, a page that only pages of others are behind is theirs from now on: what they use
        does not go with it.

        Args:
            first: Says which of a tenant's pages goes first, of those in order.
        """
        while True:
            page = end = first(self.first())
            while behind := [after for after in end.after if after in self]:
                end = min(behind, key=lambda after: after.key)
            if end is page:
                return page
            self._pass_on(page, end.tenant)

    def _pass_on(self, page: Page, heir: int) -> None:
        """The page is another tenant's, which has pages behind it, and so is what is before it as
        far as its own tenant has more for its weight. Each page of the new tenant still goes
        before those that come before it."""
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
