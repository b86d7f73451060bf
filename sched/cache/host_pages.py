"""Pages of the prefix cache that are in host memory: its second level.

A page that leaves the pool comes here if that is worth it, and is found behind those that are in
the pool still. Who starts with it has it copied back, and what is in the pool again is not here.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.sched.cache.kv_offload import HostMemory
from jaxserve.sched.cache.page_shares import PageShares, Tenants
from jaxserve.sched.cache.pages import Page


class HostPages:
    """Which pages are in host memory. Ends of prompts come first, so each goes before those that
    come before it. They have the room that checkpoints leave, and tenants share it as the pool.

    Args:
        memory: Holds checkpoints, too.
        slots: Of a page.
        worth_from: Says how many pages have to come before one for copying it there and back to
            take no longer than computing it.

    Attributes:
        least_depth: What `worth_from` said last.
        tenants: Who has used pages, and when.
    """

    def __init__(self, memory: HostMemory, slots: int, worth_from: Callable[[], float]) -> None:
        self._memory, self._slots, self._worth_from = memory, slots, worth_from
        self.least_depth = 0.0
        self.tenants = Tenants()
        self._pages, self._count = PageShares(self.tenants), 0
        self._new: dict[Page, tuple[int, ...]] = {}  # since `take_new`, in these blocks
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return self._count

    def look(self) -> None:
        """Asks anew from which depth on pages are worth it, unless some have come since the last
        step."""
        if not self._new:
            self.least_depth = self._worth_from()

    def keeps(self, page: Page) -> bool:
        """Whether a page that leaves the pool should come here: deep ones are dearer to compute,
        and those that are here already are worth nothing without it."""
        return bool(page.after) or page.depth >= self.least_depth

    def pays(self, here: int, found: int) -> bool:
        """Whether it pays to copy those pages back that are found behind `here` others, up to
        `found` in all: the mean of them is deep enough."""
        return here + found - 1 >= 2 * self.least_depth

    def put(self, page: Page, ids: tuple[int, ...]) -> None:
        """The page has left these blocks, which hold it until the next step, and comes here."""
        self._new[page] = ids
        page.host = self._memory.new_key()
        self._pages.add(page)
        self._pages.count(page.tenant, 1)
        self._count += 1

    def drop(self, page: Page) -> None:
        """The page is no longer here, if it was."""
        if page.host is None:
            return
        self._pages.remove(page)
        self._pages.count(page.tenant, -1)
        self._count -= 1
        if self._new.pop(page, None) is None:
            self._dropped.append(page.host)
        page.host = None

    def surplus(self) -> Page | None:
        """The next page to go, if there is no room for all of them."""
        if self._count * self._slots <= self._memory.num_free:
            return None
        return self._pages.next_page(lambda pages: next(iter(pages)))

    def take_new(self) -> list[tuple[int, tuple[int, ...]]]:
        """Those that have come since the last call: their keys, and their blocks."""
        new, self._new = self._new, {}
        return [(page.host, ids) for page, ids in new.items() if page.host is not None]

    def take_dropped(self) -> list[int]:
        """Keys of those that were copied here and are no longer wanted, since the last call."""
        keys, self._dropped = self._dropped, []
        return keys
