"""An engine's places, and that one tenant cannot have them all where others come."""

from __future__ import annotations

import pytest

from jaxserve.engine.errors import QueueFull
from jaxserve.engine.request_places import RequestPlaces
from jaxserve.sched.request import InvalidRequest, Request, SamplingParams


def ask(name: str, tenant: str = "", n: int = 1, weight: float | None = None) -> Request:
    return Request(name, (0,), SamplingParams(4, n=n), tenant=tenant, weight=weight)


def fill(places: RequestPlaces, tenant: str, most: int = 1000) -> int:
    """How many more it gets."""
    for number in range(most):
        try:
            places.reserve(ask(f"{tenant}/{len(places)}/{number}", tenant))
        except QueueFull:
            return number
    raise AssertionError("nobody is refused")


@pytest.mark.parametrize("tenant", ["", "alone"])
def test_who_is_alone_may_have_all_of_them(tenant: str) -> None:
    places = RequestPlaces(16)
    assert fill(places, tenant) == 16


def test_where_others_come_one_leaves_some() -> None:
    places = RequestPlaces(80)
    places.reserve(ask("first", "light"))
    assert fill(places, "heavy") == 70
    assert places.end("first")
    with pytest.raises(QueueFull, match="70 continuations of key heavy are queued or running, its"):
        places.reserve(ask("more", "heavy"))
    assert fill(places, "light") > 5


def test_places_come_back_as_continuations_end() -> None:
    places = RequestPlaces(4)
    places.reserve(ask("a", n=3))
    with pytest.raises(QueueFull, match="4 continuations are queued or running"):
        places.reserve(ask("b", n=2))
    with pytest.raises(InvalidRequest, match="already being served"):
        places.reserve(ask("a"))
    with pytest.raises(InvalidRequest, match="n: 5 continuations; at most 4"):
        places.check(ask("c", n=5))
    assert [places.end("a") for _ in range(3)] == [False, False, True]
    assert not places
    places.reserve(ask("b", n=4))
    assert places.ids == ["b"]
    places.clear()
    assert not places.ids and fill(places, "") == 4


def test_a_small_queue_still_takes_each_tenants_first() -> None:
    places = RequestPlaces(2)
    places.reserve(ask("a", "one", n=1))
    places.reserve(ask("b", "two", n=1))
    assert len(places) == 2
