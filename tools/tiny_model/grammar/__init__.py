"""A story grammar: endless small stories with names, causes and endings, made by rules.

Every story is made from one seed, so that the corpus needs no file: `story(7)` is the same text
on every machine. The texts and the rules are this project's own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from .texts import read
from .writer import Writer

PLOTS = read("plots.txt")


def write(seed: int) -> Writer:
    """Write the story of `seed` and return its writer, which knows the cast and the slots."""
    writer = Writer(random.Random(seed))
    writer.play(writer.pick(list(PLOTS.values())))
    return writer


def story(seed: int) -> str:
    """The text of the story of `seed`: one paragraph, 40 to 250 words."""
    return write(seed).text()


def stories(first_seed: int) -> Iterator[str]:
    """An endless stream of stories, seed after seed."""
    return map(story, itertools.count(first_seed))
