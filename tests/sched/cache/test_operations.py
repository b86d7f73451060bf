"""Pool operations on a plan: what they book, what they tell the device, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.cache.cache_kinds import NOBODY, CacheKind, Direction
from jaxserve.sched.plan import (
    BatchPlan,
    Checkpoint,
    Copy,
    InvalidPlan,
    Join,
    Operation,
    Preempt,
    ProjectToKV,
    Restore,
)
from jaxserve.sched.restore_plan import left_filled, plan_restore
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import RUNNING, WAITING
from jaxserve.sched.step import CopySlots, Discard, Load, Save
from tests.sched.cache.invariants import check_host, check_pool
from tests.sched.cache.lending import lend
from tests.sched.cache.operations import BLOCK, HIDDEN, KV, LEFT, RIGHT, array, run, scheduler


def test_tokens_are_counted_by_why_they_are_computed() -> None:
    made = scheduler()
    step = run(made, {0: 10, 1: 7})
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (17, 0)
    step = run(made, {0: 1, 1: 3})
    assert step.decodes.tolist() == [True, False] and step.start.tolist() == [10, 7]
    assert (step.num_prefill_tokens, step.num_decode_tokens) == (3, 1)
    assert step.num_recomputed_tokens == 0 and step.num_tokens == 4


def test_a_refill_in_single_tokens_is_no_decode_but_for_its_last() -> None:
    made = scheduler()
    run(made, {0: 10})
    run(made, {0: 1})
    run(made, {}, Preempt.whole(array(0)))
    step = run(made, {0: 9})
    assert (step.num_recomputed_tokens, step.num_decode_tokens) == (9, 0)
    for position in (9, 10):  # the first is the prompt's last token, the other is behind it
        step = run(made, {0: 1})
        assert not step.decodes.any() and not step.feeds_back.any(), position
        assert (step.num_recomputed_tokens, step.num_prefill_tokens) == (1, 0)
    step = run(made, {0: 1})
    assert step.decodes.all() and step.feeds_back.all()
    assert (step.num_recomputed_tokens, step.num_decode_tokens) == (0, 1)


def test_a_refill_at_once_ends_with_the_newest_token() -> None:
    made = scheduler()
    run(made, {0: 10})
    run(made, {0: 1})
    run(made, {}, Preempt.whole(array(0)))
    step = run(made, {0: 12})
    assert not step.decodes.any() and step.feeds_back.all() and step.emits.all()
    assert (step.num_recomputed_tokens, step.num_decode_tokens) == (11, 1)
    assert step.num_prefill_tokens == 0


def test_preempting_from_a_token_on_keeps_what_is_before() -> None:
    made = scheduler()
    run(made, {0: 10, 1: 10})
    kept = made.pool.blocks_of(0)[:, :2].copy()
    step = run(made, {0: 2}, Preempt(array(0), array(6)))
    assert step.preempted.tolist() == [] and made.table.state[0] == RUNNING
    assert step.start.tolist() == [6] and step.num_recomputed_tokens == 2
    assert made.pool.blocks_of(0).tolist() == kept.tolist(), "the third pair of blocks is free"
    assert made.table.preemptions[0] == 1
    step = run(made, {0: 3})
    assert step.emits.all() and step.num_recomputed_tokens == 2 and step.num_decode_tokens == 1


def test_copies_leave_the_old_block_to_those_who_share_it() -> None:
    made = scheduler()
    run(made, {0: 10})
    lend(made.pool, 0, 1, 1)  # as prefix caching will
    made.table.computed[1] = BLOCK
    made.table.move(array(1), RUNNING)
    old = made.pool.blocks_of(1)[:, 0].copy()
    with pytest.raises(InvalidPlan, match="copy them"):
        run(made, {1: 1}, Preempt(array(1), array(2)))
    step = run(made, {1: 1}, Preempt(array(1), array(2)), Copy(array(1), array(0)))
    (move,) = step.moves
    assert isinstance(move, CopySlots)
    new = made.pool.blocks_of(1)[:, 0].tolist()
    assert made.pool.blocks_of(0)[:, 0].tolist() == old.tolist()
    slots = range(2)  # two tokens are left in it, of K and of V
    pairs = zip(old.tolist(), new, strict=True)
    assert move.places.tolist() == [[b, s, to, s] for b, to in pairs for s in slots]
    assert step.features().copied_slots == 4


@pytest.mark.parametrize("kind", list(CacheKind))
@pytest.mark.parametrize("side", list(Direction))
def test_a_checkpoint_comes_back_where_it_is_wanted(kind: CacheKind, side: Direction) -> None:
    made = scheduler()
    run(made, {0: 10}, kinds={0: kind}, directions={0: side})
    before = made.pool.slots_of(0, 3, 10)
    planes = len(made.pool.blocks_of(0))
    step = run(made, {}, Checkpoint(array(0), array(3), array(10)))
    (save,) = step.moves
    assert isinstance(save, Save) and save.slots.tolist() == before.tolist()
    assert save.counts == (7 * planes,)
    assert made.host.num_used == 7 * planes and made.host.tokens[0] == 7
    assert (step.features().saved_slots, step.features().loaded_slots) == (7 * planes, 0)
    step = run(made, {1: 3}, Preempt(array(0), array(3)))
    step = run(made, {0: 1}, Restore(array(0), array(3)))
    assert (step.features().saved_slots, step.features().loaded_slots) == (0, 7 * planes)
    load, discard = step.moves
    assert isinstance(load, Load) and load.keys == save.keys
    assert load.slots.tolist() == made.pool.slots_of(0, 3, 10).tolist()
    assert discard == Discard(save.keys) and made.host.num_used == 0
    assert step.start.tolist() == [10] and step.end.tolist() == [11]


@pytest.mark.parametrize("kind", list(CacheKind))
def test_what_another_owner_needs_comes_back_when_that_is_gone(kind: CacheKind) -> None:
    made = scheduler()
    run(made, {0: 10}, kinds={0: kind}, directions={0: RIGHT})
    free, ends = made.pool.num_free, made.pool.blocks_of(0)[:, 1:2].T.copy()
    mine, rows = {1: kind}, array(0)
    refused = pytest.raises(InvalidPlan, match="has nowhere else")
    with refused:
        run(made, {1: 1}, Join(1, ends), kinds=mine)
    step = run(made, {1: 1}, Join(1, ends), Checkpoint(rows, array(7), array(8)), kinds=mine)
    assert made.pool.num_free == free and made.host.tokens[0] == 1
    (save,) = step.moves
    taken = made.pool.slots_of(1, 0, 1)  # what it writes to is what was saved
    assert isinstance(save, Save) and save.slots.tolist() == taken.tolist()
    with pytest.raises(InvalidPlan, match="partly on the host"):
        run(made, {0: 1})
    with refused:
        run(made, {1: 2})
    run(made, {1: 2}, Checkpoint(rows, array(5), array(7)))
    assert made.pool.filled(ends[0], RIGHT, made.table.computed).tolist() == [1] * ends.size
    assert made.pool.filled(ends[0], LEFT, made.table.computed).tolist() == [3] * ends.size
    with pytest.raises(InvalidPlan, match="restored over tokens of the other owner"):
        run(made, {0: 1}, Restore(array(0, 0), array(5, 7)))
    made.finish(1)
    with pytest.raises(InvalidPlan, match="not restored in order"):
        run(made, {}, Restore(array(0), array(7)))
    step = run(made, {0: 1}, Restore(array(0, 0), array(5, 7)))
    assert step.start.tolist() == [10] and not made.pool.shares
    assert made.host.num_used == 0 and made.pool.num_free == free


@pytest.mark.parametrize("kind", list(CacheKind))
def test_what_another_owner_keeps_comes_back_elsewhere(kind: CacheKind) -> None:
    made = scheduler()
    run(made, {0: 10}, kinds={0: kind}, directions={0: RIGHT})
    ends = made.pool.blocks_of(0)[:, 1:2].T.copy()
    planes = ends.size
    checkpoint = Checkpoint(array(0), array(5), array(8))
    run(made, {1: 3}, Join(1, ends), checkpoint, kinds={1: kind})
    free, one = made.pool.num_free, made.pool.slots_of(0, 4, 5)
    back = plan_restore(made.view, 0, left_filled(made.view))
    assert (back.copy.tolist(), back.first.tolist(), back.computed) == ([1], [5], 10)
    assert (back.blocks, back.copied, back.loaded) == (planes, planes, 3 * planes)
    nearly = np.minimum(left_filled(made.view), 1)  # one slot is still in the other's way
    assert plan_restore(made.view, 0, nearly).copy.tolist() == [1]
    assert plan_restore(made.view, 0, nearly * 0).copy.tolist() == []
    step = run(made, {0: 1}, Copy(array(0), array(1)), Restore(array(0), array(5)))
    copy, load, _ = step.moves
    assert isinstance(copy, CopySlots) and isinstance(load, Load)
    assert copy.places[:, :2].tolist() == one.tolist()
    assert copy.places[:, 2:].tolist() == made.pool.slots_of(0, 4, 5).tolist()
    assert load.slots.tolist() == made.pool.slots_of(0, 5, 8).tolist()
    assert made.pool.num_free == free - planes and not made.pool.shares
    assert (made.pool.owners[ends] == [1, NOBODY]).all()
    run(made, {1: 7}, kinds={1: kind})


def test_a_checkpoint_goes_on_where_a_block_ends_only_once_the_block_is_whole() -> None:
    made = scheduler(blocks=6, host_slots=4)
    run(made, {0: 7}, kinds={0: HIDDEN}, directions={0: RIGHT})
    run(made, {}, Checkpoint(array(0), array(3), array(4)), Preempt(array(0), array(3)))
    hole = Checkpoint(array(0), array(0), array(3))
    for restores in ([3], [3, 0]):  # a copy would leave behind what is there beyond the hole
        back = Restore(array(*[0] * len(restores)), array(*restores))
        with pytest.raises(InvalidPlan, match="not restored in order"):
            run(made, {}, hole, back, Copy(array(0), array(0)))
    step = run(made, {}, hole, Restore(array(0, 0), array(0, 3)), Copy(array(0), array(0)))
    assert made.table.computed[0] == 4 and made.host.num_used == 0
    copy = step.moves[-1]
    assert isinstance(copy, CopySlots) and len(copy.places) == 4


@pytest.mark.parametrize("kind", list(CacheKind))
def test_what_goes_on_inside_a_block_comes_back_elsewhere_if_another_fills_it(
    kind: CacheKind,
) -> None:
    made = scheduler()
    run(made, {0: 6}, kinds={0: kind}, directions={0: RIGHT})
    ends = made.pool.blocks_of(0)[:, 1:2].T.copy()
    run(made, {1: 1}, Join(1, ends), kinds={1: kind})
    run(made, {}, Checkpoint(array(0), array(5), array(6)), Preempt(array(0), array(5)))
    run(made, {1: 2})  # where token 5 was
    with pytest.raises(InvalidPlan, match="restored over tokens of the other owner"):
        run(made, {}, Restore(array(0), array(5)))
    back = plan_restore(made.view, 0, left_filled(made.view))
    assert (back.copy.tolist(), back.first.tolist(), back.computed) == ([1], [5], 6)
    assert (back.blocks, back.copied, back.loaded) == (ends.size, ends.size, ends.size)
    run(made, {0: 1}, Copy(array(0), back.copy), Restore(array(0), back.first))
    assert not made.pool.shares


def test_preempting_forgets_what_does_not_go_on_there() -> None:
    made = scheduler()
    run(made, {0: 10}, directions={0: RIGHT})
    rows = array(0, 0, 0)
    run(made, {}, Checkpoint(rows, array(3, 6, 8), array(4, 8, 10)))
    with pytest.raises(InvalidPlan, match="in two"):
        run(made, {}, Preempt(array(0), array(7)))
    run(made, {}, Preempt(array(0), array(6)))
    assert [s.first for s in made.host.segments(0)] == [3, 6, 8]
    with pytest.raises(InvalidPlan, match="does not begin where"):
        run(made, {}, Restore(array(0), array(8)))
    run(made, {}, Restore(array(0), array(6)))
    assert made.table.computed[0] == 8 and made.host.tokens[0] == 3
    run(made, {}, Preempt(array(0), array(3)))
    assert [s.first for s in made.host.segments(0)] == [3]
    run(made, {0: 2})
    assert made.host.num_used == 0, "what is computed again is not kept"
    run(made, {0: 2})


def test_a_request_that_waits_runs_again_with_its_checkpoint_alone() -> None:
    made = scheduler()
    run(made, {0: 10}, directions={0: RIGHT})
    run(made, {}, Checkpoint(array(0), array(0), array(8)), Preempt.whole(array(0)))
    assert made.table.state[0] == WAITING and made.pool.num_used == 0
    run(made, {}, Restore(array(0), array(0)))
    assert made.table.state[0] == RUNNING and made.table.computed[0] == 8
    assert made.pool.direction[0] == RIGHT and made.pool.num_used == 4


def prepared() -> Scheduler:
    """Row 0 has KV, row 1 a hidden cache; tokens 4 to 8 of row 0 are on the host."""
    made = scheduler(blocks=12, host_slots=24)
    run(made, {0: 10, 1: 10}, kinds={1: HIDDEN}, directions={1: RIGHT})
    run(made, {}, Checkpoint(array(0), array(4), array(8)))
    return made


HERS = array(6)  # a block that row 1 fills from the right
ENDS = Checkpoint(array(1, 1), array(3, 7), array(4, 8))  # the last slot of it, and of the next


@pytest.mark.parametrize(
    ("tokens", "operations", "problem"),
    [
        ({}, [Preempt.whole(array(2))], "without cache is preempted"),
        ({}, [Preempt(array(0), array(10))], "at least 0 tokens and fewer than it has"),
        ({}, [Preempt(array(0), array(-1))], "at least 0 tokens"),
        ({}, [Preempt.whole(array(0)), Preempt.whole(array(0))], "without cache is preempted"),
        ({0: 1}, [Preempt.whole(array(0))], "planned and preempted"),
        ({}, [Copy(array(2), array(0))], "row without cache is copied"),
        ({}, [Copy(array(0), array(3))], "copied block is not there"),
        ({}, [Copy(array(0, 0), array(1, 1))], "copied block is not there"),
        ({}, [Copy(array(0, 0), array(0, 1))], "more blocks than are free"),
        ({}, [Copy(array(0), array(0)), Preempt.whole(array(0))], "after another operation"),
        ({}, [Checkpoint(array(2), array(0), array(1))], "row without cache is checkpointed"),
        ({}, [Checkpoint(array(0), array(0), array(11))], "not cached"),
        ({}, [Checkpoint(array(0), array(3), array(3))], "not cached"),
        ({}, [Checkpoint(array(0), array(7), array(9))], "on the host already"),
        ({}, [Checkpoint(array(1, 1), array(2, 1), array(4, 3))], "on the host already"),
        ({}, [Checkpoint(array(1), array(0), array(3))], "ends before the last cached token"),
        ({0: 1}, [], "partly on the host"),
        ({}, [Checkpoint(array(0, 1), array(8, 0), array(10, 10))], None),
        ({}, [Checkpoint(array(0, 0, 1), array(0, 8, 0), array(4, 10, 10))], "host memory holds"),
        ({}, [Restore(array(0), array(4))], None),
        ({}, [Restore(array(1), array(0))], "nothing is on the host"),
        ({}, [Preempt(array(0), array(3)), Restore(array(0), array(4))], "nothing is on the host"),
        ({}, [Preempt(array(0), array(5))], "in two"),
        ({}, [Preempt(array(0), array(4)), Restore(array(0), array(4))], None),
        ({}, [Preempt.whole(array(0)), Restore(array(0), array(4))], "nothing is on the host"),
        ({}, [Join(2, HERS[None])], "neither runs nor starts"),
        ({2: 1}, [Join(2, HERS[None])], "takes 2 blocks at a time"),
        ({2: 1}, [Join(2, array(6, 0)[None])], "no free end"),
        ({2: 1}, [Join(2, array(6, 6)[None])], "different blocks"),
        ({2: 1}, [Join(2, array(6, 7)[None])], "has nowhere else"),
        ({2: 1}, [Join(2, array(6, 7)[None]), ENDS], None),
        ({2: 2}, [Join(2, array(6, 7)[None]), ENDS], "has nowhere else"),
        ({2: 1, 3: 1}, [Join(2, array(6, 7)[None]), Join(3, array(7, 8)[None])], "no free end"),
        ({2: 1}, [Preempt.whole(array(1)), Join(2, array(6, 7)[None])], "no free end"),
        ({}, [ProjectToKV(array(1))], "not planned as KV"),
        ({0: 1}, [ProjectToKV(array(0))], "no hidden cache"),
    ],
)
def test_refuses(tokens: dict[int, int], operations: list[Operation], problem: str | None) -> None:
    made = prepared()
    table, pool = made.table, made.pool
    state = table.state.copy(), table.computed.copy(), pool.num_free, made.host.num_used
    if problem is None:
        run(made, tokens, *operations)
        return
    with pytest.raises(InvalidPlan, match=problem):
        run(made, tokens, *operations)
    after = table.state, table.computed, pool.num_free, made.host.num_used
    assert all(np.array_equal(a, b) for a, b in zip(state, after, strict=True))
    check_pool(pool)
    check_host(made.host)


def test_who_says_that_it_moves_nothing_moves_nothing() -> None:
    made = prepared()
    made.policy.moves_cache = False
    for operation in (
        Copy(array(0), array(0)),
        Checkpoint(array(0), array(0), array(1)),
        Restore(array(0), array(4)),
    ):
        with pytest.raises(InvalidPlan, match="without moves_cache"):
            run(made, {}, operation)


def test_what_comes_back_is_found_again() -> None:
    made = scheduler(prefix_caching=True)
    assert made.cache is not None
    found = []
    for tokens, operations in (
        ({0: 10}, ()),
        ({}, (Checkpoint(array(0), array(0), array(10)), Preempt.whole(array(0)))),
        ({}, (Restore(array(0), array(0)),)),
    ):
        run(made, tokens, *operations)
        made.cache.settle()
        found.append(made.cache.found.tolist())
    assert found == [[0, 2, 2, 2], [0, 0, 0, 0], [0, 2, 2, 2]]
    run(made)  # what they find counts as computed
    run(made, {0: 1, 1: 2})
    assert made.pool.num_shared == 4 and made.table.computed[:2].tolist() == [11, 10]


# Operations of one plan, one after the other: what the earlier ones leave is what the later ones,
# and the rows, are checked against.


def refused(
    made: Scheduler, tokens: dict[int, int], *operations: Operation, match: str, **options: object
) -> None:
    """The plan is refused, and nothing is booked."""
    before = made.table.state.copy(), made.pool.held.copy(), made.pool.num_free
    with pytest.raises(InvalidPlan, match=match):
        run(made, tokens, *operations, **options)  # type: ignore[arg-type]
    after = made.table.state, made.pool.held, made.pool.num_free
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    check_pool(made.pool)


def last_pair(made: Scheduler, row: int) -> np.ndarray:
    """The row's last blocks, [1, planes]."""
    return made.pool.blocks_of(row)[:, -1:].T.copy()


def test_a_joined_block_is_not_returned_by_whom_it_belonged_to() -> None:
    made = scheduler(blocks=7)
    run(made, {0: 9}, directions={0: RIGHT})
    operations = Join(1, last_pair(made, 0)), Preempt.whole(array(0))
    refused(made, {1: 1, 2: 10}, *operations, match="more blocks than are free")
    run(made, {1: 1, 2: 8}, *operations)
    assert made.pool.num_free == 1


@pytest.mark.parametrize(
    "leave",
    [Checkpoint(array(1), array(0), array(1)), Copy(array(1), array(0)), Preempt.whole(array(1))],
)
def test_who_is_in_the_way_of_a_checkpoint_leaves_before_it_comes_back(leave: Operation) -> None:
    made = scheduler()
    run(made, {0: 8}, directions={0: RIGHT})
    save, back = Checkpoint(array(0), array(7), array(8)), Restore(array(0), array(7))
    run(made, {1: 1}, Join(1, last_pair(made, 0)), save)
    refused(made, {}, back, leave, match="restored over tokens of the other owner of a block")
    run(made, {0: 1}, leave, back)


def test_a_joined_block_is_not_returned_by_a_copy() -> None:
    made = scheduler(blocks=10)
    run(made, {0: 9}, directions={0: RIGHT})
    operations = Join(1, last_pair(made, 0)), Copy(array(0), array(2))
    refused(made, {1: 1, 2: 5}, *operations, match="more blocks than are free")
    run(made, {1: 1, 2: 4}, *operations)
    assert made.pool.num_free == 0


def test_a_hidden_cache_whose_blocks_were_just_joined_does_not_become_kv() -> None:
    made = scheduler()
    run(made, {0: 9}, kinds={0: HIDDEN}, directions={0: RIGHT})
    join = Join(1, last_pair(made, 0))
    refused(
        made,
        {0: 1, 1: 1},
        join,
        ProjectToKV(array(0)),
        kinds={0: KV, 1: HIDDEN},
        match="shares blocks",
    )


def test_a_copy_of_what_has_just_become_kv_takes_two_blocks() -> None:
    made = scheduler(blocks=4)
    run(made, {0: 4}, kinds={0: HIDDEN})
    run(made, {1: 4}, kinds={1: HIDDEN})
    operations = ProjectToKV(array(0)), Copy(array(0), array(0))
    refused(made, {0: 1}, *operations, kinds={0: KV}, match="more blocks than are free")
    made = scheduler(blocks=6)
    run(made, {0: 4}, kinds={0: HIDDEN})
    step = run(made, {0: 1}, *operations, kinds={0: KV})
    assert len(step.moves) == 2 and made.pool.num_free == 2


def test_nobody_gets_more_room_than_a_table_is_wide() -> None:
    made = scheduler(blocks=100)
    made.policy.next = BatchPlan(  # type: ignore[attr-defined]
        array(0), array(10), array(33), array(KV), (Preempt.whole(array()),)
    )
    with pytest.raises(InvalidPlan, match="more room than the longest request takes"):
        made.schedule(0.0)
    assert made.pool.num_used == 0 and not len(made.table.in_state(RUNNING))


def test_a_kind_of_cache_that_there_is_not_is_refused() -> None:
    refused(scheduler(), {0: 1}, kinds={0: -1}, match="no kind of cache")
    refused(scheduler(rho=None), {0: 1}, kinds={0: HIDDEN}, match="where there are none")


@pytest.mark.parametrize(
    ("row", "kind", "operations", "problem"),
    [
        (1, KV, [], "planned as KV without ProjectToKV"),
        (1, KV, [ProjectToKV(array(1, 1))], "becomes KV twice"),
        (0, HIDDEN, [], "becomes hidden without preemption"),
    ],
)
def test_no_cache_changes_its_kind_by_itself(
    row: int, kind: CacheKind, operations: list[Operation], problem: str
) -> None:
    made = scheduler()
    run(made, {0: 10, 1: 10}, kinds={1: HIDDEN})
    refused(made, {row: 1}, *operations, kinds={row: kind}, match=problem)


def test_every_block_that_is_written_to_has_to_be_a_copy() -> None:
    made = scheduler()
    run(made, {0: 10})
    lend(made.pool, 0, 1, 2)
    made.table.computed[1] = 2
    made.table.move(array(1), RUNNING)
    first, both = Copy(array(1), array(0)), Copy(array(1, 1), array(0, 1))
    refused(made, {1: 3}, first, match="copy them")
    run(made, {1: 2}, first)
    made.table.computed[1] = 2
    run(made, {1: 3}, both)


def test_a_checkpoint_does_not_come_back_into_shared_blocks() -> None:
    made = scheduler()
    run(made, {0: 10, 1: 10})
    run(made, {}, Checkpoint(array(1), array(2), array(10)), Preempt(array(1), array(2)))
    lend(made.pool, 1, 2, 1)
    restore = Restore(array(1), array(2))
    refused(made, {}, restore, match="restored into blocks that are shared")
    run(made, {}, Copy(array(1), array(0)), restore)


def test_who_alone_is_left_of_those_who_shared_may_write() -> None:
    made = scheduler()
    run(made, {0: 10})
    lend(made.pool, 0, 1, 2)
    made.table.computed[1] = 2 * BLOCK
    made.table.move(array(1), RUNNING)
    refused(made, {0: 1}, Preempt(array(0), array(6)), match="copy them")
    run(made, {0: 1}, Preempt(array(0), array(6)), Preempt.whole(array(1)))


def test_an_end_that_was_just_given_back_can_be_joined() -> None:
    made = scheduler()
    run(made, {0: 9}, directions={0: RIGHT})
    ends = last_pair(made, 0)
    run(made, {1: 1}, Join(1, ends))
    run(made, {2: 1}, Preempt.whole(array(1)), Join(2, ends))
    assert (made.pool.owners[ends] == [2, 0]).all()


def test_who_comes_back_from_the_host_joins_from_its_own_side() -> None:
    made = scheduler()
    run(made, {0: 5}, directions={0: RIGHT})
    run(made, {1: 9})
    run(made, {}, Checkpoint(array(0), array(0), array(4)), Preempt.whole(array(0)))
    run(made, {0: 1}, Restore(array(0), array(0)), Join(0, last_pair(made, 1)))
    assert made.pool.direction[0] == RIGHT and made.pool.held[0] == 2


def test_a_start_joins_twice() -> None:
    made = scheduler(blocks=12)
    run(made, {0: 10, 1: 10}, directions={0: RIGHT, 1: RIGHT})
    ends = last_pair(made, 0), last_pair(made, 1)
    room = Checkpoint(array(0, 1), array(8, 9), array(10, 10))
    run(made, {2: 7}, *(Join(2, blocks) for blocks in ends), room)
    assert made.pool.held[2] == 2 and made.pool.num_free == 0


def test_host_memory_that_a_restore_leaves_holds_the_next_checkpoint() -> None:
    made = scheduler(host_slots=8)
    run(made, {0: 10, 1: 10})
    run(made, {}, Checkpoint(array(0), array(6), array(10)), Preempt(array(0), array(6)))
    restore, save = Restore(array(0), array(6)), Checkpoint(array(1), array(0), array(4))
    refused(made, {}, save, restore, match="host memory holds")
    step = run(made, {}, restore, save)
    assert [type(move) for move in step.moves] == [Load, Discard, Save]
    run(made, {}, Preempt(array(1), array(4)))
    step = run(made, {}, Restore(array(1), array(0)), Checkpoint(array(1), array(0), array(4)))
    assert [type(move) for move in step.moves] == [Load, Discard, Save]


def test_what_ended_requests_left_on_the_host_goes_before_more_comes() -> None:
    made = scheduler(host_slots=8)
    run(made, {0: 10, 1: 10})
    run(made, {}, Checkpoint(array(0), array(0), array(4)))
    made.finish(0)
    step = run(made, {}, Checkpoint(array(1), array(0), array(4)))
    assert [type(move) for move in step.moves] == [Discard, Save]


# What host memory counts of the checkpoints that it holds, held, or could not take.


def test_host_memory_counts_what_goes_and_comes_and_what_finds_no_room() -> None:
    made = scheduler(host_slots=20)
    run(made, {0: 10, 1: 10}, kinds={1: HIDDEN})
    host = made.host
    run(made, {}, Checkpoint(array(0, 1), array(4, 2), array(10, 4)))
    assert (host.num_saved, host.num_restored, host.num_used) == (14, 0, 14)
    run(made, {}, Restore(array(1), array(2)))
    assert (host.num_saved, host.num_restored, host.num_used) == (14, 2, 12)
    run(made, {}, Preempt(array(1, 0), array(2, 4)))
    assert host.num_full == 0, "eight slots would have found room, and of the other nothing is lost"
    run(made, {}, Preempt.whole(array(0)))
    assert host.num_full == 0 and host.num_used == 0, "20 slots for ten tokens, were they kept"
    run(made, {0: 10})
    run(made, {2: 1})
    run(made, {}, Checkpoint(array(2), array(0), array(1)), Preempt.whole(array(0, 2)))
    assert (host.num_full, made.preemptions) == (1, 5), "of the one that had 20 slots, not 18"


def test_host_memory_knows_of_what_kind_a_cache_is() -> None:
    made = scheduler()
    run(made, {0: 10, 1: 10}, kinds={1: HIDDEN})
    run(made, {}, Checkpoint(array(0, 1, 1), array(4, 6, 2), array(10, 10, 6)))
    assert made.host.tokens.tolist() == [6, 8, 0, 0]
    assert made.host.kind[:2].tolist() == [KV, HIDDEN]
    run(made, {}, Restore(array(1, 1), array(2, 6)))
    run(made, {}, Preempt.whole(array(1)))
    run(made, {1: 10}, kinds={1: KV})
    run(made, {}, Checkpoint(array(1), array(0), array(10)))
    assert made.host.kind[1] == KV


def test_who_makes_no_checkpoints_lacks_no_room_for_them() -> None:
    made = scheduler(host_slots=0)
    made.policy.moves_cache = False
    run(made, {0: 10})
    run(made, {}, Preempt.whole(array(0)))
    assert made.host.num_full == 0
    made.policy.moves_cache = True
    run(made, {0: 10})
    run(made, {}, Preempt.whole(array(0)))
    assert made.host.num_full == 1
