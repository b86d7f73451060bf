"""Requests that read others' blocks, without keys by which they would have found them."""

from __future__ import annotations

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.pages import Page
from jaxserve.sched.cache.prefix_cache import PrefixCache


def lend(pool: BlockPool, source: int, row: int, blocks: int) -> None:
    """`row`, which must be empty, reads the first full blocks of `source`, of whatever kind."""
    if pool.cache is None:
        pool.cache = PrefixCache(len(pool.held))
    if not pool.cache.knows(row):
        pool.cache.add(row, ())
    pages, page, kind = list[Page](), None, int(pool.kind[source])
    for ids in pool.blocks_of(source)[:, :blocks].T.tolist():
        pages.append(page := Page(b"", tuple(ids), page, kind))
    pool.share(row, pages, int(pool.direction[source]))
