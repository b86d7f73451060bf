"""Drafts come from where they should, the best first, and never from another tenant."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.drafts.draft import Draft, strength_of
from jaxserve.engine.drafts.drafting import EARLIER, KNOWN, TENANTS, Drafting, Drafts
from jaxserve.engine.drafts.lookup import EARLIER_OUTPUTS, PROMPT_LOOKUP
from jaxserve.engine.drafts.prediction import AHEAD, MOST_TOKENS, PREDICTION, Prediction
from jaxserve.engine.in_flight import Emitting

LARGEST = 2**31 - 1


def even(source: str, strength: int) -> float:
    return 0.5


def prefer(wanted: str):  # type: ignore[no-untyped-def]
    return lambda source, strength: float(source == wanted) + strength / 100


def feed(drafting: Drafting, tokens: Sequence[int]) -> None:
    for token in tokens:
        drafting.append(token)


def ended(drafts: Drafts, output: Sequence[int], tenant: str = "a", salt: str = "") -> None:
    drafting = drafts.of((1, 2, 3), tenant, salt)
    feed(drafting, output)
    drafting.end(output)


def found(drafts: Drafts, tenant: str, salt: str = "") -> Draft | None:
    return drafts.of((50, 51), tenant, salt).propose(4, even)


def test_the_prompt_is_looked_up() -> None:
    drafting = Drafts().of((1, 2, 3, 4, 5, 6, 7, 8))
    feed(drafting, (9, 2, 3))
    assert drafting.propose(3, even) == Draft((4, 5, 6), PROMPT_LOOKUP, 0)
    feed(drafting, (4, 5))
    assert drafting.propose(3, even) == Draft((6, 7, 8), PROMPT_LOOKUP, 1)
    assert drafting.propose(0, even) is None
    feed(drafting, (1000,))
    assert drafting.propose(3, even) is None


def test_strength_is_the_class_of_the_length() -> None:
    lengths = (0, 3, 4, 7, 8, 15, 16, 32)
    assert [strength_of(length) for length in lengths] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_earlier_outputs_are_found_by_who_may() -> None:
    drafts = Drafts()
    ended(drafts, (50, 51, 52, 53), "a")
    assert found(drafts, "a") == Draft((52, 53), EARLIER_OUTPUTS, 0)
    assert found(drafts, "b") is None
    assert found(drafts, "a", "salt") is None
    ended(drafts, (50, 51, 60), "a", "salt")
    assert found(drafts, "a", "salt") == Draft((60,), EARLIER_OUTPUTS, 0)
    assert found(drafts, "a") == Draft((52, 53), EARLIER_OUTPUTS, 0)
    assert found(drafts, "asalt") is None


def test_shared_ones_are_found_by_all_with_the_salt() -> None:
    """As the keys of blocks have it."""
    drafts = Drafts(shared=True)
    ended(drafts, (50, 51, 52, 53), "a")
    assert found(drafts, "b") == Draft((52, 53), EARLIER_OUTPUTS, 0)
    assert found(drafts, "b", "salt") is None


@pytest.mark.promise(15)
@given(
    work=st.lists(
        st.tuples(
            st.sampled_from(["", "a", "b"]),
            st.sampled_from(["", "s"]),
            st.lists(st.integers(0, 3), max_size=12),
        ),
        max_size=12,
    ),
    shared=st.booleans(),
)
def test_no_draft_is_another_tenants_text(
    work: list[tuple[str, str, list[int]]], shared: bool
) -> None:
    """Everybody's tokens are of their own range; prompts have those of all."""
    drafts = Drafts(shared=shared)
    ranges: dict[tuple[str, str], int] = {}
    for tenant, salt, output in work:
        base = 10 * ranges.setdefault(("" if shared else tenant, salt), len(ranges) + 1)
        drafting = drafts.of((*range(2), base), tenant, salt)
        mine = [base + token for token in output]
        for token in mine:
            drafting.append(token)
            draft = drafting.propose(3, prefer(EARLIER_OUTPUTS))
            assert draft is None or set(draft.tokens) <= {0, 1, *range(base, base + 10)}
        # Who knows the last tokens of another still gets nothing of theirs.
        for other in set(ranges.values()) - {base // 10}:
            asked = drafts.of((10 * other, 10 * other, 10 * other + 1), tenant, salt)
            assert asked.propose(3, even) is None
        drafting.end(mine)


def test_no_output_and_one_token_are_ends_too() -> None:
    drafts = Drafts()
    ended(drafts, ())
    ended(drafts, (50,))
    ended(drafts, (51, 70))
    assert found(drafts, "a") is None, "not across two outputs"


def test_tenants_that_asked_long_ago_are_forgotten() -> None:
    drafts = Drafts()
    ended(drafts, (50, 51, 52), "first")
    ended(drafts, (50, 51, 53), "second")
    for other in range(TENANTS - 1):
        assert found(drafts, "first") is not None
        drafts.of((1,), f"tenant {other}")
    assert found(drafts, "first") is not None
    assert found(drafts, "second") is None
    assert len(drafts._outputs) == TENANTS


def test_one_tenants_outputs_are_bounded() -> None:
    drafts = Drafts()
    for begin in range(0, 4 * EARLIER, 10_000):
        ended(drafts, range(begin, begin + 10_000))
    (index,) = drafts._outputs.values()
    assert len(index) <= EARLIER
    assert index.nbytes <= 769 * 1024


def test_many_threads_may_ask_at_once() -> None:
    drafts, made = Drafts(), list[Drafting]()
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        made.extend(drafts.of((1, 2, 3), f"tenant {i}") for i in range(TENANTS))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 * TENANTS
    assert len({id(one._outputs) for one in made}) == len(drafts._outputs) == TENANTS


def test_the_best_by_the_estimate_comes() -> None:
    drafts = Drafts()
    ended(drafts, (50, 51, 70))
    drafting = drafts.of((50, 51, 60, 61, 50, 51), "a", prediction=(80, 81))
    for source, first in ((PROMPT_LOOKUP, 60), (EARLIER_OUTPUTS, 70), (PREDICTION, 80)):
        draft = drafting.propose(5, prefer(source))
        assert draft is not None
        assert (draft.source, draft.tokens[0]) == (source, first)
    draft = drafting.propose(5, even)
    assert draft is not None
    assert draft.source == PREDICTION, "the client's word, if nothing speaks against it"


def test_long_texts_are_bounded() -> None:
    drafting = Drafts().of((7,) * 100_000, prediction=(7,) * 200_000)
    feed(drafting, (7,) * 40_000)
    assert len(drafting._known) <= KNOWN
    assert drafting._known.nbytes <= 385 * 1024
    draft = drafting.propose(7, prefer(PROMPT_LOOKUP))
    assert draft == Draft((7,) * 7, PROMPT_LOOKUP, 3)


# Predictions.


def follow(prediction: Prediction, tokens: Sequence[int]) -> int:
    """How many of the tokens it knew."""
    known = 0
    for token in tokens:
        draft = prediction.propose(1)
        known += draft is not None and draft.tokens == (token,)
        prediction.append(token)
    return known


def test_a_prediction_is_followed_from_its_beginning() -> None:
    prediction = Prediction(range(100, 130))
    assert prediction.propose(3) == Draft((100, 101, 102), PREDICTION, 0)
    assert follow(prediction, range(100, 120)) == 20
    assert prediction.propose(3) == Draft((120, 121, 122), PREDICTION, 3)
    assert follow(prediction, range(120, 130)) == 10
    assert prediction.propose(3) is None
    prediction.append(5)
    assert prediction.propose(3) is None


EDITS = {
    "before": ((1, 2, 3), 0),
    "replaced": ((*range(100, 110), 1, 2), 12),
    "inserted": ((*range(100, 110), 1), 10),
    "left out": (tuple(range(100, 110)), 15),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_prediction_goes_on_after_an_edit(edit: str) -> None:
    begin, rest = EDITS[edit]
    prediction = Prediction(range(100, 150))
    follow(prediction, begin)
    follow(prediction, range(100 + rest, 102 + rest))
    assert follow(prediction, range(102 + rest, 150)) == 48 - rest


def test_it_goes_on_at_the_nearest_place() -> None:
    """And not before the last one that was as predicted."""
    prediction = Prediction((1, 2, 3, 4, 5, 6, 8, 9, 10, 7, 8, 9, 11, 8, 9, 12))
    follow(prediction, (1, 2, 3, 4, 5, 6, 8, 9, 10))
    follow(prediction, (0, 8, 9))
    assert prediction.propose(2) == Draft((11, 8), PREDICTION, 0)


def test_a_wrong_place_is_left_again() -> None:
    """Two tokens by chance, far ahead, do not make it miss what is between."""
    prediction = Prediction((*range(100, 140), 1, 2, 3))
    follow(prediction, (*range(100, 110), 1, 2, 0))
    follow(prediction, (110, 111))
    assert prediction.propose(2) == Draft((112, 113), PREDICTION, 0)


@pytest.mark.parametrize(("token", "between"), [(1, 1 << 24), (1 << 8, 1), (1 << 16, 1)])
def test_tokens_are_not_found_across_two(token: int, between: int) -> None:
    """Bytes of two tokens may be those of another, many times."""
    prediction = Prediction((token,) * MOST_TOKENS)
    follow(prediction, (between, between))
    assert prediction.propose(1) is None
    follow(prediction, (token, token))
    assert prediction.propose(2) == Draft((token, token), PREDICTION, 0)


@pytest.mark.parametrize("token", [0, LARGEST])
def test_a_prediction_of_one_token(token: int) -> None:
    prediction = Prediction((token,) * 200_000)
    for _ in range(100):
        follow(prediction, (token, 3))
        assert prediction.propose(1) is None
    assert follow(prediction, (token,) * 10) == 8


def test_what_is_far_ahead_is_not_looked_for() -> None:
    far = Prediction((*range(10, 10 + AHEAD), 1, 2, 3))
    assert follow(far, (1, 2, 3)) == 0
    near = Prediction((*range(10, 8 + AHEAD), 1, 2, 3))
    assert follow(near, (1, 2, 3)) == 1


def test_a_longer_prediction_is_cut() -> None:
    prediction = Prediction(range(MOST_TOKENS + 50_000))
    assert follow(prediction, range(MOST_TOKENS + 10)) == MOST_TOKENS


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
