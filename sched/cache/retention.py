"""Which of the known pages that nobody reads is evicted first when room is needed.

A page is evicted only after all pages behind it, so prompts shrink from their ends. Which tenant
loses a page is decided before, in `page_shares.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.sched.cache.pages import Page

if TYPE_CHECKING:
    from jaxserve.sched.request import Tier

LRU = "lru"
# Seconds to compute each page again, float64 [n], given the number of pages before it, [n].
Seconds = Callable[[np.ndarray], np.ndarray]


class Reader:
    """A request, as the filler or reader of pages.

    Attributes:
        tier: Its tier.
        prompt_pages: Full blocks of its prompt.
        tenant: Its tenant.
    """

    __slots__ = ("prompt_pages", "tenant", "tier")

    def __init__(self, tier: Tier | int, prompt_pages: int, tenant: int = 0) -> None:
        self.tier, self.prompt_pages, self.tenant = int(tier), prompt_pages, tenant


class Retention:
    """Retention `lru`, as in vLLM: pages read last stay longest, and the beginnings of prompts
    longer than their ends. Other policies derive from it and override the hooks on pages.

    Attributes:
        now: Time of the last plan, in seconds.
        seconds: Seconds that a page saves. None if unknown.
        hopeless: Rows that are given up, since they will miss their targets (`Outlook`).
    """

    now: float = 0.0
    seconds: Seconds | None = None
    hopeless: AbstractSet[int] = frozenset()

    def first(self, unread: dict[Page, None]) -> Page:
        """The page to evict. unread: pages of one tenant that nobody reads, at least one, in the
        order in which they became unread; a page comes after those of its tenant behind it."""
        return next(iter(unread))

    def made(self, page: Page, by: Reader) -> None:
        """A request has filled the page, which is known from now on."""

    def hit(self, page: Page, by: Reader) -> None:
        """A request has found the page, and reads it."""

    def stay(self, page: Page) -> None:
        """Nobody reads the page any more."""

    def bare(self, page: Page) -> None:
        """Nobody reads the page, and the last page behind it has gone."""

    def leave(self, page: Page) -> None:
        """The page was unread. Now it is read again, or forgotten."""

    def gone(self, page: Page, *, evicted: bool) -> None:
        """The page is forgotten. evicted: to make room for others; otherwise its content has
        changed."""
