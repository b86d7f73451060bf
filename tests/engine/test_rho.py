"""rho is the slope of what hidden caches add to a step, measured within a budget, and kept."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from jaxserve.engine import choices
from jaxserve.engine.rho import FILE_NAME, measure, remembered, shapes
from jaxserve.engine.step_timer import Shape
from tests.engine import mixed_caches
from tests.engine.harness import SCARCE, engine


class Machine:
    """Steps of known cost on a clock of its own."""

    def __init__(self, rho: float, base: float = 0.01, kv: float = 1e-6) -> None:
        self.now, self.rho, self.base, self.kv = 0.0, rho, base, kv
        self.timed: list[Shape] = []
        self.noise = random.Random(3)

    def seconds(self, shape: Shape, chain: int) -> float:
        self.timed.append(shape)
        a_token = self.kv + (self.rho if shape.hidden else 0.0)
        one = self.base + sum(shape.decodes) * a_token
        self.now += one * chain
        return one * (1 + 0.2 * self.noise.random() * (len(self.timed) % 3))

    def clock(self) -> float:
        return self.now


WANTED = shapes((1, 4, 8, 16), max_rows=10, max_len=100)


def test_what_is_measured() -> None:
    assert {len(shape.decodes) for shape in WANTED} == {1, 4, 8}
    assert {shape.decodes[0] for shape in WANTED} == {50, 90}
    tokens = [sum(shape.decodes) for shape in WANTED]
    assert tokens == sorted(tokens)
    assert [len(s.decodes) for s in shapes((32,), max_rows=10, max_len=1)] == [10]


@pytest.mark.parametrize("rho", [3e-6, 0.0, -5e-7])
def test_the_slope_is_found_whatever_its_sign(rho: float) -> None:
    machine = Machine(rho)
    found = measure(machine.seconds, WANTED, clock=machine.clock)
    assert found == pytest.approx(rho, abs=1e-12)


def test_the_budget_is_kept_and_something_is_measured() -> None:
    slow = Machine(rho=2e-3, base=0.2, kv=1e-4)
    found = measure(slow.seconds, WANTED, clock=slow.clock, budget_s=2.0)
    assert found == pytest.approx(2e-3, rel=0.5)  # one noisy pair each
    assert len(set(slow.timed)) < 2 * len(WANTED)
    assert slow.now < 4.0


def test_it_is_kept_by_what_it_depends_on(tmp_path: Path) -> None:
    calls = iter([1.5, 2.5, 3.5])
    folder = str(tmp_path / "cache")

    def make() -> float:
        return next(calls)

    assert remembered(folder, {"model": "a"}, make) == 1.5
    assert remembered(folder, {"model": "b"}, make) == 2.5
    assert remembered(folder, {"model": "a"}, make) == 1.5
    (Path(folder) / FILE_NAME).write_text("[broken")
    assert remembered(folder, {"model": "a"}, make) == 3.5
    assert list(json.loads((Path(folder) / FILE_NAME).read_text()).values()) == [3.5]
    assert remembered("", {"model": "a"}, lambda: 9.0) == 9.0


def test_an_engine_measures_it(shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "make_policy", mixed_caches.make)
    with engine(shapes["opt"], scheduler__policy="mixed_chunks", **SCARCE) as running:
        found = running.info().rho
        assert found is not None and abs(found) < 1.0
        assert running._scheduler.view.rho == found
