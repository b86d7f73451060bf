"""The first cost model: what is timed for it, within which budget, and what is kept of it."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.engine.device import cache_moves
from jaxserve.engine.device.executor import Executor
from jaxserve.engine.startup import compilation_cache
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.startup.initial_cost_model import find_initial_cost_model
from jaxserve.engine.startup.start_cache import NOWHERE, TIMING, StartCache
from jaxserve.engine.startup.step_profile import shapes, timed_model
from jaxserve.engine.startup.step_timer import Shape
from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.profiles import System
from tests.engine import mixed_caches
from tests.engine.harness import SCARCE, engine, generate

LAYERS = 4
PADDING = Padding((1, 4, 8, 16), (16, 64, 256), decode_group=4)
TRUE = LinearCostModel(
    Coefficients(2e-6, 1e-4, 1e-8, 2e-5, 1e-6, 3e-10, 5e-5, 2e-6, 1e-8), num_layers=LAYERS
)
HIDDEN = dataclasses.replace(
    TRUE.coefficients, hidden_token=3e-8, projected_token=1e-6, hidden_prefill=2e-8
)
WANTED = shapes(PADDING, max_rows=10, max_prefill=128, max_len=1000)


class Machine:
    """Steps of known cost on a clock of its own; one of three is disturbed."""

    def __init__(self, model: LinearCostModel) -> None:
        self.model, self.now = model, 0.0
        self.timed: list[Shape] = []
        self.noise = random.Random(3)

    def seconds(self, shape: Shape, chain: int) -> float:
        self.timed.append(shape)
        one = float(self.model.batch_time(shape.features(PADDING)))
        self.now += one * chain
        return one * (1 + 0.2 * self.noise.random() * (len(self.timed) % 3 == 0))

    def clock(self) -> float:
        return self.now


def test_what_is_timed() -> None:
    assert {len(s.decodes) for s in WANTED if not s.chunks} == {1, 4, 8}
    assert {s.decodes[0] for s in WANTED if s.decodes and not s.chunks} == {49, 499, 899}
    assert {s.tokens for s in WANTED if s.chunks} == {16, 64}
    assert {s.contexts.any() for s in WANTED if s.chunks and not s.decodes} == {True, False}
    assert any(s.chunks and s.decodes for s in WANTED)
    assert any(s.sampling for s in WANTED)
    assert not any(s.hidden or s.projected or s.swapped for s in WANTED)
    more = shapes(PADDING, max_rows=10, max_prefill=128, max_len=1000, hidden=True, swaps=True)
    assert set(WANTED) < set(more)
    hidden = [s for s in more if s.hidden]
    assert any(s.chunks for s in hidden) and any(not s.chunks for s in hidden)
    assert any(s.projected for s in more) and any(s.swapped for s in more)
    assert len(more) == len(set(more)) < 50


@pytest.mark.parametrize(
    ("max_rows", "max_len", "hidden"),
    [(1, 2, True), (3, 3, False), (1, 40, False), (3, 5000, True)],
)
def test_no_shape_is_beyond_the_limits(max_rows: int, max_len: int, hidden: bool) -> None:
    padding = Padding((4,), (16, 512))
    found = shapes(padding, max_rows=max_rows, max_prefill=20, max_len=max_len, hidden=hidden)
    assert found
    for shape in found:
        assert 1 <= len(shape.counts) <= max_rows
        assert (shape.counts + shape.contexts <= max_len).all()
        assert shape.projected <= max_len
        assert not shape.chunks or shape.tokens <= 20
        assert all(count > 1 for count, _ in shape.chunks)


@pytest.mark.parametrize("hidden", [False, True])
def test_the_model_is_found(hidden: bool) -> None:
    k = HIDDEN if hidden else TRUE.coefficients
    machine = Machine(dataclasses.replace(TRUE, coefficients=k))
    wanted = shapes(PADDING, max_rows=10, max_prefill=128, max_len=1000, hidden=hidden)
    found = timed_model(machine.seconds, wanted, PADDING, LAYERS, clock=machine.clock)
    for shape in wanted:
        features = shape.features(PADDING)
        expected = float(machine.model.batch_time(features))
        assert float(found.batch_time(features)) == pytest.approx(expected, rel=0.02)
    if hidden:
        rho = found.coefficients.hidden_token - found.coefficients.decode_kv
        assert rho == pytest.approx(k.hidden_token - k.decode_kv, rel=0.05)


def test_the_budget_is_kept_and_something_is_timed() -> None:
    slow = Machine(LinearCostModel(Coefficients(1e-4, 5e-2, *[0.0] * 7), LAYERS))
    found = timed_model(slow.seconds, WANTED, PADDING, LAYERS, clock=slow.clock, budget_s=4.0)
    assert slow.now < 4.0
    assert len(set(slow.timed)) > 5 and slow.timed[0] == WANTED[0]
    features = WANTED[0].features(PADDING)
    truly = float(slow.model.batch_time(features))
    assert float(found.batch_time(features)) == pytest.approx(truly, rel=0.2)
    endless = Machine(LinearCostModel(Coefficients(0.0, 100.0, *[0.0] * 7), LAYERS))
    timed_model(endless.seconds, WANTED, PADDING, LAYERS, clock=endless.clock)
    assert endless.timed == WANTED[:1]


def test_many_small_shapes_are_worth_more_than_one_that_takes_all_the_time() -> None:
    machine = Machine(LinearCostModel(Coefficients(0.1, 0.0, *[0.0] * 7), LAYERS))
    timed_model(machine.seconds, WANTED, PADDING, LAYERS, clock=machine.clock, budget_s=20.0)
    assert machine.now < 20.0
    counts = [machine.timed.count(shape) for shape in WANTED]
    assert counts[0] > 1 and counts[-1] == 0


def test_it_is_kept_by_what_it_depends_on(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    a, b = (StartCache(str(folder), {"model": model}) for model in "ab")
    one, two = TRUE.coefficients, HIDDEN
    assert a.coefficients(lambda: one) == (one, False)
    assert b.coefficients(lambda: two) == (two, False)
    assert (a.coefficients(lambda: two), b.coefficients(lambda: one)) == ((one, True), (two, True))
    name = next(iter(json.loads((folder / TIMING).read_text())))
    for broken in ("[broken", '["a"]', json.dumps({name: {"speed": 1}}), json.dumps({name: 1})):
        (folder / TIMING).write_text(broken)
        assert a.coefficients(lambda: two) == (two, False)
    assert a.coefficients(lambda: one) == (two, True)


def test_nothing_is_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert NOWHERE.coefficients(lambda: HIDDEN) == (HIDDEN, False)
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "no-folder"
    file.write_text("")
    cache = StartCache(str(file / "cache"), {"model": "a"})
    assert cache.coefficients(lambda: HIDDEN) == (HIDDEN, False)
    assert "nothing can be kept" in caplog.text


def test_an_engine_times_steps_once(
    shapes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_choice, "make_policy", mixed_caches.make)
    monkeypatch.setattr(compilation_cache, "use", lambda directory: directory)  # as elsewhere
    options = {"scheduler__policy": "mixed_chunks", **SCARCE}
    options["engine__compilation_cache_dir"] = str(tmp_path)
    texts, models = [], []
    for source in ("timed at the start", "kept from an earlier start"):
        with engine(shapes["opt"], **options) as running:
            info, model = running.info(), running._cost_model.model
            assert info.cost_model == source
            k = model.coefficients
            assert info.rho == model.num_layers * (k.hidden_token - k.decode_kv)
            assert running._scheduler.view.rho == info.rho
            assert running._scheduler.view.cost_model is running._cost_model
            models.append(model)
            texts.append(generate(running, [[5, 6, 7]], max_tokens=4))
    assert models[0] == models[1]
    assert texts[0] == texts[1]
    assert min(k.token_bias, k.per_token + k.per_decode + k.decode_bias) >= 0
    one = BatchFeatures.from_rows(np.array([1]), np.array([9]), np.array([True]))
    assert 1e-6 < float(models[0].batch_time(one)) < 10.0


def test_where_copies_go_on_beside_the_steps_the_model_knows(
    shapes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation_cache, "use", lambda directory: directory)
    options = {"engine__compilation_cache_dir": str(tmp_path), "scheduler__policy": "fastserve"}
    for beside in (False, True):
        monkeypatch.setattr(cache_moves, "has_pinned", lambda device, beside=beside: beside)
        with engine(shapes["opt"], **options, **SCARCE) as running:
            assert running._cost_model.model.overlapped is beside
    assert running.info().cost_model == "kept from an earlier start"


def test_an_engine_takes_a_profile(shapes: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    model = dataclasses.replace(TRUE, num_layers=2)
    System("mine", model, kv_tokens=100, about={}).save(path)
    with engine(shapes["opt"], scheduler__profile=str(path), scheduler__seed=7) as running:
        assert running.info().cost_model == "profile mine.json"
        assert running._cost_model.model == model
        assert running._scheduler.view.seed == 7
        assert running.info().rho is None


@pytest.mark.parametrize("rho", [1e-6, -1e-6, -1.0])
def test_a_given_rho_is_what_the_model_says_too(
    rho: float, shapes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_choice, "make_policy", mixed_caches.make)
    path, nobody = tmp_path / "mine.json", cast(Executor, None)  # who would time steps
    System("mine", dataclasses.replace(TRUE, num_layers=2), kv_tokens=100).save(path)
    config = Config().with_fields(
        model__path=str(shapes["opt"]),
        model__load_format="random",
        scheduler__policy="mixed_chunks",
        scheduler__profile=str(path),
        cache__num_blocks=64,
        cache__rho=str(rho),
    )
    found = find_initial_cost_model(str(path), NOWHERE, choose(config), nobody)
    assert found.rho == rho
    k = found.model.coefficients
    assert k.hidden_token == pytest.approx(max(0.0, k.decode_kv + rho / 2))
