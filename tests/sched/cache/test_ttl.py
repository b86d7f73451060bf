"""Retention `ttl`: caches of programs whose tools run are kept for their time, and no longer."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.request import Program
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from tests.sched.driver import Drive

SIZE, PAGES = 4, 8
TOKENS = SIZE * PAGES
# A page is a sixteenth of a step of a second, so 8 pages are worth half a second, and a tool of
# 0.25 s.
SECOND = LinearCostModel(Coefficients(1e-9, 1.0, 0, 0, 0, 0, 0, 0, 0), 1)
TOOL, TTL = "ls", 0.25


def keys(name: str, count: int = PAGES) -> tuple[bytes, ...]:
    return tuple(f"{name}{index}".encode() for index in range(count))


def call(drive: Drive, name: str, now: float, output: int = 2, more: int = 0) -> int:
    """A call of the program, with the same prompt each time. more: further tokens."""
    program = Program(name, expected_calls=1)
    return drive.add(TOKENS + 1 + more, output, arrival=now, keys=keys(name), program=program)


def begun(policy: str, blocks: int) -> Drive:
    kept = {"retention": "ttl", "prefix_caching": True}
    return Drive(policy, blocks=blocks, max_model_len=256, cost_model=SECOND, **kept)


def with_a_tool(
    blocks: int = 64, policy: str = "continuum", *, later: bool = False
) -> tuple[Drive, int]:
    """A drive whose program `a` waits for a tool since 1.0, while two requests run. Its free blocks
    when nothing is kept."""
    drive = begun(policy, blocks)
    for _ in range(8):
        drive.scheduler.programs.tool_times.add("", TOOL, TTL)
    row = call(drive, "a", 0.0)
    if not later:
        drive.scheduler.programs.note_tools("r0", {"id": TOOL})
    drive.add(1, 60, arrival=0.0)
    drive.add(1, 60, arrival=0.0)
    drive.step(1.0)
    drive.step(1.0)
    assert drive.ended == [row]
    if later:
        assert look(drive, 1.0) == blocks - 2 * 2
        drive.scheduler.programs.note_tools("r0", {"id": TOOL})
    return drive, blocks - 2 * 2


def look(drive: Drive, now: float) -> int:
    """Free blocks as the next plan sees them."""
    drive.scheduler.plan(now)
    return drive.pool.num_free


@pytest.mark.parametrize("later", [False, True])
def test_a_cache_does_not_count_as_free_until_its_time_is_over(later: bool) -> None:
    """later: whether its answer is read for tools after it has ended."""
    drive, free = with_a_tool(later=later)
    assert look(drive, 1.1) == free - 2 * PAGES
    assert look(drive, 1.24) == free - 2 * PAGES
    assert look(drive, 1.26) == free


@pytest.mark.parametrize("tool", ["", "make"])
def test_without_a_tool_or_if_it_takes_too_long_nothing_is_kept(tool: str) -> None:
    drive = begun("sarathi", 256)
    for _ in range(8):
        drive.scheduler.programs.tool_times.add("", "make", 60.0)
    call(drive, "a", 0.0)
    drive.scheduler.programs.note_tools("r0", {"id": tool} if tool else {})
    drive.add(1, 60)
    drive.add(1, 60)
    drive.step(1.0)
    drive.step(1.0)
    assert drive.ended and look(drive, 1.0) == 256 - 2 * 2


def test_a_call_that_is_back_in_time_finds_its_cache_and_takes_no_free_blocks() -> None:
    drive, free = with_a_tool()
    row = call(drive, "a", 1.2)
    other = call(drive, "b", 1.1)
    assert look(drive, 5.0) == free - 2 * PAGES, "kept until the call starts"
    rows = np.array([row, other])
    assert drive.pool.finds_kept(rows).tolist() == [True, False]
    want = np.array([TOKENS + 1, TOKENS + 1])
    assert drive.pool.needed(rows, want, np.zeros(2, int)).tolist() == [2, 2 * (PAGES + 1)]
    assert drive.table.computed[row] == TOKENS
    policy = drive.policy
    assert isinstance(policy, UnifiedPolicy)
    assert policy.ranking(drive.scheduler.view, 5.0).waiting.tolist() == [row, other]
    plan = drive.step(5.0)
    assert plan[row] == 1 and look(drive, 5.1) <= free - 2 * (PAGES + 1)


def test_a_call_that_is_given_up_before_it_starts_keeps_nothing() -> None:
    drive, free = with_a_tool()
    drive.scheduler.finish(call(drive, "a", 1.2), complete=False, now=1.21)
    assert look(drive, 5.0) == free


def test_kept_caches_go_last_and_only_if_nothing_else_can_run() -> None:
    drive, _ = with_a_tool(blocks=40)
    big = call(drive, "b", 1.1, more=2 * SIZE)
    assert big not in drive.step(1.1), "11 of 18 blocks a plane are left, less 8 that are kept"
    for row in (1, 2):
        drive.scheduler.finish(row)
    assert look(drive, 1.2) == 40
    assert drive.step(1.2)[big] and drive.pool.cache is not None
    assert len(drive.pool.cache) >= PAGES


def test_pages_of_others_go_first_and_the_ends_of_kept_prefixes_before_their_beginnings() -> None:
    drive, _ = with_a_tool(blocks=64)
    cache = drive.pool.cache
    assert cache is not None
    look(drive, 1.1)
    call(drive, "c", 1.1)
    while len(drive.ended) < 2:
        drive.step(1.1)
    before = {page.key for page in cache.pages()}
    cache.evict(2 * PAGES)
    gone = before - {page.key for page in cache.pages()}
    assert gone == set(keys("c")), "c has no tool, so that its pages go, though a's are older"
    cache.evict(2)
    assert {page.key for page in cache.pages()} == set(keys("a", PAGES - 1))
