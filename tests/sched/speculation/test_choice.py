"""Who drafts how much: where the step-time model says that it pays, and no further."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.cost.size_ratios import LAST
from jaxserve.sched.registry import make_policy
from jaxserve.sched.speculation.acceptance import (
    PRIOR,
    TENANTS,
    AcceptanceRates,
)
from jaxserve.sched.speculation.choice import EVERY, FIRST_TRIAL, MOST, Patience
from jaxserve.sched.step_timing import HostTimes
from tests.cost_models import FLAT
from tests.sched.driver import Drive


def decoding(rows: int, *, acceptance: float = 0.9, offered: int = 8, tbt: float = 100.0) -> Drive:
    """So many requests that decode and have drafts."""
    drive = Drive("sarathi+spec", c=2048, p=2048, rows=512, blocks=4096)
    for _ in range(rows):
        drive.add(1, 40, tbt=tbt)
    drive.step()
    for row in range(rows):
        drive.scheduler.offer(row, offered, acceptance)
    return drive


def drafted(drive: Drive) -> list[int]:
    """By row."""
    plan = drive.scheduler.plan(0.0)
    if plan.drafts is None:
        return [0] * len(plan.rows)
    return plan.drafts[np.argsort(plan.rows)].tolist()


def drafted_later(drive: Drive) -> list[int]:
    """The same, once prices have been asked again."""
    return [drafted(drive) for _ in range(EVERY + 1)][-1]


def test_a_row_alone_that_is_guessed_well_drafts_all_it_may() -> None:
    assert drafted(decoding(1)) == [MOST]
    assert drafted(decoding(1, offered=2)) == [2]
    (few,) = drafted(decoding(1, acceptance=0.4))
    assert 0 < few < MOST


def test_a_row_that_is_never_right_drafts_nothing() -> None:
    assert drafted(decoding(1, acceptance=0.0)) == [0]
    assert drafted(decoding(1, acceptance=0.05)) == [0]


def test_where_all_that_is_computed_takes_its_time_nobody_drafts() -> None:
    """FLAT: a tenth of a millisecond a token, beside which the bias vanishes in a full batch."""
    assert not any(drafted(decoding(60, acceptance=0.5)))
    assert any(drafted(decoding(4, acceptance=0.5)))
    assert any(drafted(decoding(60, acceptance=1.0))), "what is never wrong is free of charge"


def test_those_who_are_guessed_best_draft_first() -> None:
    drive = decoding(8)
    for row in range(8):
        drive.scheduler.offer(row, 8, 0.3 + 0.08 * row)
    found = drafted(drive)
    assert found == sorted(found) and found[-1] > found[0]


def test_waiting_for_tokens_has_its_price() -> None:
    drive = decoding(1, acceptance=0.5)
    assert any(drafted(drive))
    drive.scheduler.view.device.host_gap_s = 0.01
    assert not any(drafted(drive))


def test_steps_are_priced_as_those_of_their_size_turned_out() -> None:
    drive = decoding(1, acceptance=0.5)
    (few,) = drafted(drive)
    ratios = drive.scheduler.view.device.ratios
    alone = BatchFeatures.of_decodes(np.array(1), np.array(2))
    for _ in range(LAST):  # the others are taken to be like these, which says nothing of drafts
        ratios.note(alone, 0.5)
    assert drafted_later(drive) == [few]
    for size in range(2, MOST + 2):
        ratios.note(alone._replace(num_tokens=size, padded_tokens=size), 1.0)
    assert drafted_later(drive) == [0]
    for _ in range(LAST // 2 + 1):
        ratios.note(alone, 1.0)
    assert drafted_later(drive) == [few], "the last ones count"


def test_who_is_due_a_first_token_makes_drafts_dearer() -> None:
    for late in (False, True):  # whose target is missed anyway loses nothing
        drive = decoding(4, acceptance=0.5)
        assert drive.scheduler.would_draft(0.0)
        for _ in range(40):
            drive.add(10, 40, arrival=-100.0 if late else 0.0, ttft=60.0)
        assert drive.scheduler.would_draft(0.0) == late


def test_nobody_waits_for_drafts_where_that_makes_the_next_step_late() -> None:
    """A prompt that comes leaves the next step no time to spare; without a prompt there is."""
    for prompts, tbt, drafts in ((True, 0.2005, False), (False, 0.2005, True), (True, 0.3, True)):
        drive = decoding(2, tbt=tbt)
        view = drive.scheduler.view
        view.device.host_gap_s = 0.001
        drive.scheduler._draft_prices.with_prompts = 0.2
        if prompts:
            drive.add(10, 40)
        assert drive.scheduler.would_draft(0.0) == drafts, (prompts, tbt)


def test_the_next_step_is_expected_to_draft_exactly_where_it_does() -> None:
    for acceptance, rows in ((0.9, 1), (0.05, 1), (0.5, 60), (0.5, 4)):
        drive = decoding(rows, acceptance=acceptance)
        assert drive.scheduler.would_draft(0.0) == any(drafted(drive)), (acceptance, rows)
    plain = Drive("sarathi")
    row = plain.add(1, 40)
    plain.step()
    plain.scheduler.offer(row, 8, 1.0)
    assert not plain.scheduler.would_draft(0.0)
    assert plain.step() == {row: 1}


def test_a_draft_of_which_nothing_is_known_begins_with_what_its_tenant_had() -> None:
    rates = AcceptanceRates()
    first = rates.of("a")
    assert first.estimate("lookup") == PRIOR
    for _ in range(50):
        first.note("lookup", 0, right=True)
    assert first.estimate("lookup") > 0.95
    assert first.estimate("lookup", 1) == first.estimate("lookup"), "more speaks for it"
    first.note("lookup", 1, right=False)
    assert first.estimate("lookup", 1) < first.estimate("lookup")
    assert rates.of("a").estimate("lookup") > 0.95
    assert rates.of("b").estimate("lookup") == PRIOR
    second = rates.of("a")
    for _ in range(20):
        second.note("lookup", 0, right=False)
    assert second.estimate("lookup") < 0.3 < first.estimate("lookup")
    assert (first.guessed, first.right, second.guessed, second.right) == (51, 50, 20, 0)


def test_only_so_many_tenants_are_remembered() -> None:
    rates = AcceptanceRates()
    rates.of("first").note("lookup", 0, right=True)
    for number in range(TENANTS):
        rates.of(str(number))
    assert rates.of("first").estimate("lookup") == PRIOR


def test_who_waits_in_vain_waits_less_often() -> None:
    patience = Patience()
    assert patience.waits()
    patience.planned(drafts=True)
    waits = []
    for _ in range(40):
        waits.append(patience.waits())
        patience.planned(drafts=False)
    assert [i for i, waited in enumerate(waits) if waited] == [0, 2, 6, 14, 30]
    while not patience.waits():
        patience.planned(drafts=False)
    patience.planned(drafts=True)
    assert patience.waits(), "as soon as there are drafts again"


@pytest.mark.parametrize("rows", [1, 7])
def test_drafts_take_no_more_than_the_logits_there_are(rows: int) -> None:
    drive = Drive("sarathi+spec", c=64, rows=8)
    for _ in range(rows):
        drive.add(1, 40)
    drive.step()
    for row in range(rows):
        drive.scheduler.offer(row, 8, 1.0)
    assert sum(drafted(drive)) == min(MOST * rows, 8 - rows)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_whose_last_token_is_in_flight_has_no_drafts_to_wait_for(left: int) -> None:
    """The tokens in flight are the first of what is offered, and of what may still be written."""
    drive = Drive("sarathi+spec", c=2048, p=2048, rows=512, blocks=4096)
    drive.add(1, 1 + left)
    drive.step()
    drive.scheduler.offer(0, 8, 1.0)
    table = drive.table
    table.generated[0], table.computed[0] = 2, 2  # another step is in flight
    assert drive.scheduler.would_draft(0.0) == (left > 2)


def test_a_draft_is_waited_for_only_if_the_token_before_it_is_likely_right() -> None:
    def waits(chance: float, flying: int) -> bool:
        drive = Drive("sarathi+spec", c=2048, p=2048, rows=512, blocks=4096)
        drive.add(1, 40)
        drive.step()
        drive.scheduler.offer(0, 8, chance)
        drive.table.generated[0] = drive.table.computed[0] = 1 + flying
        return drive.scheduler.would_draft(0.0)

    for chance, late in ((0.15, False), (0.9, True)):
        assert waits(chance, 0)
        assert waits(chance, 1) == late, chance


def test_a_model_that_learns_is_shown_steps_that_it_advises_against() -> None:
    drive = decoding(1, acceptance=0.95)
    view = drive.scheduler.view
    view.device.host_gap_s = 1.0  # so nothing pays
    assert not any(drive.scheduler.would_draft(0.0) for _ in range(100)), "it knows, and learns not"
    learning = dataclasses.replace(view, cost_model=OnlineCostModel(FLAT))
    drive.scheduler.view = learning
    found = []
    for _ in range(100):
        found.append(drive.scheduler.would_draft(0.0))
        assert any(drafted(drive)) == found[-1]
    tried = np.flatnonzero(found)
    assert tried[0] == FIRST_TRIAL - 1
    assert (np.diff(tried, n=2) > 0).all() and len(tried) == 3, "ever more seldom"
    drive.scheduler.offer(0, 8, 0.5)
    assert not any(drive.scheduler.would_draft(0.0) for _ in range(1000)), "not what is unlikely"


def test_what_a_step_exposes_is_what_most_do() -> None:
    times = HostTimes()
    assert times.note(1.0) == 1.0
    assert [times.note(0.002 + 0.001 * (i % 2)) for i in range(4)][-1] == 0.003
    assert times.note(5.0) == 0.003


def test_a_variant_of_a_variant_still_drafts() -> None:
    for name in ("sarathi+spec+ef", "sarathi+ef+spec", "sarathi+spec:watermark=0.1"):
        assert make_policy(name).speculates
    assert not make_policy("sarathi+ef").speculates
