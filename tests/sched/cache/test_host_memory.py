"""What host memory counts of the checkpoints that it holds, held, or could not take."""

from __future__ import annotations

from jaxserve.sched.plan import Checkpoint, Preempt, Restore
from tests.sched.cache.operations import HIDDEN, KV, array, run, scheduler


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
