"""Retention by worth: the seconds that a page is expected to save for each second that it stays.

When pages are asked for again is learned from this traffic: of every class of pages, how many of
those that had not been asked for by some age were then. Pages that have gone are remembered by
their keys for as long as about as many others take to go, so that what a class that goes early
would have brought is seen, too. A page's worth is that of the best time to keep it: the chance that
it is asked for in that time, by the mean of the time that it then stays (Gittins' index), times the
seconds that it takes to compute it again, times the weight of its tier.

In a class, worth may rise with age and then fall, so its oldest and its youngest page are looked
at. Who has only just come may thus go first, where room is short: if everybody were kept for as
long as there is room for all, nobody would be there when it is asked for.

What was learned may mislead, so `lru`'s order is kept beside it, by key: what both would have saved
is known exactly, and `lru` decides while the other has lost too much by comparison.
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

_TICK = 0.1  # seconds; ages below it are alike
_OCTAVE = 2  # ages that are told apart between one and its double
_AGES = 44  # the last is some days
_EDGES = _TICK * (2.0 ** (np.arange(_AGES + 1) / _OCTAVE) - 1)
_HITS, _TURNS = 3, 4  # the last of each stands for more
_LOST = len(Tier) * 2 * _HITS * _TURNS  # class of pages that only those who are given up wait for
_FOUND = _LOST + 1  # the first class of those that others wait for, by tier
_CLASSES = _FOUND + len(Tier)
_LOG_UNIFORM = 0.02  # chance to be asked for at each age, until something is known
_WAITED_FOR = 0.3  # the same of pages that who waits has found
_LOSS = 0.01  # of what `lru` saves, that may be lost
_LEAST = 256  # pages, of which things are learned at a time


@dataclass(eq=False)
class Worth(Retention):
    """See the module.

    Attributes:
        best_effort: Weight of a second that is saved for best-effort requests; a real-time one
            weighs 1.
        memory: How much of what was seen counts yet once all pages have gone once more; at least 0
            and below 1.
        doubt: Pages of the pool, as a share, for which a class counts as all others do; at least 0.
        risk: What may be lost against `lru` before it decides, beside a hundredth of what it saves:
            the computing of so many pages, as a share of the pool; at least 0.

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
        self._known = self._seen = self._stamp = 0  # pages; ends of stays since the last table
        self._gone: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # class, last read
        self._queues: dict[int, list[_Queue]] = {}  # by tenant, by class
        # By tenant and class, what is worth least.
        self._best: dict[tuple[int, int], tuple[float, Page | None]] = {}
        self._at = -math.inf  # the time for which that is so
        self._prices: list[float] = [1.0]  # by depth
        self._recent: OrderedDict[bytes, None] = OrderedDict()  # what `lru` would have
        self._lead = 0.0  # seconds saved that `lru` would not have saved, and a little more
        self._learn()

    # What becomes of pages.

    def made(self, page: Page, by: Reader) -> None:
        """See `Retention`. What comes back from host memory, too, is not computed, but has to be
        copied: it counts as lost."""
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
        if note.maker is not by:  # else it was preempted
            note.hits += 1
            if note.left:
                self._end(self._hits, note.group, note.last)
        note.left = False

    def stay(self, page: Page) -> None:
        """See `Retention`."""
        self._touch(page)
        self._begin(page)

    def _begin(self, page: Page) -> None:
        """From now on the page may be asked for again."""
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
        """A stay has ended, at this age."""
        where[group, _age(self.now - last)] += 1
        self._seen += 1
        if self._seen >= max(_LEAST, self._known // 5):
            share = self._seen / max(self._known, _LEAST)
            self._learn()
            self._hits *= self.memory**share
            self._ends *= self.memory**share

    # Who goes.

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
        """Somebody asks for the page: does that save more than with `lru`?"""
        gain = found - (1 - _LOSS) * (page.key in self._recent)
        if gain:
            self._lead = min(self._lead + gain * self._saves(page, by.tier), self._stake())
        self._touch(page)

    def _stake(self) -> float:
        """Seconds that may be lost against `lru` before it decides."""
        return self.risk * self._known * self._prices[0]

    def _touch(self, page: Page) -> None:
        """The page is read: with `lru` it would be the last to go."""
        recent = self._recent
        recent[page.key] = None
        recent.move_to_end(page.key)
        while len(recent) > self._known:
            recent.popitem(last=False)

    def _wanted(self, page: Page, group: int) -> int:
        """The page's class by who waits for it; this one if nobody does."""
        if not page.finders:
            return group
        return _LOST if page.finders <= self.hopeless else _FOUND + int(page.note.tier)

    def _least(self, group: int, queue: _Queue) -> tuple[float, Page | None]:
        """The page that is worth least of a class, by its ends."""
        ends: list[Page] = []
        while len(ends) < 2 and queue.pages:
            page = queue.end(young=bool(ends))
            # Has somebody come who waits for it, or been given up, or left?
            new = self._wanted(page, min(group, _LOST - 1))
            if new == group:
                ends.append(page)
                continue
            del queue.pages[page]  # it begins anew, elsewhere
            self._end(self._hits if new > group else self._ends, group, page.note.last)
            self._begin(page)
        worth = [(self._worth(group, page), page) for page in ends if page in queue.pages]
        return min(worth, key=lambda one: one[0], default=(math.inf, None))

    def _worth(self, group: int, page: Page) -> float:
        tier = Tier.BEST_EFFORT if group == _LOST else page.note.tier
        return self._index[group][_age(self.now - page.note.last)] * self._saves(page, tier)

    def _saves(self, page: Page, tier: int) -> float:
        """Seconds that finding the page saves, by what they are worth to a tier."""
        if page.depth >= len(self._prices):
            self._price(2 * page.depth + 1)
        return self._prices[page.depth] * (1.0 if tier == Tier.REALTIME else self.best_effort)

    def _price(self, depths: int) -> None:
        each = np.arange(depths)
        self._prices = (np.ones(depths) if self.seconds is None else self.seconds(each)).tolist()

    def _learn(self) -> None:
        """Makes the table of how soon pages are asked for, a second, by class and age."""
        self._seen = 0
        self._price(len(self._prices))
        self._best.clear()
        doubt = max(1.0, self.doubt * self._known)
        ends = self._hits + self._ends
        reached = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]  # stays that lasted so long
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
    """What is known of a page.

    Attributes:
        maker: Who filled it.
        answer: Whether it is of an answer, which only who goes on with it asks for.
        turn: How many requests, one after the other, have filled what comes before it.
        hits: How often others have found it.
        tier: Real-time if any request was that has read it.
        last: When it was last read, seconds.
        left: Whether it had been unread until now.
        group: Its class when it was last read.
        stamp: Different each time that it is read no more.
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
    """Pages of a class that may go, by when they were last read; of those that ended together the
    deepest is the first to go at both ends."""

    def __init__(self) -> None:
        self.pages: dict[Page, None] = {}
        # Those that have left are still in the heaps: (last read or its negative, order, page).
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
        """The page that was read last, or first; there must be some."""
        heap = self._young if young else self._old
        while heap[0][3] not in self.pages or heap[0][3].note.stamp != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3]


def _entry(page: Page, sign: int) -> tuple[float, int, int, Page]:
    note: _Note = page.note
    return sign * note.last, -page.depth, note.stamp, page


def _age(seconds: float) -> int:
    """Index of an age."""
    return min(_AGES - 1, int(_OCTAVE * math.log2(1 + max(seconds, 0.0) / _TICK)))
