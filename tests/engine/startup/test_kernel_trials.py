"""Which kernels a start chooses by measurement, on a device that is not there."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.startup.choices import kernel_trials
from jaxserve.engine.startup.choices.kernel_trials import KEPT, fastest
from jaxserve.pallas_kernels import KernelShape
from jaxserve.pallas_kernels.backends import RIVALS

SHAPE = KernelShape(8, 2, head_dim=128, block_size=16, dtype="bfloat16")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trials, "rivals", lambda usual, shape: RIVALS.get(usual))


def times(decodes: float | None, prompts: float | None) -> dict[str, dict[str, float]]:
    """Seconds of the rival, where the usual one takes 1; None where it failed."""
    kinds = {"decodes": decodes, "prompts": prompts}
    return {
        kind: {"triton": 1.0} | ({} if rival is None else {"mosaic-gpu": rival})
        for kind, rival in kinds.items()
    }


@pytest.mark.parametrize(
    ("decodes", "prompts", "chosen"),
    [
        (0.5, 0.5, "mosaic-gpu"),
        (0.5, 1.0, "mosaic-gpu-decodes"),
        (2.0, 0.9, "mosaic-gpu-prompts"),
        (0.98, 0.97, "triton"),  # as good as equal
        (None, 0.5, "mosaic-gpu-prompts"),
        (None, None, "triton"),
    ],
)
def test_each_kind_of_step_has_the_faster_one(
    decodes: float | None, prompts: float | None, chosen: str
) -> None:
    assert fastest("triton", SHAPE, "", lambda *given: times(decodes, prompts)) == chosen


def test_the_choice_is_kept(tmp_path: Path) -> None:
    """Steps that were compiled for it stay of use, though it may be close."""
    asked = []

    def measure(names: tuple[str, ...], shape: KernelShape) -> Any:
        asked.append(names)
        return times(0.5, 2.0)

    for _ in range(2):
        assert fastest("triton", SHAPE, str(tmp_path), measure) == "mosaic-gpu-decodes"
    assert asked == [("triton", "mosaic-gpu")]
    (tmp_path / KEPT).write_text("{}")
    assert fastest("triton", SHAPE, str(tmp_path), lambda *given: times(2.0, 2.0)) == "triton"


@pytest.mark.parametrize(
    "error", [subprocess.TimeoutExpired("trials", 1), subprocess.CalledProcessError(-11, "trials")]
)
def test_a_kernel_that_hangs_or_kills_its_process_is_not_taken(
    error: Exception, tmp_path: Path
) -> None:
    def measure(*given: Any) -> Any:
        raise error

    assert fastest("triton", SHAPE, str(tmp_path), measure) == "triton"
    assert not (tmp_path / KEPT).exists()


def test_nothing_is_measured_without_rivals() -> None:
    assert fastest("numba", SHAPE, "", lambda *given: pytest.fail("measured")) == "numba"


@pytest.mark.slow
def test_the_process_of_its_own_answers() -> None:
    """Neither runs on a CPU, so none has times."""
    small = KernelShape(2, 1, head_dim=16, block_size=8, dtype="bfloat16")
    found = kernel_trials._measure(("mosaic-gpu",), small)
    assert found == {"decodes": {}, "prompts": {}}
