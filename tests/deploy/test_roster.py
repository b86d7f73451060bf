"""Who runs, who is to go, and who can take over."""

from __future__ import annotations

from jaxserve.deploy.moves.roster import Roster


def test_a_replica_leaves_if_another_can_go_on() -> None:
    roster, told = Roster(), list[tuple[str, ...]]()
    roster.listen(lambda heard, changed: told.append(tuple(heard)))
    assert not roster.leaves("a", "fp"), "nobody knows it yet"
    roster.update({"a": "fp", "b": "fp", "c": "fp_2"})
    roster.update({"a": "fp", "b": "fp", "c": "fp_2"})
    assert not roster.leaves("a", "fp") and len(told) == 1
    roster.update({"b": "", "c": "fp_2"})
    assert roster.leaves("a", "fp") and not roster.leaves("b", "fp") and len(told) == 2
    assert not roster.leaves("a", "fp_of_another")
    roster.update({"c": "fp_2", "d": ""})
    assert not roster.leaves("a", "fp"), "the new one has not said what it is"
    roster.update({"c": "fp_2", "d": "fp"})
    assert roster.leaves("a", "fp") and roster.leaves("b", "fp")
    roster.update({})
    assert not roster.leaves("a", "fp"), "nobody is left"


def test_it_passes_news_on_and_forgets_who_left_long_ago() -> None:
    roster, told = Roster(), list[tuple[str, ...]]()
    roster.listen(lambda heard, changed: told.append(tuple(heard)))
    for number in range(2000):
        roster.update({"a": "fp", f"b{number}": "fp"}, ["a"])
    assert told == [("a",)] * 2000
    roster.update({"a": "fp"})
    assert roster.leaves("b1999", "fp") and not roster.leaves("b0", "fp")
    assert len(roster._seen) < 1100
