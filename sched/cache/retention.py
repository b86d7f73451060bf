"""Which of the known pages that nobody reads is evicted first when room is needed.

A page is evicted only after all pages behind it, so prompts shrink from their ends. Which tenant
loses a page is decided before, in `page_shares.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

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
        program: Number of its program; -1 for none.
    """

    __slots__ = ("program", "prompt_pages", "tenant", "tier")

    def __init__(
        self, tier: Tier | int, prompt_pages: int, tenant: int = 0, program: int = -1
    ) -> None:
        self.tier, self.prompt_pages, self.tenant = int(tier), prompt_pages, tenant
        self.program = program


class Lives(Protocol):
    """For how long the caches of programs whose tools run are worth keeping."""

    def since(self, program: int) -> float | None:
        """Since when the program waits for a tool, in seconds; None if it does not."""
        ...

    def seconds(self, program: int, lost: float, waited: float) -> float:
        """How long to keep the cache of a program that waits for a tool.

        Args:
            program: Its number.
            lost: Seconds to get the cache back.
            waited: Mean seconds that calls wait before they start.
        """
        ...

    def is_back(self, program: int, since: float) -> bool:
        """Whether the program, which has waited since then, has sent its next call, and that one
        has not ended."""
        ...


class Retention:
    """Retention `lru`, as in vLLM: pages read last stay longest, and the beginnings of prompts
    longer than their ends. Other policies derive from it and override the hooks on pages.

    Attributes:
        now: Time of the last plan, in seconds.
        seconds: Seconds that a page saves. None if unknown.
        hopeless: Rows that are given up, since they will miss their targets (`Outlook`).
        lives: For policies that keep caches while tools run. None if unknown.
        lost: From a number of pages from the first on to the seconds to get them back, by computing
            them again or from host memory. None if unknown.
        by_program: Whether it keeps the caches of programs.
    """

    by_program: bool = False
    now: float = 0.0
    lives: Lives | None = None
    lost: Callable[[int], float] | None = None
    seconds: Seconds | None = None
    hopeless: AbstractSet[int] = frozenset()

    @property
    def kept(self) -> int:
        """Blocks of unread pages that do not count as free."""
        return 0

    def look(self, now: float, running: int) -> bool:
        """A plan is about to be made. Returns whether `keeps` may answer otherwise than before.

        Args:
            now: Seconds.
            running: Requests that hold caches.
        """
        self.now = now
        return False

    def keeps(self, page: Page) -> bool:
        """Whether the page is unread, and does not count as free."""
        return False

    def started(self, waited: float) -> None:
        """A request has started, after so many seconds."""

    def waits(self, program: int) -> None:
        """It has become known that the program, whose pages nobody reads, waits for a tool."""

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
