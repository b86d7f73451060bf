"""How many calls may be open at once, and whose they are."""

from __future__ import annotations

import pytest

from jaxserve.server.access.api_keys import Caller
from jaxserve.server.requests.admission import Admission, Overloaded
from tests.server.access.test_keys import key

ALICE, BOB = Caller(key("alice")), Caller(key("bob"))


def filled(admission: Admission, caller: Caller) -> int:
    """How many calls more of theirs are let in."""
    for count in range(1000):
        try:
            admission.enter(caller)
        except Overloaded:
            return count
    return 1000


def test_one_key_may_have_all_and_several_leave_places_for_each_other() -> None:
    admission = Admission(64, "server.max_calls")
    assert filled(admission, ALICE) == 64
    with pytest.raises(Overloaded, match=r"^64 calls are open, as many as server\.max_calls; try"):
        admission.enter(BOB)
    for _ in range(64):
        admission.leave(ALICE)
    assert filled(admission, ALICE) == 56
    with pytest.raises(Overloaded, match="key alice: 56 calls are open, its share of 64"):
        admission.enter(ALICE)
    assert filled(admission, BOB) == 7
    assert filled(admission, Caller(key("carol"))) == 1  # who has none may always have one


def test_weights_count() -> None:
    heavy = Caller(key("heavy", weight=8))
    admission = Admission(64, "server.max_calls")
    admission.enter(BOB)
    assert filled(admission, ALICE) == 56
    for _ in range(56):
        admission.leave(ALICE)
    assert filled(admission, heavy) == 62


def test_where_there_is_no_limit_or_no_key_there_are_no_shares() -> None:
    assert filled(Admission(0, "server.max_calls"), ALICE) == 1000
    assert filled(Admission(64, "server.max_calls"), Caller()) == 64
