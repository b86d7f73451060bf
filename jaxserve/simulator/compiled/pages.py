"""The prefix cache in the compiled simulation: `sched/cache/prefix_cache.py`, and its use by
`BlockPool`.

All keys are known before a run, so a page is a number (`BlockKeys`), or 0 for the head of a list.
Unified policies take away the whole cache or none of it. So the blocks of a running request begin
with pages, as far as their tokens are known, and all others are its own; a request that reads a
page reads all before it; and pages that nobody reads are in order of eviction.
"""

from __future__ import annotations

import numpy as np

from jaxserve.simulator.compiled.blocks import PLANES
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.state import Machine


@kernel
def _owner(m: Machine, number: int, index: int) -> int:
    """The first request with this block of the request: itself, or the one whose prefix it
    shares."""
    while index < m.requests[number].common:
        number = m.requests[number].parent
    return number


@kernel
def _page(m: Machine, number: int, index: int) -> int:
    return m.requests[_owner(m, number, index)].base + index


@kernel
def find(m: Machine, settings: np.record, number: int) -> None:
    """Counts the pages that a waiting request would find.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        number: The request.
    """
    r = m.requests[number]
    most = (r.prompt_len + r.generated - 1) // settings.block_size
    while r.found > 0 and not m.pages[_page(m, number, r.found - 1)].known:
        r.found -= 1
    while r.found < most and m.pages[_page(m, number, r.found)].known:
        r.found += 1
    if r.found > 0:
        m.pages[_page(m, number, r.found - 1)].watched = True
    if r.found < most:
        m.pages[_page(m, number, r.found)].watched = True


@kernel
def several(m: Machine, number: int, count: int) -> int:
    """How many of the request's first `count` pages have several readers; these come first."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if m.pages[_page(m, number, middle)].refs > 1:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def private(m: Machine, number: int) -> int:
    """Blocks that only this request holds."""
    r = m.requests[number]
    return (r.held - several(m, number, r.pages)) * PLANES


@kernel
def pin(m: Machine, settings: np.record, number: int) -> None:
    """A waiting request starts, and reads the pages that it finds.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        number: The request.
    """
    r, owner = m.requests[number], number
    if r.preemptions == 0:
        r.hit = min(r.found * settings.block_size, r.prompt_len)
    for index in range(r.found - 1, -1, -1):
        owner = _owner(m, owner, index)
        _read(m, m.requests[owner].base + index)
    r.held = r.pages = r.found
    r.found = r.read = 0


@kernel
def release(m: Machine, number: int) -> None:
    """Releases all blocks of a request. Pages stay until their room is needed, the last is evicted
    first."""
    me, r, owner = m.me[0], m.requests[number], number
    me.free += (r.held - r.pages) * PLANES
    for index in range(r.pages - 1, -1, -1):
        owner = _owner(m, owner, index)
        number = m.requests[owner].base + index
        page = m.pages[number]
        page.refs -= 1
        if page.refs == 1:
            me.shared -= PLANES
        elif page.refs == 0:
            head = m.pages[0]
            page.before, page.after = head.before, 0
            m.pages[head.before].after = number
            head.before = number
            me.unread += PLANES
            me.free += PLANES
    r.held = r.pages = 0


@kernel
def register(m: Machine, settings: np.record, number: int, swap: bool) -> None:
    """Registers a running request's full blocks as pages, as far as their tokens are known.

    Args:
        m: The replica.
        settings: A record of SETTINGS.
        number: The request.
        swap: Whether it gives a block back if another one has the same content. Not before the step
            that fills it has been launched; the rest then has to wait, too.
    """
    me, r = m.me[0], m.requests[number]
    full = min(r.computed, r.prompt_len + r.received) // settings.block_size
    while r.pages < full:
        at = _page(m, number, r.pages)
        page = m.pages[at]
        if not page.known:
            page.known, page.refs = True, 1
            _tell(me, page)
        elif swap:
            _read(m, at)
            me.free += PLANES
        else:
            return
        r.pages += 1


@kernel
def evict(m: Machine, blocks: int) -> None:
    """Evicts pages that nobody reads, the least recently read first, until this many more blocks
    are free."""
    me = m.me[0]
    while blocks > 0:
        page = m.pages[m.pages[0].after]
        _leave_list(m, page)
        page.known = False
        _tell(me, page)
        blocks -= PLANES


@kernel
def _read(m: Machine, number: int) -> None:
    page = m.pages[number]
    if page.refs == 0:
        _leave_list(m, page)
        m.me[0].free -= PLANES
    elif page.refs == 1:
        m.me[0].shared += PLANES
    page.refs += 1


@kernel
def _leave_list(m: Machine, page: np.record) -> None:
    m.pages[page.before].after = page.after
    m.pages[page.after].before = page.before
    m.me[0].unread -= PLANES


@kernel
def _tell(me: np.record, page: np.record) -> None:
    """The page comes or goes: waiting requests may find more, or less."""
    if page.watched:
        me.moved, page.watched = True, False
