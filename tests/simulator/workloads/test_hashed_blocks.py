"""Mooncake's traces: what prompts share by the ids of their blocks, and malformed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.simulator.workloads.hashed_blocks import BLOCK, HashedPrompts
from jaxserve.simulator.workloads.shared_prefixes import reusable_tokens
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.traces import read_trace
from jaxserve.simulator.workloads.workload import WorkloadError


def line(prompt: int, ids: Any, at: float = 0, **more: Any) -> str:
    record = {"timestamp": at, "input_length": prompt, "output_length": 9, "hash_ids": ids}
    return json.dumps(record | more) + "\n"


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "m.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_equal_ids_after_equal_ids_are_shared(tmp_path: Path) -> None:
    rows = [
        (1100, [4, 5, 6]),
        (1024, [4, 7]),  # one block
        (1500, [4, 5, 8]),  # two blocks of the first
        (1024, [5, 4]),  # the same ids elsewhere are other tokens
        (1300, [4, 5, 9]),  # the last of two that share two blocks
        (1100, [4, 5, 6]),  # the same prompt again
        (600, [4, 5]),  # ends within a block
        (700, None),
        (512, [10]),
    ]
    text = "".join(line(prompt, ids, at) for at, (prompt, ids) in enumerate(rows))
    made = WorkloadSpec(write(tmp_path, text)).make_workload()
    assert made.prefix_of.tolist() == [-1, 0, 0, -1, 2, 0, 5, -1, -1]
    assert made.prefix_len.tolist() == [0, 512, 1024, 0, 1024, 1100, 600, 0, 0]
    assert reusable_tokens(made, 512).tolist() == [0, 512, 1024, 0, 1024, 1024, 512, 0, 0]
    assert WorkloadSpec(str(tmp_path / "m.jsonl"), 4).make_workload().prefix_len.sum() == 1536
    drawn = WorkloadSpec(str(tmp_path / "m.jsonl"), arrivals="poisson", rate=2.0).make_workload()
    np.testing.assert_array_equal(drawn.prefix_of, made.prefix_of)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, BLOCK)),
        max_size=12,
    )
)
def test_the_longest_common_prefix_is_found(rows: list[tuple[list[int], int]]) -> None:
    prompts = HashedPrompts()
    before: list[tuple[list[int], int]] = []
    for ids, rest in rows:
        length = (len(ids) - 1) * BLOCK + rest
        lengths = []
        for other, most in before:
            same = [a == b for a, b in zip(ids, other, strict=False)]
            blocks = same.index(False) if False in same else len(same)
            lengths.append(min(blocks * BLOCK, length, most))
        source, shared = prompts.add(ids, length)
        assert shared == max(lengths, default=0)
        assert (source >= 0) == (shared > 0)
        if shared:
            assert lengths[source] == shared
        before.append((ids, length))


GOOD = line(600, [1, 2]) + line(600, [1, 3])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD + line(600, "12"), r"m.jsonl:3: hash_ids must be a list, got '12'"),
        (GOOD + line(600, {"0": 1}), r"m.jsonl:3: hash_ids must be a list"),
        (GOOD + line(600, 7), r"m.jsonl:3: hash_ids must be a list, got 7"),
        (GOOD + line(600, [1]), r"m.jsonl:3: hash_ids must be 2, one for each 512 tokens of .* 1"),
        (GOOD + line(600, []), r"m.jsonl:3: hash_ids must be 2, .* got 0"),
        (GOOD + line(512, [1, 2]), r"m.jsonl:3: hash_ids must be 1, .* got 2"),
        (GOOD + line(600, [1, -2]), r"m.jsonl:3: hash_ids must be whole numbers .* got -2"),
        (GOOD + line(600, [1, 2.0]), r"m.jsonl:3: hash_ids must be whole numbers .* got 2.0"),
        (GOOD + line(600, [1, True]), r"m.jsonl:3: hash_ids must be whole numbers .* got True"),
        (GOOD + line(600, [1, None]), r"m.jsonl:3: hash_ids must be whole numbers .* got None"),
        (GOOD + line(600, [1, [2]]), r"m.jsonl:3: hash_ids must be whole numbers .* got \[2\]"),
        (GOOD + line(600, [1, "\ud800"]), r"m.jsonl:3: hash_ids must be whole numbers"),
        (GOOD + line(600, [1, 2**63]), r"m.jsonl:3: hash_ids must be whole numbers from 0 to"),
        (GOOD + line(600, [1, float("nan")]), r"m.jsonl:3: hash_ids must be whole numbers"),
        (GOOD + line(600, [1, 2]).replace("600", "1e400"), r"m.jsonl:3: input_length must be a"),
        (GOOD + line(600, [1, 2]).replace("600", "6" * 400), r"m.jsonl:3: input_length must be 1"),
        (GOOD + line(600, [1, 2]).replace("600", "6" * 9000), r"m.jsonl:3: not JSON \(Exceeds"),
        (GOOD + line(600, [1, 2]).replace("600", "0"), r"m.jsonl:3: input_length must be 1 to"),
        (GOOD + line(600, [1, 2]).replace("600", "-6"), r"m.jsonl:3: input_length must be a whole"),
        (GOOD + line(600, [1, 2]).replace("600", "true"), r"m.jsonl:3: input_length must be a num"),
        (GOOD + line(600, [1, 2]).replace("9", "null"), r"m.jsonl:3: output_length must be a num"),
        (GOOD + line(600, [1, 2], 1e300), None),
        (GOOD + line(600, [1, 2], float("inf")), r"m.jsonl:3: timestamp must be a time from 0"),
        (GOOD + line(600, [1, 2], 5) + line(600, [1, 2], 4), r"m.jsonl:4: arrives .* before the"),
        (GOOD + "[" * 100_000 + "\n", r"m.jsonl:3: not JSON"),
        (GOOD + '{"timestamp": 0\n', r"m.jsonl:3: not JSON"),
        (GOOD + "null\n", r"m.jsonl:3: a JSON object expected, got None"),
        (GOOD + "\0\0\n", r"m.jsonl:3: not JSON"),
        (GOOD + line(600, [1, 2], **{"class": "\ud800"}), r"m.jsonl:3: class: a name has letters"),
        (GOOD.encode() + b"\xed\xa0\x80\n", r"m.jsonl: not a text file"),
        ("", r"m.jsonl: no requests in it"),
        ("\n\n", r"m.jsonl: no requests in it"),
    ],
)
def test_malformed_lines_are_refused_with_file_line_and_field(
    tmp_path: Path, text: str | bytes, problem: str | None
) -> None:
    path = write(tmp_path, text)
    if problem is None:
        assert len(read_trace(path).lengths) == 3
        return
    with pytest.raises(WorkloadError, match=problem) as caught:
        read_trace(path)
    str(caught.value).encode()  # can be printed
