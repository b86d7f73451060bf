"""What becomes of an answer when the replica that gives it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from jaxserve.deploy.relay import Pieces, ReplicaLost, relay_response

HEAD, DEAD, AWAY, FAILED = "head", "dead", "away", "failed"


class Fleet:
    """Gives one script after the other: pieces, and how it ends."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self._scripts = list(scripts)
        self.closed = 0
        self.avoided: list[str] = []

    @property
    def unused(self) -> int:
        return len(self._scripts)

    async def send(self, avoided: str) -> Pieces:
        self.avoided.append(avoided)
        script = self._scripts.pop(0)
        try:
            for step in script:
                if step in (DEAD, AWAY):
                    raise ReplicaLost("out of memory", dead=step == DEAD)
                if step == FAILED:
                    raise ReplicaLost("the engine failed", dead=True, replica="b")
                yield list(step)
        finally:
            self.closed += 1


def read(fleet: Fleet) -> tuple[list[str], str | None]:
    """The parts that were passed on, and what ended them."""
    parts: list[str] = []

    async def run() -> None:
        async for piece in relay_response(fleet.send, lambda part: part != HEAD):
            parts.extend(piece)

    try:
        asyncio.run(run())
    except ReplicaLost as lost:
        return parts, str(lost)
    return parts, None


def test_an_answer_is_passed_on_as_it_comes() -> None:
    assert read(Fleet([[HEAD, "a"], ["b", "c"]])) == ([HEAD, "a", "b", "c"], None)


def test_an_answer_without_anything_in_it_is_passed_on_too() -> None:
    assert read(Fleet([[HEAD]])) == ([HEAD], None)


@pytest.mark.parametrize("before", [[], [[HEAD]]])
def test_without_a_part_it_goes_elsewhere_and_nothing_of_the_first_is_seen(
    before: list[Any],
) -> None:
    fleet = Fleet([*before, DEAD], [[HEAD, "b"]])
    assert read(fleet) == ([HEAD, "b"], None)
    assert fleet.closed == 2


def test_one_that_only_serves_no_more_is_avoided() -> None:
    fleet = Fleet([[HEAD], FAILED], [[HEAD, "b"]])
    assert read(fleet) == ([HEAD, "b"], None)
    assert fleet.avoided == ["", "b"]


def test_it_goes_elsewhere_once() -> None:
    fleet = Fleet([DEAD], [DEAD], [["never"]])
    parts, error = read(fleet)
    assert parts == [] and error is not None and "out of memory" in error
    assert fleet.unused == 1


def test_what_has_begun_is_never_begun_again() -> None:
    fleet = Fleet([[HEAD, "a"], ["b"], DEAD], [["never"]])
    parts, error = read(fleet)
    assert parts == [HEAD, "a", "b"] and error is not None
    assert fleet.unused == 1


def test_what_may_still_be_computed_is_not_sent_again() -> None:
    fleet = Fleet([AWAY], [["never"]])
    assert read(fleet)[0] == [] and fleet.unused == 1


def test_who_stops_reading_ends_the_answer() -> None:
    fleet = Fleet([["a"], ["b"]])

    async def run() -> None:
        pieces = relay_response(fleet.send, lambda part: True)
        assert await anext(pieces) == ["a"]
        await pieces.aclose()

    asyncio.run(run())
    assert fleet.closed == 1
