"""Small cases in which each policy does what its paper says, token for token: order, chunks, who
starts, who is preempted.

Blocks hold one token, so M is a number of tokens, as in InferMax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import State
from jaxserve.sched.unified.policy_spec import evaluate
from jaxserve.sched.unified.ranking import rank
from tests.sched.driver import Drive

BEST = Tier.BEST_EFFORT


def drive(policy: str, *, m: int = 1000, **options: Any) -> Drive:
    return Drive(policy, blocks=2 * m, block_size=1, **options)


def test_vllm_runs_prefills_alone_and_first() -> None:
    run = drive("vllm")
    a, b = run.add(10, 5), run.add(12, 5)
    assert [run.step(), run.step()] == [{a: 10, b: 12}, {a: 1, b: 1}]
    c = run.add(7, 5)
    assert [run.step(), run.step()] == [{c: 7}, {a: 1, b: 1, c: 1}]


def test_vllm_preempts_the_last_to_arrive_and_recomputes_it() -> None:
    run = drive("vllm", m=16, watermark=0.0)
    a, b = run.add(8, 8), run.add(7, 8)
    assert run.step() == {a: 8, b: 7}
    assert run.step() == {a: 1} and run.preempted == [b], "each needs a token more"
    assert run.table.state[b] == State.WAITING and run.table.preemptions[b] == 1
    while not run.ended:
        run.step()
    assert run.step() == {b: 8}, "its prompt and the token that it had"


def test_requests_that_are_alike_end_in_order_after_many_preemptions() -> None:
    run = drive("vllm", m=48, rows=6)
    order = [run.add(6, 12) for _ in range(10)]
    run.to_the_end()
    assert run.preempted and run.ended == order


def test_sarathi_fills_the_budget_with_chunks_beside_decodes() -> None:
    run = drive("sarathi", c=16, p=16)
    a = run.add(10, 9)
    assert run.step() == {a: 10}
    b, c = run.add(20, 9), run.add(9, 9)
    assert run.step() == {a: 1, b: 15} and list(run.plans[-1]) == [a, b]
    assert run.pool.held[b] == 20, "room for its whole prompt from the start"
    assert [run.step(), run.step()] == [{a: 1, b: 5, c: 9}, {a: 1, b: 1, c: 1}]


def test_vllm_hy_lets_decodes_join_prefills() -> None:
    run = drive("vllm_hy")
    a = run.add(10, 5)
    run.step()
    b = run.add(7, 5)
    assert run.step() == {a: 1, b: 7}


def test_vllm_hy_fills_the_batch_with_prefills_first() -> None:
    run = drive("vllm_hy", c=20, p=20)
    a = run.add(10, 5)
    run.step()
    b = run.add(20, 5)
    assert run.step() == {b: 20}
    assert run.step() == {a: 1, b: 1}


@pytest.mark.parametrize(("policy", "first"), [("sarathi", 8), ("sarathi_pc", 20)])
def test_p_of_sarathi(policy: str, first: int) -> None:
    run = drive(policy, c=32, p=8)
    a = run.add(20, 3)
    assert run.step() == {a: first}


def test_sarathi_nocp_does_not_cut_prompts() -> None:
    run = drive("sarathi_nocp", c=32, p=8)
    a, b, c = run.add(20, 3), run.add(30, 3), run.add(2, 3)
    assert run.step() == {a: 20}, "b does not fit beside a, and c waits behind it"
    assert run.step() == {a: 1, b: 30}
    assert run.step() == {a: 1, b: 1, c: 2}


def test_sarathi_nohy_decodes_until_nobody_is_left() -> None:
    run = drive("sarathi_nohy")
    a = run.add(5, 3)
    run.step()
    b = run.add(5, 2)
    assert [run.step() for _ in range(4)] == [{a: 1}, {a: 1}, {b: 5}, {b: 1}]


@pytest.mark.parametrize("policy", ["vllm", "sarathi", "sarathi_pc", "rank_i", "infermax"])
def test_eviction_free_reserves_input_and_output_but_one(policy: str) -> None:
    """I + O - 1 = 12 each: two need 24."""
    tight, enough = drive(f"{policy}+ef", m=23), drive(f"{policy}+ef", m=24)
    for run in (tight, enough):
        a, b = run.add(4, 9), run.add(4, 9)
        run.to_the_end()
        assert not run.preempted
    assert tight.plans[:2] == [{a: 4}, {a: 1}]
    assert enough.plans[0] == {a: 4, b: 4}
    plain = drive(policy, m=17, watermark=0.0)
    a, b = plain.add(4, 9), plain.add(4, 9)
    plain.to_the_end()
    assert plain.plans[0] == {a: 4, b: 4} and plain.preempted


@pytest.mark.parametrize(
    ("policy", "order"), [("rank_org", [0, 1, 2]), ("rank_i", [1, 2, 0]), ("rank_o", [2, 0, 1])]
)
def test_ranks(policy: str, order: list[int]) -> None:
    run = drive(policy, rows=1)
    rows = [run.add(20, 4), run.add(3, 5), run.add(9, 3)]
    run.to_the_end()
    assert run.ended == [rows[i] for i in order]


def test_rank_i_takes_memory_from_long_prompts() -> None:
    run = drive("rank_i", m=30)
    long = run.add(20, 8)
    run.step()
    short = run.add(10, 3)
    assert run.step() == {short: 10} and run.preempted == [long]
    assert run.step() == {short: 1}, "the refill of 21 waits for memory"
    assert run.step() == {short: 1}
    assert run.step() == {long: 21}


def test_rank_org_prefers_an_early_prompt_to_a_late_decode() -> None:
    run, sarathi = drive("rank_org", c=8, p=8), drive("sarathi", c=8, p=8)
    for each in (run, sarathi):
        each.add(4, 5), each.add(20, 5), each.add(2, 5)
    a, b, c = 0, 1, 2
    assert run.step() == sarathi.step() == {a: 4, b: 4}
    assert run.step() == sarathi.step() == {a: 1, b: 7}
    run.scheduler.finish(a)
    late = run.add(1, 5)
    assert run.step() == {b: 8}, "b came before c and the others"
    assert late not in run.plans[-1] and c not in run.plans[-1]


def test_fastgen_takes_memory_chunk_by_chunk() -> None:
    fastgen, sarathi = drive("fastgen", m=20, c=8, p=4), drive("sarathi", m=20, c=8, p=4)
    for run in (fastgen, sarathi):
        run.add(7, 9)
        for _ in range(2):
            run.step()
        run.add(16, 2)
    assert list(fastgen.step().values()) == [1, 7], "every batch has C tokens"
    assert list(sarathi.step().values()) == [1], "16 tokens are not free"
    fastgen.to_the_end()


def test_orca_runs_a_fixed_number_with_all_their_memory() -> None:
    assert make_policy("orca").max_rows == 8  # type: ignore[attr-defined]
    run = drive("orca", m=40, max_rows=2)
    a, b, c = run.add(5, 3), run.add(6, 9), run.add(2, 2)
    assert run.step() == {a: 5, b: 6}
    assert (run.pool.held[[a, b]] == [7, 14]).all()
    assert run.step() == {a: 1, b: 1}
    assert run.step() == {a: 1, b: 1} and run.ended == [a]
    assert run.step() == {b: 1, c: 2}, "mixed; c takes the place that is free"


def test_random_draws_lots() -> None:
    def order(seed: int) -> list[int]:
        run = drive("random", rows=1, seed=seed)
        for _ in range(8):
            run.add(2, 2)
        run.to_the_end()
        return run.ended

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 3


def test_priority_takes_from_the_lower_class_only() -> None:
    run = drive("priority", m=30, rows=2)
    low, lower = run.add(4, 9, tier=BEST), run.add(4, 9, tier=BEST)
    run.step()
    high = run.add(4, 3)
    assert run.step() == {high: 4, low: 1} and run.preempted == [lower], "a slot"
    higher = run.add(15, 3)
    assert run.step() == {high: 1, higher: 15} and run.preempted == [lower, low]
    last = run.add(2, 3)
    assert run.step() == {high: 1, higher: 1} and run.ended == [high], "not from its own class"
    assert run.step()[last] == 2


def test_edf_goes_by_deadline_and_preempts_the_latest() -> None:
    run = drive("edf", m=30, c=10, p=10)
    late, soon = run.add(10, 9, ttft=9.0, tbt=9.0), run.add(10, 9, ttft=1.0, tbt=1.0)
    assert [run.step(), run.step()] == [{soon: 10}, {soon: 1, late: 9}]
    never = run.add(5, 5)
    assert run.step() == {soon: 1, late: 1, never: 5}
    for _ in range(2):
        run.step()
    assert run.preempted == [never], "no target, no deadline"


def test_edf_deadlines() -> None:
    run = drive("edf")
    key = make_policy("edf").key  # type: ignore[attr-defined]
    rows = np.array(
        [
            run.add(4, 9, arrival=1.0, ttft=2.0, tbt=0.5),
            run.add(4, 9, arrival=1.0, tbt=0.5),
            run.add(4, 9, arrival=1.0, ttft=2.0),
            run.add(4, 9, arrival=1.0, jct=7.0),
        ]
    )
    assert evaluate(key, run.scheduler.view, rows).tolist() == [3.0, np.inf, 3.0, 8.0]
    for now in (2.0, 3.0):
        run.step(now)
    assert evaluate(key, run.scheduler.view, rows).tolist() == [4.0, 3.5, np.inf, 8.0]


def test_infermax_preempts_the_shortest() -> None:
    runs = {on: drive("infermax", m=31, longest_first=on, watermark=0.0) for on in (True, False)}
    for run in runs.values():
        short, long = run.add(10, 9), run.add(20, 9)
        run.step()
    assert runs[True].step() == {long: 1} and runs[True].preempted == [short]
    assert runs[False].step() == {short: 1} and runs[False].preempted == [long]


@pytest.mark.parametrize(("expect", "start"), [("nothing", 3), ("candidate", 2), ("running", 1)])
def test_infermax_expects_outputs_as_long_as_those_before(expect: str, start: int) -> None:
    """Each is to end with 10 + 11 - 1 of 39 tokens. The second finds 29 of them free, the third 19;
    what the first is to take yet leaves 19 to the second. The watermark is 0."""
    run = drive("infermax", m=39, expect=expect)
    for _ in range(40):
        run.table.output_lengths.add(11)
    rows = [run.add(10, 30) for _ in range(3)]
    assert run.step() == dict.fromkeys(rows[:start], 10)
    run.to_the_end()


def test_infermax_starts_somebody_even_if_the_expected_does_not_fit() -> None:
    run = drive("infermax", m=40, watermark=0.1)
    for _ in range(40):
        run.table.output_lengths.add(1000)
    a = run.add(10, 30)
    run.add(10, 30)
    assert run.step() == {a: 10}


def test_nobody_overtakes_who_was_preempted_in_the_same_step() -> None:
    """The preempted waits at its place in the queue, and those behind it wait behind it."""
    run = drive("sarathi", m=30, watermark=0.0)
    a, b = run.add(14, 9), run.add(15, 9)
    run.step()
    small = run.add(2, 2)
    assert run.step() == {a: 1} and run.preempted == [b]
    assert run.step() == {a: 1}
    assert small not in run.plans[-1]


def test_requeue_is_the_order_of_infermaxs_simulator() -> None:
    """The preempted go to the head of the waiting, the last one first. Running requests that came
    together are in the order of their last batches, so a refilled one is last."""
    run = drive("sarathi")
    a, b, c = (run.add(4, 9) for _ in range(3))
    run.step()
    d = run.add(4, 9)
    run.scheduler._preempt(BatchPlan(), Preempt.whole(np.array([a, c])))
    plain, again = (rank(run.scheduler.view, requeue=on) for on in (False, True))
    assert plain.waiting.tolist() == [a, c, d] and plain.running.tolist() == [b]
    assert again.waiting.tolist() == [c, a, d] and again.running.tolist() == [b]
    run.step()
    plain, again = (rank(run.scheduler.view, requeue=on) for on in (False, True))
    assert plain.running.tolist() == [a, b, c, d]
    assert again.running.tolist() == [b, a, c, d]
    late = run.add(4, 9, arrival=1.0)
    run.step()
    run.scheduler._preempt(BatchPlan(), Preempt.whole(np.array([d])))
    assert list(run.step()) == [a, b, c, late, d], "decodes first"
    assert rank(run.scheduler.view, requeue=True).running.tolist() == [a, b, c, d, late]


@pytest.mark.parametrize(("watermark", "starts"), [(0.0, True), (0.1, False)])
def test_a_start_leaves_the_watermark_to_those_that_run(watermark: float, starts: bool) -> None:
    run = drive("sarathi", m=40, watermark=watermark)
    run.add(10, 20)
    run.step()
    b = run.add(27, 3)  # 2 tokens of 40 stay free, the watermark is 4
    assert (b in run.step()) == starts


@pytest.mark.parametrize("policy", ["sarathi", "vllm", "fastserve"])
def test_whoever_is_alone_may_fill_the_pool(policy: str) -> None:
    run = drive(policy, m=40, watermark=0.1)
    a = run.add(38, 2)
    assert run.step() == {a: 38}
    run.to_the_end()


def test_infermax_leaves_those_that_run_what_they_are_expected_to_take() -> None:
    """a is to end with 10 + 11 - 1 of 40 tokens, and so is b: nothing is left for c."""
    run = drive("infermax", m=40, expect="running")
    for _ in range(40):
        run.table.output_lengths.add(11)
    a = run.add(10, 30)
    assert run.step() == {a: 10}
    b = run.add(10, 30)
    run.add(3, 5)
    assert run.step() == {a: 1, b: 10}


def test_infermax_expects_no_more_than_max_tokens() -> None:
    run = drive("infermax", m=40)
    for _ in range(40):
        run.table.output_lengths.add(1000)
    a, b = run.add(10, 10), run.add(10, 11)  # 19 + 20 of 40
    assert run.step() == {a: 10, b: 10}


def test_decodes_count_towards_p() -> None:
    run = drive("sarathi", c=32, p=8)
    a = run.add(4, 9)
    run.step()
    b = run.add(20, 2)
    assert run.step() == {a: 1, b: 7}


# Policies that pass over who finds no room, instead of waiting behind it (InferMax section 3.1).


def test_probing_passes_over_who_finds_no_memory() -> None:
    runs = [drive("rank_org", m=30, watermark=0.0, probing=probing) for probing in (False, True)]
    for run in runs:
        a = run.add(10, 9)
        run.step()
        _, small, large = run.add(25, 2), run.add(12, 2), run.add(8, 2)
        smaller = run.add(7, 2)
    assert runs[0].step() == {a: 1}
    assert runs[1].step() == {a: 1, small: 12, smaller: 7} and large not in runs[1].plans[-1]
    runs[1].to_the_end()


def test_probing_passes_over_whole_prompts_that_c_has_no_room_for() -> None:
    run = drive("sarathi_nocp", m=100, watermark=0.0, c=32, p=32, probing=True)
    a, b, c = run.add(20, 3), run.add(30, 3), run.add(2, 3)
    assert run.step() == {a: 20, c: 2}
    assert run.step() == {a: 1, c: 1, b: 30}


def test_probing_passes_over_who_was_preempted_in_the_same_step() -> None:
    run = drive("sarathi", m=30, watermark=0.0, probing=True)
    a, b = run.add(14, 9), run.add(15, 9)
    run.step()
    small = run.add(2, 2)
    assert run.step() == {a: 1, small: 2} and run.preempted == [b]
    run.to_the_end()


def test_probing_finds_who_can_take_memory_behind_who_cannot() -> None:
    """The refill of 20 tokens would find the 12 of the last; the prompt of 9 behind it does."""
    run = drive("rank_i", m=40, watermark=0.0, probing=True)
    first, again = run.add(5, 30), run.add(8, 30)
    for _ in range(12):
        run.step()
    run.scheduler._preempt(BatchPlan(), Preempt.whole(np.array([again])))
    second = run.add(7, 20)
    assert run.step() == {first: 1, second: 7}
    last = run.add(12, 9)
    assert run.step() == {first: 1, second: 1, last: 12}
    nine = run.add(9, 2)
    assert run.step() == {first: 1, second: 1, nine: 9} and run.preempted == [last]
    run.to_the_end()


# Round robin between the tiers.


def test_the_tiers_take_turns() -> None:
    run = drive("round_robin")
    high, low = run.add(5, 3), run.add(4, 3, tier=BEST)
    turns = [run.step() for _ in range(5)]
    assert turns == [{high: 5}, {low: 4}, {high: 1}, {low: 1}, {high: 1}]


def test_a_turn_nobody_wants_is_the_others() -> None:
    run = drive("round_robin")
    low = run.add(4, 3, tier=BEST)
    assert [run.step(), run.step()] == [{low: 4}, {low: 1}]
    high = run.add(2, 2)
    assert [run.step(), run.step(), run.step()] == [{high: 2}, {low: 1}, {high: 1}]


def test_each_queue_is_vllms() -> None:
    """Prompts first, whole, then decodes, each in order of arrival."""
    run = drive("round_robin", rows=3, c=10, p=10)
    a, b = run.add(8, 3, tier=BEST), run.add(4, 3, tier=BEST)
    assert [run.step() for _ in range(3)] == [{a: 8}, {b: 4}, {a: 1, b: 1}]


def test_who_lacks_memory_takes_it_from_the_latest_of_all() -> None:
    run = drive("round_robin", m=14, watermark=0.0)
    high = run.add(6, 9)
    run.step()
    low = run.add(7, 8, tier=BEST)
    assert [run.step() for _ in range(2)] == [{low: 7}, {high: 1}]
    assert run.step() == {} and run.preempted == [low], "itself"
    assert run.step() == {high: 1}
    run.to_the_end()
    assert sorted(run.ended) == [high, low]
