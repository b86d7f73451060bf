"""What prompts share: subsets, truncation, the ids of blocks, and how much a cache could find."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.simulator.workloads.prefixes import Prefixes, parents
from jaxserve.simulator.workloads.shared_prefixes import block_keys, reusable_tokens
from jaxserve.simulator.workloads.workload import Lengths, Workload, WorkloadError, all_at_once

Stream = tuple[tuple[int, int], ...]


@st.composite
def workloads(draw: st.DrawFn, most: int = 12) -> Workload:
    """Any tree of prompts."""
    rows: list[tuple[int, int, int, int]] = []
    for number in range(draw(st.integers(1, most))):
        prompt, output = draw(st.integers(1, 12)), draw(st.integers(1, 6))
        source = draw(st.integers(-1, number - 1))
        shared = 0
        if source >= 0:
            shared = draw(st.integers(1, min(prompt, rows[source][0] + rows[source][1])))
        rows.append((prompt, output, source, shared))
    prompt, output, source, shared = np.array(rows, np.int64).T
    arrival = np.cumsum(draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    return Workload.create(
        arrival.astype(float), Lengths(prompt, output), prefixes=Prefixes(source, shared)
    )


def streams(workload: Workload) -> list[Stream]:
    """The tokens that the columns stand for: each new one is a pair of its request and place."""
    found: list[Stream] = []
    for number, total in enumerate(workload.lengths.total.tolist()):
        source, shared = int(workload.prefix_of[number]), int(workload.prefix_len[number])
        begin = found[source][:shared] if shared else ()
        found.append(begin + tuple((number, at) for at in range(shared, total)))
    return found


def common(one: Stream, other: Stream) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def tree(found: list[Stream]) -> np.ndarray:
    """Tokens that each two have in common at the front."""
    lengths = [common(one, other) for one in found for other in found]
    return np.array(lengths, np.int64).reshape(len(found), len(found))


@settings(max_examples=80)
@given(workloads(), st.data())
def test_a_subset_shares_what_it_shared_before(workload: Workload, data: st.DataObject) -> None:
    size = len(workload)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    kept = np.flatnonzero(mask)
    before = tree(streams(workload))[np.ix_(kept, kept)]
    for which in (mask, kept):
        np.testing.assert_array_equal(tree(streams(workload.select(which))), before)


@given(workloads())
def test_the_first_requests_keep_their_columns(workload: Workload) -> None:
    for count in range(1, len(workload) + 1):
        few = workload.first(count)
        np.testing.assert_array_equal(few.prefix_of, workload.prefix_of[:count])
        np.testing.assert_array_equal(few.prefix_len, workload.prefix_len[:count])


@given(st.lists(workloads(6), min_size=1, max_size=3))
def test_merged_workloads_share_within_their_parts_alone(parts: list[Workload]) -> None:
    merged, order = Workload.merged(parts)
    before = [
        [(part, token) for token in stream]
        for part, one in enumerate(parts)
        for stream in streams(one)
    ]
    expected = tree([tuple(before[i]) for i in order])  # type: ignore[arg-type]
    np.testing.assert_array_equal(tree(streams(merged)), expected)


@given(workloads(), st.integers(2, 20))
def test_truncated_prompts_share_what_is_left(workload: Workload, total: int) -> None:
    cut = workload.within(total)
    # What follows a prompt that was cut is another output.
    expected = np.minimum(tree(streams(workload)), cut.prompt_len[:, None])
    below = np.tril_indices(len(cut), -1)
    np.testing.assert_array_equal(tree(streams(cut))[below], expected[below])


@settings(max_examples=80)
@given(workloads(), st.integers(1, 5), st.data())
def test_blocks_have_one_id_exactly_if_they_and_all_before_are_the_same_tokens(
    workload: Workload, size: int, data: st.DataObject
) -> None:
    keys, found = block_keys(workload, size), streams(workload)
    tokens_of: dict[int, Stream] = {}
    ids_of: dict[Stream, int] = {}
    seen: set[int] = set()
    expected = reusable_tokens(workload, size)
    for number, stream in enumerate(found):
        tokens = data.draw(st.integers(0, len(stream)))
        whole = keys.of(number, len(stream))
        np.testing.assert_array_equal(keys.of(number, tokens), whole[: tokens // size])
        assert len(whole) == len(stream) // size
        for block, key in enumerate(whole.tolist()):
            front = stream[: (block + 1) * size]
            assert tokens_of.setdefault(key, front) == front
            assert ids_of.setdefault(front, key) == key
        prompt = keys.of(number, int(workload.prompt_len[number])).tolist()
        assert expected[number] == size * sum(key in seen for key in prompt)
        seen.update(whole.tolist())


@given(workloads(), st.integers(1, 5))
def test_parents_share_less_and_less(workload: Workload, size: int) -> None:
    """So that nothing walks further than a stream is long."""
    shared = workload.prefix_len // size
    parent = parents(workload.prefix_of, shared)
    follows = parent >= 0
    assert (shared[parent[follows]] < shared[follows]).all()
    assert (follows == (shared > 0)).all()


def test_who_begins_as_one_that_is_left_out_begins_as_its_other_follower() -> None:
    lengths = Lengths(np.array([8, 9, 9, 9]), np.ones(4, np.int64))
    prefixes = Prefixes(np.array([-1, 0, 0, 1]), np.array([0, 5, 7, 3]))
    workload = Workload.create(np.arange(4.0), lengths, prefixes=prefixes)
    few = workload.select(np.array([1, 2, 3]))
    assert few.prefix_of.tolist() == [-1, 0, 0]
    assert few.prefix_len.tolist() == [0, 5, 3]


@pytest.mark.parametrize(
    ("source", "shared", "problem"),
    [
        ([-1, 1], [0, 1], r"request 2: prefix_of must be .* earlier request, or -1, got 1"),
        ([-2, -1], [0, 0], r"request 1: prefix_of must be .*, got -2"),
        ([1, -1], [1, 0], r"request 1: prefix_of must be .*, got 1"),
        ([-1, -1], [0, 3], "request 2: prefix_len must be 0 to 0, .* got 3"),
        ([-1, 0], [0, 0], "request 2: prefix_len must be 1 to 6, .* got 0"),
        ([-1, 0], [0, 7], "request 2: prefix_len must be 1 to 6, .* got 7"),
        ([-1], [0], "1 prefix_of and 1 prefix_len for 2 requests"),
    ],
)
def test_columns_that_cannot_be_are_refused(
    source: list[int], shared: list[int], problem: str
) -> None:
    lengths = Lengths(np.array([4, 9]), np.array([2, 2]))
    prefixes = Prefixes(np.array(source), np.array(shared))
    with pytest.raises(WorkloadError, match=problem):
        Workload.create(all_at_once(2), lengths, prefixes=prefixes)
    with pytest.raises(WorkloadError, match="prefix_len must be 1 to 4"):
        shorter = dataclasses.replace(lengths, prompt_len=np.array([9, 4]))
        some = Prefixes(np.array([-1, 0]), np.array([0, 5]))
        Workload.create(all_at_once(2), shorter, prefixes=some)


def test_nothing_is_shared_unless_it_is_said() -> None:
    made = Workload.create(all_at_once(3), Lengths(np.full(3, 7), np.full(3, 9)))
    assert made.prefix_of.tolist() == [-1] * 3 and not made.prefix_len.any()
    assert made.prefix_of.dtype == made.prefix_len.dtype == np.int64
    assert not reusable_tokens(made, 1).any()
    with pytest.raises(WorkloadError, match="block_size must be at least 1"):
        block_keys(made, 0)
    with pytest.raises(WorkloadError, match="block_size must be at least 1"):
        reusable_tokens(made, -4)
    with pytest.raises(WorkloadError, match="request 2 has 16 tokens, not 17"):
        block_keys(made, 4).of(1, 17)
