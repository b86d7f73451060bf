"""The server over the real engine, and serve.py as a user starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason
from jaxserve.engine.stats import Observer, RequestStats, StepStats
from jaxserve.server.runner import Server
from tests.engine.harness import SCARCE, generate, wait_until_idle, write_shape
from tests.engine.harness import engine as small_engine
from tests.server.processes import ROOT, serve

PATIENCE = 120


class Gate(Observer):
    """An observer that holds the engine's thread after a step, and sees requests end."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.steps = 0
        self.reasons: list[FinishReason] = []
        self.ended = threading.Condition()

    def on_step(self, stats: StepStats) -> None:
        assert self.open.wait(PATIENCE)
        self.steps += 1

    def on_finish(self, stats: RequestStats) -> None:
        with self.ended:
            self.reasons.append(stats.finish_reason)
            self.ended.notify_all()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    shape = write_shape(tmp_path_factory.mktemp("shape"), "opt")
    with small_engine(shape, scheduler__max_queue=0, **SCARCE) as engine:
        yield engine


@pytest.fixture
def real(shared: Engine) -> Iterator[Engine]:
    """Idle before and after: a client hears the last token of a request before the engine has
    finished the step, and an observer that joins meanwhile sees that step's end."""
    yield shared
    wait_until_idle(shared)


@pytest.fixture(scope="module")
def served(shared: Engine) -> Iterator[Client]:
    with Server(shared, grace_s=0.0) as server, Client(server.address) as client:
        yield client


def test_tokens_over_grpc_are_the_engines(real: Engine, served: Client) -> None:
    prompts = [[5, 6, 7], [8, 9], [10] * 20]
    expected = generate(real, prompts, max_tokens=12, ignore_eos=True)
    for prompt, tokens in zip(prompts, expected, strict=True):
        (completion,) = served.complete(prompt, max_tokens=12, ignore_eos=True)
        assert completion.token_ids == tokens
        assert completion.usage.output_tokens == 12
        assert 0 < completion.timings.ttft_ms <= completion.timings.total_ms


def test_cancelling_frees_all_blocks_within_one_step(
    real: Engine, served: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = Gate(), threading.Event()
    real.add_observer(gate)
    cancel = real.cancel

    def spied(request_id: str) -> None:
        cancel(request_id)
        asked.set()

    monkeypatch.setattr(real, "cancel", spied)
    stream = served.generate([5, 6, 7], max_tokens=50, ignore_eos=True, n=2)
    next(stream)
    stream.cancel()
    assert asked.wait(PATIENCE)
    gate.open.set()
    with gate.ended:
        assert gate.ended.wait_for(lambda: len(gate.reasons) == 2, PATIENCE)
    assert gate.reasons == [FinishReason.CANCELLED] * 2
    assert gate.steps <= 2  # the one that was held, and the one launched before it
    stats = real.stats()
    assert stats.blocks_free == stats.blocks_total
    assert stats.running == stats.waiting == 0


def test_the_engines_limits_reach_the_client(real: Engine, served: Client) -> None:
    for options, code, words in (
        ({"max_tokens": 99}, "INVALID_ARGUMENT", "max_tokens: 99 after .* 1 tokens .* at most 64"),
        ({"logit_bias": {96: 1.0}, "max_tokens": 2}, "INVALID_ARGUMENT", "outside 0..95"),
        ({"n": 9, "max_tokens": 2}, "INVALID_ARGUMENT", "n: 9 continuations; at most 8"),
    ):
        with pytest.raises(ServerError, match=words) as error:
            served.complete([5], **options)
        assert error.value.code == code
    assert real.stats().running == 0


def test_serve_py_prints_where_it_is_and_serves_until_sigterm() -> None:
    with serve() as server:
        assert "tiny-stories" in server.printed and "policy   sarathi" in server.printed
        with Client(server.address) as client:
            (completion,) = client.complete("Once upon a time", max_tokens=8)
            assert completion.text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


def test_what_cannot_be_served_is_one_line_and_exit_1() -> None:
    """tests/engine/test_build.py has all that build_engine refuses; this is the way out."""
    command = [
        sys.executable,
        "serve.py",
        "--port=0",
        "--http_port=0",
        "--metrics_port=0",
        "--model=no/such/one",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert re.fullmatch(r"serve\.py: .*no/such/one.*\n", done.stderr), done.stderr
    assert done.stdout == ""
