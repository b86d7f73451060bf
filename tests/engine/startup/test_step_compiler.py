"""A server serves before all of its steps are compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from jaxserve.engine.device.buckets import Buckets, make_buckets
from jaxserve.engine.device.compilations import StepCompiler
from jaxserve.engine.device.executor import Executor, JaxExecutor
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.assemble import assemble
from jaxserve.engine.startup.blueprint import Programs
from jaxserve.engine.startup.build import build_engine
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.stats import StepRecorder
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from tests.engine import harness
from tests.engine.harness import engine, send, wait_until_idle
from tests.engine.simulated.engine_on_a_virtual_clock import LAYERS, configured

TIMEOUT = 60
PRIOR = LinearCostModel(Coefficients(1e-4, 1e-3, 0, 0, 0, 0, 0, 0, 0), LAYERS)


class Compiler:
    """Stands for an executor that has to compile two more stages of two programs each. Each program
    waits until it is let go."""

    copies_beside = False
    intact = True

    def __init__(self) -> None:
        self.buckets, *self.stages = make_buckets(8, 64, width=4).stages()[:3]
        self.begun, self.compiled = threading.Semaphore(0), 0
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None

    def compile(self, buckets: Buckets) -> Iterator[None]:
        assert buckets in self.stages
        for _ in range(2):
            self.begun.release()
            assert self.go.acquire(timeout=TIMEOUT)
            if self.error is not None:
                raise self.error
            self.compiled += 1
            yield

    def close(self) -> None:
        pass

    def begins(self) -> None:
        assert self.begun.acquire(timeout=TIMEOUT)


class Told:
    """What the thread says: stages that are ready, and that it has ended."""

    def __init__(self, compiler: StepCompiler) -> None:
        self.ready: list[Buckets] = []
        self.ended = threading.Event()
        compiler.then(self.ended.set)
        compiler.start(self.ready.append)


def test_stages_are_ready_once_all_of_their_programs_are() -> None:
    executor = Compiler()
    compiler = StepCompiler(executor)
    told = Told(compiler)
    executor.begins()
    executor.go.release()
    executor.begins()
    assert (told.ready, compiler.left) == ([], 2)
    executor.go.release()
    executor.begins()
    assert (told.ready, compiler.left) == (executor.stages[:1], 1)
    executor.go.release(2)
    assert told.ended.wait(TIMEOUT)
    assert (told.ready, compiler.left) == (executor.stages, 0)
    assert executor.buckets not in executor.stages
    compiler.use(told.ready[0])
    assert executor.buckets == executor.stages[0]


def test_a_stage_that_cannot_be_compiled_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    executor = Compiler()
    compiler = StepCompiler(executor)
    executor.go.release(3)
    told = Told(compiler)
    for _ in range(3):
        executor.begins()
    executor.error = RuntimeError("no memory")
    executor.go.release()
    assert told.ended.wait(TIMEOUT)
    assert (told.ready, compiler.left) == (executor.stages[:1], 1)
    (record,) = caplog.records
    assert "steps of 1 sizes cannot be compiled" in record.message
    assert record.exc_info is not None and "no memory" in str(record.exc_info[1])
    compiler.stop()


def idle_engine(folder: Path, executor: Compiler) -> Engine:
    config = configured(folder, 64, PRIOR, cache__num_blocks=64)
    programs = Programs(cast(Executor, executor), compiler=StepCompiler(executor))
    return assemble(config, choose(config), programs, load_tokenizer(None))


def test_a_stop_waits_for_the_program_that_is_being_compiled_only(tmp_path: Path) -> None:
    executor = Compiler()
    running = idle_engine(tmp_path, executor)
    running.start()
    executor.begins()
    assert running.stats().sizes_to_compile == 2
    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(running.stop)
        assert running._compiler is not None and running._compiler._stopped.wait(TIMEOUT)
        assert not stopping.done()
        executor.go.release(4)
        stopping.result(TIMEOUT)
    assert executor.compiled == 1
    running.stop()  # once more


def test_an_engine_that_never_starts_compiles_nothing(tmp_path: Path) -> None:
    executor = Compiler()
    idle_engine(tmp_path, executor).stop()
    assert not executor.begun.acquire(blocking=False)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Servers' engines compile the rest of their steps once this is set."""
    go, compiles = threading.Event(), JaxExecutor.compile

    def waits(self: JaxExecutor, buckets: Buckets) -> Iterator[None]:
        assert go.wait(TIMEOUT)
        yield from compiles(self, buckets)

    monkeypatch.setattr(JaxExecutor, "compile", waits)
    monkeypatch.setattr(harness, "build_engine", partial(build_engine, all_steps=False))
    return go


def answered(
    on: Engine, steps: StepRecorder, **sampling: Any
) -> tuple[list[Any], set[int], set[int]]:
    """What a prompt of 20 tokens is answered, with bits; and sizes of its steps, as they ran and as
    they were predicted."""
    begin = len(steps.steps)
    stream = send(on, range(3, 23), max_tokens=4, logprobs=2, prompt_logprobs=1, **sampling)[1]
    said = [(o.token_ids, o.logprobs, o.prompt_logprobs) for o in stream.wait().outputs]
    wait_until_idle(on)
    mine = steps.steps[begin:]
    predicted = {int(one.features.padded_tokens) for one in mine}
    return said, {one.padded_tokens for one in mine}, predicted


def test_larger_steps_serve_until_smaller_ones_are_compiled(
    compiling: threading.Event, shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted = threading.Event()
    use: Callable[[Engine, Buckets], None] = Engine._use

    def noted(self: Engine, buckets: Buckets) -> None:
        use(self, buckets)
        adopted.set()

    monkeypatch.setattr(Engine, "_use", noted)
    # Nothing may compile on the engine's thread, before or after: see `engine`.
    with engine(shapes["opt"], engine__token_buckets=(16, 32, 64)) as running:
        running.add_observer(steps := StepRecorder())
        assert running.stats().sizes_to_compile == 1
        before, ran, predicted = answered(running, steps, temperature=1.0, seed=1)
        assert ran == predicted == {8, 64}
        compiling.set()
        assert adopted.wait(TIMEOUT)
        after, ran, predicted = answered(running, steps, temperature=1.0, seed=1)
        assert ran == predicted == {8, 32}
        assert after == before
        assert running.stats().sizes_to_compile == 0
