"""What is learned from the lengths of outputs that have ended."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.table import LengthHistogram
from tests.sched.driver import Drive


def test_length_histogram() -> None:
    lengths = LengthHistogram()
    nothing = np.array([0, 5])
    assert lengths.expected(nothing).tolist() == [1, 6]
    for length in (10, 10, 100, 1000):
        lengths.add(length)
    assert lengths.count == 4
    expected = lengths.expected(np.array([0, 7, 10, 90, 100, 900, 1000]))
    assert expected.tolist() == [280, 280, 550, 550, 1000, 1000, 1001]


def test_finished_outputs_are_counted() -> None:
    run = Drive("sarathi")
    gone = run.add(3, 9)
    run.add(3, 4)
    for _ in range(4):
        run.step()
    run.scheduler.finish(gone)
    run.scheduler.finish(run.add(3, 9))  # cancelled before it wrote anything
    assert run.table.output_lengths.count == 2
    assert run.table.output_lengths.expected(np.array([0])).tolist() == [4.0]
