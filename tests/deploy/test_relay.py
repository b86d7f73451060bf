"""What becomes of an answer when the replica that gives it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jaxserve.deploy.moves import relay as module
from jaxserve.deploy.moves.relay import Pieces, Relay, ReplicaLost
from jaxserve.deploy.replicas import Where
from jaxserve.server.moves import resume_point
from jaxserve.server.moves.resume_point import Begun, Passed, ResumePoint

HEAD, DEAD, AWAY, FAILED, FULL = "head", "dead", "away", "failed", "full"
REFUSED = "refused"  # for good
NOBODY = "nobody"  # is there who could answer
BEGUN = Begun("fp_1", "r")


class Fleet:
    """Gives one script after the other: pieces, and how it ends."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self._scripts = list(scripts)
        self.closed = 0
        self.avoided: list[tuple[str, ...]] = []
        self.points: list[ResumePoint] = []

    @property
    def unused(self) -> int:
        return len(self._scripts)

    async def send(self, where: Where, point: ResumePoint, pages: Mapping[bytes, Any]) -> Pieces:
        self.avoided.append(where.avoid)
        self.points.append(point.model_copy(deep=True))
        script = self._scripts.pop(0)
        try:
            for step in script:
                if step in (DEAD, AWAY):
                    raise ReplicaLost("out of memory", dead=step == DEAD)
                if step == FAILED:
                    raise ReplicaLost("the engine failed", dead=True, replica="b")
                if step == NOBODY:
                    await asyncio.Event().wait()
                if step == FULL:
                    raise ReplicaLost("its queue is full", dead=True)
                if step == REFUSED:
                    raise ReplicaLost("max_tokens is 1", dead=True, final=True)
                yield list(step)
        finally:
            self.closed += 1


def read(fleet: Fleet) -> tuple[list[str], str | None]:
    """The parts that were passed on, and what ended them."""
    parts: list[str] = []

    async def run() -> None:
        point = ResumePoint(arrived=1.0, key="0" * 32)
        async for piece in Relay(fleet.send, lambda part: part != HEAD, point).pieces():
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
    assert fleet.avoided == [(), ("b",)]


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
        pieces = Relay(fleet.send, lambda part: True, ResumePoint(arrived=1.0)).pieces()
        assert await anext(pieces) == ["a"]
        await pieces.aclose()

    asyncio.run(run())
    assert fleet.closed == 1


def passed(*tokens: int, number: int = 0, given_up: bool = False) -> Passed:
    times = tuple(float(token) for token in tokens)
    return Passed(number, tokens, times, given_up=given_up)


def test_an_answer_whose_tokens_are_known_goes_on_behind_them() -> None:
    first = [[BEGUN, HEAD, "a", passed(1)], ["b", passed(2, 3)], [passed(4)], DEAD]
    fleet = Fleet(first, [[BEGUN, "c", passed(5, number=1)], AWAY], [[BEGUN, "d"]])
    assert read(fleet) == ([HEAD, "a", "b", "c", "d"], None)
    begin, second, third = fleet.points
    assert not begin.outputs and not begin.moved and begin.fingerprint == ""
    assert [(one.number, one.tokens, one.times) for one in second.outputs] == [
        (0, [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    ]
    assert [one.tokens for one in third.outputs] == [[1, 2, 3, 4], [5]]
    assert (second.fingerprint, second.why, len(second.moved)) == ("fp_1", "lost", 1)
    assert len(third.moved) == 2 and {one.key for one in fleet.points} == {"0" * 32}
    assert all(
        ResumePoint.model_validate_json(one.model_dump_json()) == one for one in fleet.points
    )


def test_headers_that_wait_for_the_first_token_are_not_lost() -> None:
    """They were made by the first replica; the other one leaves them out."""
    fleet = Fleet([[BEGUN, HEAD, passed(given_up=True)], [passed(1)], DEAD], [["a", passed(2)]])
    assert read(fleet) == ([HEAD, "a"], None)
    begin = Fleet([[BEGUN, HEAD, passed(given_up=True)], DEAD], [[HEAD, "a"]])
    assert read(begin) == ([HEAD, "a"], None), "before any token it begins anew"
    assert not begin.points[1].outputs


def test_a_full_replica_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.001)
    begun = [[BEGUN, "a", passed(1)], DEAD]
    fleet = Fleet(begun, [FULL], [FAILED], [FULL], [["b"]])
    assert read(fleet) == (["a", "b"], None)
    assert fleet.avoided[1:] == [(), (), ("b",), ("b",)]
    assert len(fleet.points[-1].moved) == 1, "it has moved once"


def test_what_nobody_resumes_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESUME_S", 0.02)
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
    fleet = Fleet([[BEGUN, "a", passed(1)], DEAD], *[[FULL]] * 100)
    parts, error = read(fleet)
    assert parts == ["a"] and error is not None and "its queue is full" in error
    assert fleet.unused > 90


def test_nor_does_it_wait_for_longer_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESUME_S", 0.02)
    monkeypatch.setattr(module, "_PAUSE_S", 0.001)
    fleet = Fleet([[BEGUN, "a", passed(1)], DEAD], *[[NOBODY]] * 100)
    parts, error = read(fleet)
    assert parts == ["a"] and error is not None and "no other one" in error
    assert 1 + 100 - fleet.unused == fleet.closed


def test_what_is_too_long_to_be_kept_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_point, "MOST_VALUES", 3)
    fleet = Fleet([[BEGUN, "a", passed(1, 2)], ["b", passed(3, 4)], ["c", passed(5)], DEAD], [])
    assert read(fleet)[0] == ["a", "b", "c"] and fleet.unused == 1


def test_what_is_refused_for_good_is_not_tried_again() -> None:
    """A replica of the same system would say the same."""
    begun = [BEGUN, "a", Passed(0, (1,), (0.1,))]
    fleet = Fleet([begun, DEAD], [REFUSED], [["never"]])
    parts, error = read(fleet)
    assert parts == ["a"] and error is not None and "max_tokens is 1" in error
    assert fleet.unused == 1


def test_it_may_be_told_to_turn_again_while_it_does() -> None:
    """Whoever tells many answers is not stopped by one."""
    fleet, told = Fleet([[HEAD], NOBODY], [[HEAD, "b"]]), list[str]()

    async def run() -> None:
        relay = Relay(fleet.send, lambda part: part != HEAD, ResumePoint(arrived=1.0))

        def turn() -> None:
            relay.turn()
            told.append("turn")

        async def later() -> None:
            while not relay._held:
                await asyncio.sleep(0)
            turn()
            for _ in range(3):
                asyncio.get_running_loop().call_soon(turn)

        telling = asyncio.create_task(later())
        told.extend([part async for piece in relay.pieces() for part in piece])
        await telling

    asyncio.run(run())
    assert told == [*4 * ["turn"], HEAD, "b"]


def test_one_that_has_waited_where_it_goes_on_may_move_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it has said nothing there for longer than others have to begin."""
    monkeypatch.setattr(module, "RESUME_S", 0.0)
    begun = [BEGUN, "a", passed(1)]
    fleet = Fleet([begun, DEAD], [[Begun("fp_1", "s")], NOBODY], [[BEGUN], ["b"]])

    async def run() -> list[str]:
        relay = Relay(fleet.send, bool, ResumePoint(arrived=1.0))

        async def later() -> None:
            while relay.replica != "s":
                await asyncio.sleep(0)
            relay.turn()

        telling = asyncio.create_task(later())
        told = [part async for piece in relay.pieces() for part in piece]
        await telling
        return told

    assert asyncio.run(run()) == ["a", "b"] and len(fleet.points[-1].moved) == 2


class Heard:
    """Of an answer."""

    def __init__(self) -> None:
        self.begun_at: list[int] = []  # after how many tokens

    def begun(self, relay: Relay) -> None:
        self.begun_at.append(relay.tokens)

    def prefilled(self, relay: Relay) -> None:
        pass


def test_it_is_told_who_has_begun_also_if_the_same_one_goes_on() -> None:
    """As where nobody else was there, so that what waits is not taken for what runs."""
    piece, heard = [b"a", Passed(0, (1,), (0.1,))], Heard()
    fleet = Fleet([[BEGUN], piece, DEAD], [[BEGUN], [b"b"]])

    async def run() -> None:
        point = ResumePoint(arrived=1.0)
        relay = Relay(fleet.send, bool, point, watch=heard)
        assert [part async for piece in relay.pieces() for part in piece] == [b"a", b"b"]

    asyncio.run(run())
    assert heard.begun_at == [0, 1]
