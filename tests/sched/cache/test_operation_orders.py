"""Operations of one plan, one after the other: what the earlier ones leave is what the later ones,
and the rows, are checked against."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.cache.cache_kinds import NOBODY
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
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.state.request_table import RUNNING
from jaxserve.sched.step import Discard, Load, Save
from tests.sched.cache.invariants import check_pool
from tests.sched.cache.lending import lend
from tests.sched.cache.operations import BLOCK, HIDDEN, KV, RIGHT, array, run, scheduler


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
    refused(made, {}, back, leave, match="restored over what the other owner of a block still has")
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


def test_blocks_that_nobody_holds_any_more_are_not_joined() -> None:
    made = scheduler()
    run(made, {0: 9}, directions={0: RIGHT})
    ends = last_pair(made, 0)
    refused(made, {1: 1}, Preempt.whole(array(0)), Join(1, ends), match="no free end")
    refused(made, {1: 1, 2: 1}, Join(1, ends), Join(2, ends), match="no free end")
    assert (made.pool.owners[ends, 0] == NOBODY).all()


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
