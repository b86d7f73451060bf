"""Who may start: the watermark, what those that run are expected to take, and P beside decodes.

Blocks hold one token, so M is a number of tokens.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sched.driver import Drive


def drive(policy: str, m: int = 40, **options: Any) -> Drive:
    return Drive(policy, blocks=2 * m, block_size=1, **options)


def infermax(output: int, **options: Any) -> Drive:
    """infermax, which has seen outputs of that length end."""
    run = drive("infermax", **options)
    for _ in range(40):
        run.table.output_lengths.add(output)
    return run


@pytest.mark.parametrize(("watermark", "starts"), [(0.0, True), (0.1, False)])
def test_a_start_leaves_the_watermark_to_those_that_run(watermark: float, starts: bool) -> None:
    run = drive("sarathi", watermark=watermark)
    run.add(10, 20)
    run.step()
    b = run.add(27, 3)  # 2 tokens of 40 stay free, the watermark is 4
    assert (b in run.step()) == starts


@pytest.mark.parametrize("policy", ["sarathi", "vllm", "fastserve", "infermax"])
def test_whoever_is_alone_may_fill_the_pool(policy: str) -> None:
    run = infermax(9, watermark=0.1) if policy == "infermax" else drive(policy, watermark=0.1)
    a = run.add(38, 2)
    assert run.step() == {a: 38}
    run.to_the_end()


def test_infermax_leaves_those_that_run_what_they_are_expected_to_take() -> None:
    """a is to end with 10 + 11 - 1 of 40 tokens, and so is b: nothing is left for c."""
    run = infermax(11, expect="running")
    a = run.add(10, 30)
    assert run.step() == {a: 10}
    b = run.add(10, 30)
    run.add(3, 5)
    assert run.step() == {a: 1, b: 10}


def test_infermax_leaves_free_what_a_start_itself_is_expected_to_take() -> None:
    """b, to end with 20, finds 29 of 40 free; c, to end with 19, the 19 that b leaves of them;
    d, to end with 12, no more than 9."""
    run = infermax(11)
    a = run.add(10, 30)
    assert run.step() == {a: 10}
    b, c = run.add(10, 30), run.add(10, 10)
    d = run.add(2, 30)
    assert run.step() == {a: 1, b: 10, c: 10}
    assert d not in run.plans[-1]


def test_infermax_expects_no_more_than_max_tokens() -> None:
    run = infermax(1000)
    a, b = run.add(10, 10), run.add(10, 11)  # 19 + 20 of 40
    assert run.step() == {a: 10, b: 10}


def test_decodes_count_towards_p() -> None:
    run = drive("sarathi", c=32, p=8)
    a = run.add(4, 9)
    run.step()
    b = run.add(20, 2)
    assert run.step() == {a: 1, b: 7}
