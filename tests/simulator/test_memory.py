"""Workloads that would not fit are refused before anything is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxserve.simulator.simulate.cli import main
from jaxserve.simulator.workloads import memory
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import WorkloadError


def test_a_billion_requests_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload=fixed:8x8x999999999"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "jaxserve simulate: fixed:8x8x999999999: 999,999,999 requests with 7,999,999,992 tokens to "
        "write would take about 1,100 GB of memory; there are "
    )
    assert error.count("\n") == 1


def test_so_are_too_many_of_a_sampler_and_endless_ones_of_a_trace(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="would take about 400,000,000 GB"):
        WorkloadSpec("sharegpt", num_requests=10**15).make_workload()
    trace = tmp_path / "long.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "5,2147483647\n" * 50)
    with pytest.raises(WorkloadError, match=r"long.csv: 50 requests with 107,374,182,350 tokens"):
        WorkloadSpec(str(trace)).make_workload()


def test_what_fits_exactly_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorkloadSpec("fixed:8x5x3")
    needed = memory.memory_for(3, 15)
    monkeypatch.setattr(memory, "machine_memory", lambda: needed)
    assert len(spec.make_workload()) == 3
    monkeypatch.setattr(memory, "machine_memory", lambda: needed - 1)
    with pytest.raises(WorkloadError, match="3 requests with 15 tokens"):
        spec.make_workload()
    monkeypatch.setattr(memory, "machine_memory", lambda: memory.memory_for(10, 10))
    with pytest.raises(WorkloadError, match="sharegpt: 10 requests with"):
        dataclasses.replace(spec, lengths="sharegpt", num_requests=10).make_workload()


@pytest.mark.parametrize(("limit", "bound"), [("5000\n", 5000), ("max\n", None), (None, None)])
def test_a_containers_limit_counts(
    limit: str | None, bound: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory.max"
    if limit is not None:
        path.write_text(limit)
    monkeypatch.setattr(memory, "_CONTAINER", path)
    found = memory.machine_memory()
    assert found == bound if bound is not None else found > 1 << 20
