"""Arrivals and lengths (sched/workloads/workload.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.workloads.workload import (
    Lengths,
    Workload,
    WorkloadError,
    all_at_once,
    fixed_lengths,
    gamma_arrivals,
    poisson_arrivals,
    read_lengths,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("cv", "tolerance"), [(0.25, 0.01), (1.0, 0.02), (3.0, 0.1)])
def test_gamma_gaps_have_the_rate_and_the_cv_asked_for(cv: float, tolerance: float) -> None:
    gaps = np.diff(gamma_arrivals(4.0, cv, 100_000, rng()))
    assert gaps.mean() == pytest.approx(0.25, rel=tolerance)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=tolerance)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(poisson_arrivals(2.0, 100_000, rng()), prepend=0.0)
    assert gaps.mean() == pytest.approx(0.5, rel=0.02)
    assert (gaps > 1.0).mean() == pytest.approx(np.exp(-2.0), rel=0.03)


@given(
    rate=st.floats(0.01, 1000), cv=st.floats(0.1, 10), count=st.integers(1, 50), seed=st.integers(0)
)
@settings(max_examples=50, deadline=None)
def test_arrivals_ascend_and_repeat_with_the_seed(
    rate: float, cv: float, count: int, seed: int
) -> None:
    arrival = gamma_arrivals(rate, cv, count, rng(seed))
    workload = Workload.of(arrival, fixed_lengths(3, 4, count))
    assert len(workload) == count
    assert (arrival == gamma_arrivals(rate, cv, count, rng(seed))).all()


def test_all_at_once_and_fixed_lengths() -> None:
    workload = Workload.of(all_at_once(3), fixed_lengths(5, 7, 3))
    assert workload.arrival.tolist() == [0.0, 0.0, 0.0]
    assert workload.prompt_len.tolist() == [5, 5, 5]
    assert workload.output_len.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("rate", "cv", "count", "named"),
    [(0.0, 1.0, 3, "rate"), (np.inf, 1.0, 3, "rate"), (1.0, -1.0, 3, "cv"), (1.0, 1.0, 0, "num_")],
)
def test_impossible_arrivals_are_refused(rate: float, cv: float, count: int, named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        gamma_arrivals(rate, cv, count, rng())


def test_impossible_workloads_are_refused() -> None:
    with pytest.raises(WorkloadError, match="output_len must be at least 1, got 0"):
        fixed_lengths(3, 0, 2)
    with pytest.raises(WorkloadError, match="2 arrivals for 3 lengths"):
        Workload.of(all_at_once(2), fixed_lengths(1, 1, 3))
    with pytest.raises(WorkloadError, match="ascending"):
        Workload.of(np.array([2.0, 1.0]), fixed_lengths(1, 1, 2))
    with pytest.raises(WorkloadError, match="same length"):
        Lengths(np.ones(2, np.int64), np.ones(3, np.int64))
    with pytest.raises(WorkloadError, match="5 requests are asked for, of 2"):
        fixed_lengths(1, 1, 2).first(5)


def write(folder: Path, text: str) -> Path:
    path = folder / "lengths.csv"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_length_file_is_read_in_order(tmp_path: Path, end: str) -> None:
    path = write(tmp_path, end.join(["prompt_tokens,output_tokens", "8,273", "30,129", ""]))
    lengths = read_lengths(path)
    assert lengths.prompt_len.tolist() == [8, 30]
    assert lengths.output_len.tolist() == [273, 129]
    assert lengths.first(1).prompt_len.tolist() == [8]


HEAD = "prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "the header must be prompt_tokens,output_tokens"),
        ("a,b\n1,2\n", 1, "the header must be .* got 'a,b'"),
        ("1,2\n", 1, "the header"),
        (HEAD + "1,2\n3\n", 3, "2 columns expected, got 1"),
        (HEAD + "1,2,3\n", 2, "2 columns expected, got 3"),
        (HEAD + "1,2\n\n3,4\n", 3, "2 columns expected, got 0"),
        (HEAD + "1,x\n", 2, "output_tokens must be a whole number, got 'x'"),
        (HEAD + "1.5,2\n", 2, "prompt_tokens must be a whole number, got '1.5'"),
        (HEAD + "-1,2\n", 2, "prompt_tokens must be a whole number"),
        (HEAD + "1_0,2\n", 2, "prompt_tokens must be a whole number"),
        (HEAD + "٣,2\n", 2, "prompt_tokens must be a whole number"),
        (HEAD + "1,\n", 2, "output_tokens must be a whole number, got ''"),
        (HEAD + "1,0\n", 2, "output_tokens must be 1 to 2147483647, got 0"),
        (HEAD + "1,2147483648\n", 2, "output_tokens must be 1 to"),
        (HEAD + f"1,{'9' * 5000}\n", 2, "output_tokens must be 1 to"),
    ],
)
def test_malformed_rows_name_file_line_and_reason(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    with pytest.raises(WorkloadError, match=rf"lengths\.csv:{line}: {reason}"):
        read_lengths(write(tmp_path, text))


def test_unreadable_length_files_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.csv: No such file"):
        read_lengths(tmp_path / "none.csv")
    with pytest.raises(WorkloadError, match=r"lengths\.csv: no rows"):
        read_lengths(write(tmp_path, HEAD))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match=r"binary\.csv: not a CSV text file"):
        read_lengths(tmp_path / "binary.csv")
