"""Retention by worth: the seconds that a page is expected to save per second that it stays.

When pages are asked for again is learned from this traffic: for every class of pages and every age,
the share of pages that were asked for at that age among those that had not been before. The keys of
evicted pages are remembered for about one turnover of the cache, so hits that early eviction has
missed are counted, too. A page's worth is that of the best time to keep it: the chance that it is
asked for in that time, divided by the mean time that it then stays (Gittins' index), times the
seconds to compute it again, times the weight of its tier.

In a class, worth may rise with age and then fall, so the oldest and the youngest page are compared.
If room is short, the newest page may thus be evicted first: if every page were kept for only as
long as there is room for all, none would be left when it is asked for.

Since what was learned may mislead, the order of `lru` is tracked beside it, by key. What either
would have saved is thus known exactly, and `lru` decides while this policy has lost too much
against it.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cache.pages import Page
from jaxserve.sched.cache.retention import Reader, Retention
from jaxserve.sched.request import Tier

_TICK = 0.1  # seconds; shorter ages are not distinguished
_OCTAVE = 2  # ages that are distinguished between an age and its double
_AGES = 44  # the last one is several days
_EDGES = _TICK * (2.0 ** (np.arange(_AGES + 1) / _OCTAVE) - 1)
_HITS, _TURNS = 3, 4  # the last of each means "or more"
_LOST = len(Tier) * 2 * _HITS * _TURNS  # class of pages that only hopeless rows wait for
_FOUND = _LOST + 1  # first of the classes of pages that other rows wait for, by tier
_CLASSES = _FOUND + len(Tier)
_LOG_UNIFORM = 0.02  # prior chance to be asked for at each age
_WAITED_FOR = 0.3  # prior chance if a waiting row has found the page
_LOSS = 0.01  # share of what `lru` saves that may be lost
_LEAST = 256  # least pages per update of the statistics


@dataclass(eq=False)
class Worth(Retention):
    """See the module's docstring.

    Attributes:
        best_effort: Weight of a second saved for best-effort requests; real-time requests weigh 1.
        memory: Share of the old statistics that is kept after one turnover of all pages; at least 0
        and below 1.
        doubt: Weight of the mean of all classes in the statistics of one class, as a share of the
        pool's pages; at least 0.
        risk: What may be lost against `lru` before it decides, beside a hundredth of what it saves:
        the time to compute this share of the pool's pages; at least 0.

    Raises:
        ValueError: A parameter is out of its range.
    """

    best_effort: float = 0.25
    memory: float = 0.85
    doubt: float = 0.05
    risk: float = 0.1

    def __post_init__(self) -> None:
        if not self.best_effort > 0:
            raise ValueError(f"best_effort must be above 0, got {self.best_effort}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory must be at least 0 and below 1, got {self.memory}")
        for name in ("doubt", "risk"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        self._hits, self._ends = np.zeros((2, _CLASSES, _AGES))
        self._known = self._seen = self._stamp = 0  # pages; ended stays since the last table
        self._gone: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # class, last read
        self._queues: dict[int, list[_Queue]] = {}  # by tenant, by class
        # By tenant and class, the page that is worth least.
        self._best: dict[tuple[int, int], tuple[float, Page | None]] = {}
        self._at = -math.inf  # the time for which `_best` is valid
        self._prices: list[float] = [1.0]  # by depth
        self._recent: OrderedDict[bytes, None] = OrderedDict()  # keys that `lru` would have
        self._lead = 0.0  # seconds saved beyond those of `lru`, less a margin
        self._learn()

    # Hooks on pages.

    def made(self, page: Page, by: Reader) -> None:
        """See `Retention`. A page that comes back from host memory counts as lost, too: it is not
        computed again, but has to be copied."""
        self._known += 1
        page.note = _Note(page, by)
        gone = self._gone.pop(page.key, None)
        if gone is not None:
            self._end(self._hits, *gone)
        self._asked_for(page, by, found=False)

    def hit(self, page: Page, by: Reader) -> None:
        """See `Retention`."""
        note: _Note = page.note
        self._asked_for(page, by, found=True)
        note.tier = min(note.tier, by.tier)
        if note.maker is not by:  # otherwise the maker was preempted and reads it again
            note.hits += 1
            if note.left:
                self._end(self._hits, note.group, note.last)
        note.left = False

    def stay(self, page: Page) -> None:
        """See `Retention`."""
        self._touch(page)
        self._begin(page)

    def _begin(self, page: Page) -> None:
        """Starts the page's stay as an unread page."""
        note: _Note = page.note
        self._stamp += 1
        note.last, note.stamp, note.left = self.now, self._stamp, False
        turn, hits = min(note.turn, _TURNS - 1), min(note.hits, _HITS - 1)
        group = ((note.tier * 2 + note.answer) * _HITS + hits) * _TURNS + turn
        note.group = self._wanted(page, group)
        if page.is_bare:
            self.bare(page)

    def bare(self, page: Page) -> None:
        """See `Retention`."""
        group = page.note.group
        if page.tenant not in self._queues:
            self._queues[page.tenant] = [_Queue() for _ in range(_CLASSES)]
        self._queues[page.tenant][group].add(page)
        self._best.pop((page.tenant, group), None)

    def leave(self, page: Page) -> None:
        """See `Retention`."""
        note: _Note = page.note
        note.left = True
        if page.tenant in self._queues:
            self._queues[page.tenant][note.group].pages.pop(page, None)
            self._best.pop((page.tenant, note.group), None)

    def gone(self, page: Page, *, evicted: bool) -> None:
        """See `Retention`."""
        self._known -= 1
        if not evicted:
            self._recent.pop(page.key, None)
            return
        self._gone[page.key] = page.note.group, page.note.last
        if len(self._gone) > max(self._known, _LEAST):
            _, gone = self._gone.popitem(last=False)
            self._end(self._ends, *gone)

    def _end(self, where: np.ndarray, group: int, last: float) -> None:
        """Counts a stay that has ended at this age."""
        where[group, _age(self.now - last)] += 1
        self._seen += 1
        if self._seen >= max(_LEAST, self._known // 5):
            share = self._seen / max(self._known, _LEAST)
            self._learn()
            self._hits *= self.memory**share
            self._ends *= self.memory**share

    # Eviction.

    def first(self, unread: dict[Page, None]) -> Page:
        """See `Retention`."""
        if self._lead < -self._stake():
            return super().first(unread)
        if self._at != self.now:
            self._best.clear()
            self._at = self.now
        least, found, tenant = math.inf, None, next(iter(unread)).tenant
        queues = self._queues.get(tenant, [])
        for group, queue in enumerate(queues):
            if queue.pages:
                best = self._best.get((tenant, group))
                if best is None:
                    best = self._best[tenant, group] = self._least(group, queue)
                if best[0] < least:
                    least, found = best
        if found is not None:
            return found
        some = any(queue.pages for queue in queues)
        return self.first(unread) if some else super().first(unread)

    def _asked_for(self, page: Page, by: Reader, *, found: bool) -> None:
        """Compares with `lru` what finding the page, or not finding it, saves."""
        gain = found - (1 - _LOSS) * (page.key in self._recent)
        if gain:
            self._lead = min(self._lead + gain * self._saves(page, by.tier), self._stake())
        self._touch(page)

    def _stake(self) -> float:
        """Seconds that may be lost against `lru` before it decides."""
        return self.risk * self._known * self._prices[0]

    def _touch(self, page: Page) -> None:
        """Moves the page to the end of `lru`'s order."""
        recent = self._recent
        recent[page.key] = None
        recent.move_to_end(page.key)
        while len(recent) > self._known:
            recent.popitem(last=False)

    def _wanted(self, page: Page, group: int) -> int:
        """The page's class by the rows that wait for it; `group` if none does."""
        if not page.finders:
            return group
        return _LOST if page.finders <= self.hopeless else _FOUND + int(page.note.tier)

    def _least(self, group: int, queue: _Queue) -> tuple[float, Page | None]:
        """The page of a class that is worth least: its oldest or its youngest."""
        ends: list[Page] = []
        while len(ends) < 2 and queue.pages:
            page = queue.end(young=bool(ends))
            # A row may have come that waits for the page, or have been given up, or have left.
            new = self._wanted(page, min(group, _LOST - 1))
            if new == group:
                ends.append(page)
                continue
            del queue.pages[page]  # it starts again in another class
            self._end(self._hits if new > group else self._ends, group, page.note.last)
            self._begin(page)
        worth = [(self._worth(group, page), page) for page in ends if page in queue.pages]
        return min(worth, key=lambda one: one[0], default=(math.inf, None))

    def _worth(self, group: int, page: Page) -> float:
        tier = Tier.BEST_EFFORT if group == _LOST else page.note.tier
        return self._index[group][_age(self.now - page.note.last)] * self._saves(page, tier)

    def _saves(self, page: Page, tier: int) -> float:
        """Seconds that finding the page saves, times the weight of the tier."""
        if page.depth >= len(self._prices):
            self._price(2 * page.depth + 1)
        return self._prices[page.depth] * (1.0 if tier == Tier.REALTIME else self.best_effort)

    def _price(self, depths: int) -> None:
        each = np.arange(depths)
        self._prices = (np.ones(depths) if self.seconds is None else self.seconds(each)).tolist()

    def _learn(self) -> None:
        """Computes the expected worth per second of a page, by class and age."""
        self._seen = 0
        self._price(len(self._prices))
        self._best.clear()
        doubt = max(1.0, self.doubt * self._known)
        ends = self._hits + self._ends
        reached = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]  # stays that lasted at least this long
        usual = (self._hits.sum(0) + doubt * _LOG_UNIFORM) / (reached.sum(0) + doubt)
        usual = np.tile(usual, (_CLASSES, 1))
        usual[_FOUND:] = np.maximum(usual[_FOUND:], _WAITED_FOR)
        chance = np.minimum((self._hits + doubt * usual) / (reached + doubt), 0.999)
        left = np.cumprod(np.hstack([np.ones((_CLASSES, 1)), 1 - chance]), axis=1)
        stay = (left[:, :-1] + left[:, 1:]) / 2 * np.diff(_EDGES)
        best = [
            ((left[:, [age]] - left[:, age + 1 :]) / np.cumsum(stay[:, age:], axis=1)).max(axis=1)
            for age in range(_AGES)
        ]
        self._index: list[list[float]] = np.stack(best, axis=1).tolist()


class _Note:
    """What is known of a page's use.

    Attributes:
        maker: The request that filled it.
        answer: Whether it is part of an answer, which only the same conversation asks for again.
        turn: Number of requests that have filled the pages before it, one after the other.
        hits: How often other requests have found it.
        tier: Real-time if any of its readers was.
        last: When it was last read, in seconds.
        left: Whether it had been unread until now.
        group: Its class when it was last read.
        stamp: Changes each time the page becomes unread.
    """

    __slots__ = ("answer", "group", "hits", "last", "left", "maker", "stamp", "tier", "turn")

    def __init__(self, page: Page, by: Reader) -> None:
        self.maker, self.tier, self.hits = by, by.tier, 0
        self.answer = page.depth >= by.prompt_pages
        self.turn = 0
        if page.before is not None:
            before: _Note = page.before.note
            self.turn = before.turn + (before.maker is not by)
        self.group, self.last, self.left, self.stamp = 0, 0.0, False, 0


class _Queue:
    """Evictable pages of a class, by the time of their last read. Of pages read last at the same
    time, the deepest comes first at both ends."""

    def __init__(self) -> None:
        self.pages: dict[Page, None] = {}
        # Pages that have left are still in the heaps: (last read or its negative, order, page).
        self._old: list[tuple[float, int, int, Page]] = []
        self._young: list[tuple[float, int, int, Page]] = []

    def add(self, page: Page) -> None:
        """The page may go."""
        self.pages[page] = None
        if len(self._old) + len(self._young) > 4 * len(self.pages) + _LEAST:
            self._old = [_entry(each, 1) for each in self.pages]
            self._young = [_entry(each, -1) for each in self.pages]
            heapq.heapify(self._old)
            heapq.heapify(self._young)
        else:
            heapq.heappush(self._old, _entry(page, 1))
            heapq.heappush(self._young, _entry(page, -1))

    def end(self, *, young: bool) -> Page:
        """The page that was read last (young) or first; there must be some."""
        heap = self._young if young else self._old
        while heap[0][3] not in self.pages or heap[0][3].note.stamp != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3]


def _entry(page: Page, sign: int) -> tuple[float, int, int, Page]:
    note: _Note = page.note
    return sign * note.last, -page.depth, note.stamp, page


def _age(seconds: float) -> int:
    """Index of the age in the table."""
    return min(_AGES - 1, int(_OCTAVE * math.log2(1 + max(seconds, 0.0) / _TICK)))
