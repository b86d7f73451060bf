"""A story grammar: endless small stories with names, causes and endings, made by rule.

Every story is made from one seed, so that the corpus needs no file: `story(7)` is the same text
on every machine. The texts and the rules are this project's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from . import deeds, people, things, travels
from .writer import Writer

PLOTS: tuple[Callable[[Writer], None], ...] = (
    things.lost,
    things.sharing,
    things.mistake,
    things.present,
    things.mystery,
    things.baking,
    things.planting,
    people.helping,
    people.new_friend,
    people.fear,
    people.practice,
    people.contest,
    people.bedtime,
    travels.weather,
    travels.journey,
    travels.building,
    deeds.wish,
    deeds.promise,
    deeds.rescue,
)


def write(seed: int) -> Writer:
    """Write the story of `seed` and return its writer, which knows the cast and the slots."""
    writer = Writer(random.Random(seed))
    writer.pick(PLOTS)(writer)
    return writer


def story(seed: int) -> str:
    """The text of the story of `seed`: one paragraph, 40 to 250 words."""
    return write(seed).text()


def stories(first_seed: int) -> Iterator[str]:
    """An endless stream of stories, seed after seed."""
    seed = first_seed
    while True:
        yield story(seed)
        seed += 1
