"""Retention `ttl`: the cache of a program whose tool runs is kept for a time to live (Continuum,
arXiv 2511.02230); otherwise as `lru`.

The time is chosen when the program's last call ends (`Lives.seconds`). Until it is over, the cache
does not count as free, so nothing starts in its place. If the next call comes in time, the cache is
kept until that call starts. While fewer than two requests hold caches, kept ones count as free,
since otherwise nothing else might be able to run.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from jaxserve.sched.cache.pages import Page
from jaxserve.sched.cache.retention import Reader, Retention

_MEMORY = 0.99  # weight of the earlier waits for each new one


class Ttl(Retention):
    """See the module's docstring. Without `lives` it is `lru`."""

    by_program = True

    def __init__(self) -> None:
        self._pins: dict[int, _Pin] = {}  # by program; only those whose caches are kept
        self._due: list[tuple[float, int, float]] = []  # heap: end, program, since
        self._back: set[int] = set()  # programs whose next call has come after its time, and waits
        self._loose: dict[int, OrderedDict[Page, None]] = {}  # by tenant: unread pages, not kept
        self._worthless = (-1, 0.0)  # the program that was last asked about in vain, and since when
        self._ended: dict[int, dict[Page, None]] = {}  # loose ones by program, the last ones first
        self._blocks, self._busy, self._changed = 0, False, False
        self._waited = self._weight = 0.0

    @property
    def kept(self) -> int:
        """See `Retention`."""
        return self._blocks if self._busy else 0

    def look(self, now: float, running: int) -> bool:
        """See `Retention`."""
        self.now = now
        while self._due and self._due[0][0] <= now:
            _, program, since = heapq.heappop(self._due)
            pin = self._pins.get(program)
            if pin is not None and pin.since == since:
                self._back.add(program)
        for program in [*self._back]:
            pin = self._pins.get(program)
            if pin is None or self.lives is None or not self.lives.is_back(program, pin.since):
                self._back.discard(program)
                self._let_go(program)
        busy, changed = running > 1, self._changed
        changed |= busy != self._busy and self._blocks > 0
        self._busy, self._changed = busy, False
        return changed

    def keeps(self, page: Page) -> bool:
        """See `Retention`."""
        return self._busy and page.note.pin is not None

    def started(self, waited: float) -> None:
        """See `Retention`. The mean of the waits is of some hundred requests."""
        self._weight = 1 + _MEMORY * self._weight
        self._waited += (waited - self._waited) / self._weight

    def waits(self, program: int) -> None:
        """See `Retention`. Answers are read for tools after they have ended."""
        self._worthless = (-1, 0.0)
        for page in [*self._ended.get(program, ())]:
            self.leave(page)
            self.stay(page)

    def made(self, page: Page, by: Reader) -> None:
        """See `Retention`."""
        page.note = _Note(by.program)

    def hit(self, page: Page, by: Reader) -> None:
        """See `Retention`."""
        page.note.program = by.program

    def stay(self, page: Page) -> None:
        """See `Retention`."""
        pin = self._pin_of(page)
        if pin is None:
            self._list(page)
            return
        page.note.pin, pin.pages[page] = pin, None
        self._blocks += len(page.ids)
        self._changed = True

    def leave(self, page: Page) -> None:
        """See `Retention`."""
        note: _Note = page.note
        if note.loose is not None:
            note.loose.pop(page)
            note.loose = None
            mine = self._ended[note.listed]
            del mine[page]
            if not mine:
                del self._ended[note.listed]
        if note.pin is None:
            return
        del note.pin.pages[page]
        if not note.pin.pages and self._pins.get(note.pin.program) is note.pin:
            del self._pins[note.pin.program]
        note.pin, self._blocks, self._changed = None, self._blocks - len(page.ids), True

    def first(self, unread: dict[Page, None]) -> Page:
        """See `Retention`. Kept pages come last, and with them those in front of them."""
        oldest = next(iter(unread))
        if self._blocks:
            for page in self._loose.get(oldest.tenant, ()):
                if page in unread and not any(after in unread for after in page.after):
                    return page
        return oldest

    def _pin_of(self, page: Page) -> _Pin | None:
        """The pin of the page's program; None if its cache is not kept. The pages of a request come
        in order, the last one first."""
        number = page.note.program
        since = None if self.lives is None or number < 0 else self.lives.since(number)
        if since is None or self.lives is None or self._worthless == (number, since):
            return None
        pin = self._pins.get(number)
        if pin is not None and pin.since == since:
            return pin
        self._let_go(number)
        lost = 0.0 if self.lost is None else self.lost(page.depth + 1)
        end = since + self.lives.seconds(number, lost, self._waited)
        if end <= self.now:
            self._worthless = number, since
            return None
        pin = self._pins[number] = _Pin(number, since)
        heapq.heappush(self._due, (end, number, since))
        return pin

    def _let_go(self, program: int) -> None:
        """Keeps the program's cache no longer. Its pages are the next to go."""
        pin = self._pins.pop(program, None)
        if pin is None:
            return
        self._changed = True
        for page in reversed(pin.pages):
            page.note.pin, self._blocks = None, self._blocks - len(page.ids)
            self._list(page).move_to_end(page, last=False)

    def _list(self, page: Page) -> OrderedDict[Page, None]:
        """Lists a page that is not kept. Returns the list."""
        loose, note = self._loose.setdefault(page.tenant, OrderedDict()), page.note
        loose[page], note.loose, note.listed = None, loose, note.program
        self._ended.setdefault(note.program, {})[page] = None
        return loose


class _Pin:
    """The kept cache of a program.

    Attributes:
        program: Its number.
        since: When its last call ended.
        pages: Its unread pages, the last ones first.
    """

    __slots__ = ("pages", "program", "since")

    def __init__(self, program: int, since: float) -> None:
        self.program, self.since = program, since
        self.pages: dict[Page, None] = {}


class _Note:
    """What is known of a page.

    Attributes:
        program: Program of its last reader; -1 for none.
        pin: What keeps it; None for nothing.
        loose: Where it is listed; None if it is not.
        listed: The program under which it is listed there.
    """

    __slots__ = ("listed", "loose", "pin", "program")

    def __init__(self, program: int) -> None:
        self.program = self.listed = program
        self.pin: _Pin | None = None
        self.loose: OrderedDict[Page, None] | None = None
