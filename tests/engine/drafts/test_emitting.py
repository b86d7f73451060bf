"""Which of a step's tokens are a continuation's."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.engine.in_flight import Emitting

NOBODY: Any = None


@pytest.mark.parametrize(
    ("draft", "masked", "tokens"),
    [
        ((), None, [5]),
        ((5, 6), None, [5, 6, 7]),
        ((5, 9), None, [5, 6]),
        ((9, 6), None, [5]),
        ((5, 6), 3, [5, 6, 7]),
        ((5, 6), 2, [5, 6]),  # behind the second there is no mask: what is drawn there is nobody's
        ((5, 6), 1, [5]),
    ],
)
def test_tokens_stand_as_far_as_drafts_are_right(
    draft: tuple[int, ...], masked: int | None, tokens: list[int]
) -> None:
    sampled = [0, 5, 6, 7, 8]
    assert Emitting(1, NOBODY, draft, "known", masked).tokens(sampled) == tokens
