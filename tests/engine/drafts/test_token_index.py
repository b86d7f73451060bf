"""The index finds what a slow and obvious search finds, in bounded memory and time."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.drafts.token_index import CANDIDATES, END, MOST, WINDOW, TokenIndex

LARGEST = 2**31 - 1
TOKENS = st.sampled_from([0, 1, 2, 50_000, LARGEST])
TEXTS = st.lists(TOKENS, max_size=80)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the last tokens are the same, as far as the index looks."""
    length = 0
    while length < min(WINDOW, len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def check(index: TokenIndex, held: list[int], known: TokenIndex, text: list[int]) -> None:
    """What `longest` finds in `held`, for the end of `text`, is the longest match, of the last
    places where its last two tokens are."""
    last = len(held) if known is not index else len(held) - 1
    lengths = {p: common(held[:p], text) for p in range(1, last + 1)}
    pairs = [p for p in sorted(lengths) if lengths[p] >= 2]
    position, length = index.longest(known, 0)
    # Others with the same hash may stand between them: the last one is always seen here, all if
    # there are few.
    if not pairs or len(text) < 2:
        assert length < 2
        return
    place = position - WINDOW
    assert lengths[place] == length
    assert length >= lengths[pairs[-1]]
    if len(set(held)) == 1 or len(pairs) <= CANDIDATES // 2:
        assert length == max(lengths.values())


@given(start=TEXTS, more=TEXTS)
def test_finds_the_longest_match_in_itself(start: list[int], more: list[int]) -> None:
    index, text = TokenIndex(MOST, start), list(start)
    check(index, text, index, text)
    for token in more:
        index.append(token)
        text.append(token)
        check(index, text, index, text)
    assert len(index) == len(text)


@given(outputs=st.lists(TEXTS, max_size=4), text=TEXTS)
def test_finds_the_longest_match_in_another(outputs: list[list[int]], text: list[int]) -> None:
    """However it was filled, and never across its ends."""
    filled, appended, held = TokenIndex(MOST), TokenIndex(MOST), list[int]()
    for output in outputs:
        filled.extend((*output, END))
        for token in (*output, END):
            appended.append(token)
        held += [*output, END]
    known = TokenIndex(MOST, text)
    check(filled, held, known, text)
    assert filled.longest(known, 0) == appended.longest(known, 0)
    position, length = filled.longest(known, 0)
    if length >= 2:
        followed = held[position - WINDOW :]
        assert filled.following(position, 5) == followed[: followed.index(END)][:5]


@settings(max_examples=40)
@given(
    limit=st.sampled_from([4, 7, 64, 300]),
    pieces=st.lists(st.one_of(TOKENS, st.lists(st.integers(0, 9), max_size=400)), max_size=30),
)
def test_holds_the_last_tokens_and_no_more_than_its_limit(
    limit: int, pieces: list[int | list[int]]
) -> None:
    index, text = TokenIndex(limit), list[int]()
    for piece in pieces:
        if isinstance(piece, int):
            index.append(piece)
            text.append(piece)
        else:
            index.extend(piece)
            kept = piece[-(limit // 2) :]
            text += kept
        held = text[-len(index) :] if len(index) else []
        assert limit // 2 <= len(index) <= limit or held == text
        assert index.following(WINDOW + index.dropped, len(held)) == held
        found, length = index.longest(index, 0)
        if length >= 2:
            assert common(held[: found - WINDOW - index.dropped], held) == length


def test_a_guess_is_kept_while_it_is_as_good() -> None:
    """Two places have the same three tokens before them: the one that was found first stays."""
    index = TokenIndex(MOST, [1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3])
    assert index.longest(index, 0) == (WINDOW + 8, 3)
    assert index.longest(index, WINDOW + 3) == (WINDOW + 3, 3)
    assert index.longest(index, WINDOW + 4) == (WINDOW + 8, 3), "no match there"
    assert index.longest(index, WINDOW + 500) == (WINDOW + 8, 3), "not there at all"


def test_a_match_is_kept_among_many_short_ones() -> None:
    """Its last two tokens came more often since than places are looked at."""
    copied = [11, 12, 13, 1, 2, 14, 15]
    index = TokenIndex(MOST, [*copied, *[1, 2, 3] * 20, 11, 12, 13])
    found, length = index.longest(index, 0)
    assert length == 3
    for token in (1, 2):
        index.append(token)
        found += 1
    assert index.longest(index, 0)[1] == 2
    found, length = index.longest(index, found)
    assert (length, index.following(found, 2)) == (5, [14, 15])


@given(period=st.lists(TOKENS, min_size=1, max_size=5), most=st.integers(1, 40))
def test_a_loop_goes_on(period: list[int], most: int) -> None:
    text = period * 20
    index = TokenIndex(MOST, text)
    found, _ = index.longest(index, 0)
    assert index.following(found, most) == (period * 40)[:most]


def test_one_token_repeated_costs_what_others_cost() -> None:
    """Places that are looked at, counted: a slow search would take 100,000 of them."""
    index = TokenIndex(MOST)
    for _ in range(100_000):
        index.append(7)
    looked = Counted(index._before)
    index._before = looked  # type: ignore[assignment]
    for _ in range(50):
        index.append(7)
        assert index.longest(index, 0)[1] == WINDOW
    assert looked.reads <= 50 * (CANDIDATES + 1)


class Counted(list[int]):
    """Counts reads of single items."""

    reads = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().__getitem__(at)


def test_memory_is_bounded() -> None:
    """12 bytes a token at the limit, whatever comes."""
    limit = 1 << 12
    index = TokenIndex(limit)
    for begin in range(0, 4 * limit, 999):
        index.extend(range(begin, begin + 999))
        assert index.nbytes <= 12 * limit + 8 * WINDOW + 4
