"""Which of the known pages that nobody reads goes first when room is wanted.

A page goes only when none behind it is left, so prompts shrink from their ends. Which tenant loses
one is decided before, in `page_shares.py`.
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
# Seconds that it takes to compute each page again, float64 [n], by how many come before it, [n].
Seconds = Callable[[np.ndarray], np.ndarray]


class Reader:
    """A request, as whoever fills or reads pages.

    Attributes:
        tier: Its tier.
        prompt_pages: Full blocks of its prompt.
        tenant: Whose it is.
    """

    __slots__ = ("prompt_pages", "tenant", "tier")

    def __init__(self, tier: Tier | int, prompt_pages: int, tenant: int = 0) -> None:
        self.tier, self.prompt_pages, self.tenant = int(tier), prompt_pages, tenant


class Retention:
    """Retention `lru`, as vLLM has it: what was read last stays longest, the beginnings of prompts
    longer than their ends. Others derive from it, and are told what becomes of pages.

    Attributes:
        now: Seconds, at the last plan.
        seconds: What a page saves. None where nothing is known of it.
        hopeless: Rows that are given up: they will not meet their targets (`Outlook`).
    """

    now: float = 0.0
    seconds: Seconds | None = None
    hopeless: AbstractSet[int] = frozenset()

    def first(self, unread: dict[Page, None]) -> Page:
        """The page to go. unread: those of one tenant that nobody reads, at least one; who became
        so first comes first, and no page before those of the tenant behind it."""
        return next(iter(unread))

    def made(self, page: Page, by: Reader) -> None:
        """The page is known from now on; somebody has filled it."""

    def hit(self, page: Page, by: Reader) -> None:
        """Somebody has found the page, and reads it."""

    def stay(self, page: Page) -> None:
        """Nobody reads the page any more."""

    def bare(self, page: Page) -> None:
        """Nobody reads the page, and none behind it is left any more."""

    def leave(self, page: Page) -> None:
        """Nobody read the page. Now somebody does, or it is forgotten."""

    def gone(self, page: Page, *, evicted: bool) -> None:
        """The page is forgotten. evicted: to make room for others; else because it is no more what
        it was."""
