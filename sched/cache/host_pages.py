"""Pages of the prefix cache that are in host memory: its second level.

A page that leaves the pool is copied here if that is worth it, and is then found behind pages that
are still in the pool. A request that starts with such a page has it copied back; a page that is
back in the pool is no longer kept here.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.sched.cache.kv_offload import HostMemory
from jaxserve.sched.cache.page_shares import PageShares, Tenants
from jaxserve.sched.cache.pages import Page


class HostPages:
    """The pages in host memory. The ends of prompts are dropped first, so a page goes before the
    pages that precede it. Pages get the room that checkpoints leave; tenants share it like the
    pool.

    Args:
        memory: Host memory, which also holds checkpoints.
        slots: Slots of a page.
        worth_from: Returns the depth from which copying a page there and back takes no longer than
        computing it again.

    Attributes:
        least_depth: The last result of `worth_from`.
        tenants: Which tenants have used pages, and when.
    """

    def __init__(self, memory: HostMemory, slots: int, worth_from: Callable[[], float]) -> None:
        self._memory, self._slots, self._worth_from = memory, slots, worth_from
        self.least_depth = 0.0
        self.tenants = Tenants()
        self._pages, self._count = PageShares(self.tenants), 0
        self._new: dict[Page, tuple[int, ...]] = {}  # since `take_new`, and their blocks
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return self._count

    def look(self) -> None:
        """Asks again from which depth on pages are worth keeping, unless pages have come since the
        last step."""
        if not self._new:
            self.least_depth = self._worth_from()

    def keeps(self, page: Page) -> bool:
        """Whether a page that leaves the pool should be kept here: either deep ones, which cost
        more to compute, or one that pages already here depend on."""
        return bool(page.after) or page.depth >= self.least_depth

    def pays(self, here: int, found: int) -> bool:
        """Whether it pays to copy back the pages after the first `here` pages of a prefix, up to
        `found` in total: whether their mean depth is large enough."""
        return here + found - 1 >= 2 * self.least_depth

    def put(self, page: Page, ids: tuple[int, ...]) -> None:
        """Keeps the page, which has left these blocks; they hold its content until the next
        step."""
        self._new[page] = ids
        page.host = self._memory.new_key()
        self._add(page)

    def adopt(self, page: Page) -> int | None:
        """Keeps a page whose content another engine has sent, whoever has to go for it. Returns its
        key in host memory; None if there is no room for any."""
        if self._slots > self._memory.num_free:
            return None
        page.host = self._memory.new_key()
        self._add(page)
        return page.host

    def _add(self, page: Page) -> None:
        self._pages.add(page)
        self._pages.count(page.tenant, 1)
        self._count += 1

    def drop(self, page: Page) -> None:
        """Drops the page if it is kept here."""
        if page.host is None:
            return
        self._pages.remove(page)
        self._pages.count(page.tenant, -1)
        self._count -= 1
        if self._new.pop(page, None) is None:
            self._dropped.append(page.host)
        page.host = None

    def surplus(self) -> Page | None:
        """The next page to drop if there is no room for all of them."""
        if self._count * self._slots <= self._memory.num_free:
            return None
        return self._pages.next_page(lambda pages: next(iter(pages)))

    def take_new(self) -> list[tuple[int, tuple[int, ...]]]:
        """Keys and blocks of the pages that have come since the last call."""
        new, self._new = self._new, {}
        return [(page.host, ids) for page, ids in new.items() if page.host is not None]

    def take_dropped(self) -> list[int]:
        """Keys of pages that were dropped since the last call, after they had been copied here."""
        keys, self._dropped = self._dropped, []
        return keys
