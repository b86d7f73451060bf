"""A cache alone, without engine, scheduler or time to compute: what is found of a workload.

Each request finds its longest prefix, reads it, fills its other blocks, and ends at once. It is to
compare retentions in seconds; what it leaves out are requests beside each other and who waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cache.prefix_cache import PrefixCache
from jaxserve.sched.cache.retention import Seconds
from jaxserve.sched.registry import make_retention
from jaxserve.simulator.workloads.shared_prefixes import BlockKeys
from jaxserve.simulator.workloads.workload import Workload

_ROW = 0  # there is one request at a time


@dataclass(frozen=True)
class Found:
    """What a cache found.

    Attributes:
        pages: Of the pool.
        found: Pages that were found.
        asked: Pages that a cache without end would have found.
        saved: Seconds that it would have taken to compute those that were found.
    """

    pages: int
    found: int
    asked: int
    saved: float


def distinct_pages(workload: Workload, block_size: int) -> int:
    """How many pages hold all that the workload's requests compute. block_size: tokens."""
    return len({key for keys, _ in _streams(workload, block_size) for key in keys})


def replayed(
    workload: Workload, retention: str, pages: int, block_size: int, seconds: Seconds | None = None
) -> Found:
    """Replays a workload.

    Args:
        workload: The requests; their arrivals are the clock.
        retention: Its name, with parameters.
        pages: Of the pool.
        block_size: Tokens of a page.
        seconds: As `Retention.seconds`; None for one second each.

    Raises:
        ValueError: There is no such retention, or a request does not fit into the pool.
    """
    cache = PrefixCache(1, make_retention(retention))
    cache.retention.seconds = seconds
    free, made, known, found, asked, saved = pages, 0, set[bytes](), 0, 0, 0.0
    tiers, arrivals = workload.terms.tier.tolist(), workload.arrival.tolist()
    for number, (keys, most) in enumerate(_streams(workload, block_size)):
        if len(keys) > pages:
            raise ValueError(f"request {number} takes {len(keys)} pages, the pool has {pages}")
        cache.retention.now = arrivals[number]
        cache.add(_ROW, keys, tier=tiers[number])
        cache.watch_row(_ROW, most)
        chain = cache.claim_hit(_ROW)
        for page in chain:
            cache.read(page, _ROW)
        found, asked = found + len(chain), asked + _common(keys[:most], known)
        if seconds is not None:
            saved += float(seconds(np.arange(len(chain))).sum())
        held = [page.ids[0] for page in chain]
        for index in range(len(chain), len(keys)):
            same = cache.page(_ROW, index)
            if same is not None:  # an answer that another has had, too
                cache.read(same, _ROW)
                held.append(same.ids[0])
                continue
            if not free:
                free += len(cache.evict(1))
            free, made = free - 1, made + 1
            held.append(cache.register(_ROW, index, (made,)).ids[0])
        known.update(keys)
        cache.remove(_ROW)
        cache.release_readers(held)
    return Found(pages, found, asked, saved)


def _streams(workload: Workload, block_size: int) -> Iterator[tuple[list[bytes], int]]:
    """Of each request: the keys of the blocks that it computes, all but its last token, and how
    many of them it may find."""
    keys, total = BlockKeys(workload, block_size), workload.lengths.total.tolist()
    for number, prompt in enumerate(workload.prompt_len.tolist()):
        ids = keys.of(number, total[number] - 1)
        yield [one.to_bytes(8, "big") for one in ids.tolist()], (prompt - 1) // block_size


def _common(keys: list[bytes], known: set[bytes]) -> int:
    return next((i for i, key in enumerate(keys) if key not in known), len(keys))
