"""The result of a drafter."""

from __future__ import annotations

from typing import NamedTuple


class Draft(NamedTuple):
    """Tokens that may come next.

    Attributes:
        tokens: in order, at least one.
        source: the drafter's name.
        strength: strength of the evidence, comparable among drafts from this source. For lookups
        the class of the match's length: 0 for 2 or 3 tokens, 1 for 4 to 7, 2 for 8 to 15, 3 for 16
        and more.
        certain: whether it cannot be wrong, since a grammar allows no other token.
    """

    tokens: tuple[int, ...]
    source: str
    strength: int = 0
    certain: bool = False


def strength_of(length: int) -> int:
    """The class of a match of `length` tokens, see `Draft.strength`."""
    return 3 if length > 15 else max(length.bit_length() - 2, 0)
