"""The server over the real engine, and serve.py as a user starts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.client import Client, ServerError, make_request
from jaxserve.client.records import TARGETS
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import Observer, RequestStats, StepRecorder, StepStats
from jaxserve.sched.request import SLO, PoolingParams, PoolingType, Request, SamplingParams, Tier
from jaxserve.sched.slo.classes import with_targets
from jaxserve.sched.slo.metrics import Times, attained
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.engine.harness import SCARCE, generate, pool, vector, wait_until_idle, write_shape
from tests.engine.harness import engine as small_engine
from tests.server.processes import PATIENCE, refused, serve


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
    classes = {"chat": ServiceLevel(SLO(ttft=3600.0, tbt=600.0), Tier.BEST_EFFORT, "chat")}
    server = Server(shared, grace_s=0.0, slo_classes=classes)
    with server, Client(server.address) as client:
        yield client


def test_tokens_over_grpc_are_the_engines(real: Engine, served: Client) -> None:
    prompts = [[5, 6, 7], [8, 9], [10] * 20]
    expected = generate(real, prompts, max_tokens=12, ignore_eos=True)
    for prompt, tokens in zip(prompts, expected, strict=True):
        (completion,) = served.complete(prompt, max_tokens=12, ignore_eos=True)
        assert completion.token_ids == tokens
        assert completion.usage.output_tokens == 12
        assert 0 < completion.timings.ttft_ms <= completion.timings.total_ms


@pytest.mark.promise(5)
def test_targets_in_metadata_change_no_text(real: Engine, served: Client) -> None:
    prompts = [[5, 6, 7], [8, 9], [10] * 20]
    expected = generate(real, prompts, max_tokens=12, ignore_eos=True)
    for prompt, tokens in zip(prompts, expected, strict=True):
        message = make_request(prompt, max_tokens=12, ignore_eos=True)
        for said in ("0.001", "900000"):
            metadata = [("x-slo-ttft-ms", said), ("x-llm-d-slo-tpot-ms", said)]
            found = list(served._stub.Generate(message, metadata=metadata, timeout=PATIENCE))
            assert [token for each in found for token in each.token_ids] == tokens
            assert found[-1].finish.slo.met == (said == "900000")


def test_vectors_and_scores_over_grpc_are_the_engines(real: Engine, served: Client) -> None:
    """And the texts beside them stay as they are."""
    prompts = [[5, 6, 7], [8, 9], [10] * 20]
    plain = {"max_tokens": 12, "ignore_eos": True}
    expected = generate(real, prompts, **plain)
    for mode in PoolingType:
        pooling = PoolingParams(mode, dimensions=8)
        made = [vector(pool(real, prompt, pooling)) for prompt in prompts]
        text = served.generate(prompts[0], **plain)
        found = served.embed(prompts, pooling=str(mode), dimensions=8, cache_salt=str(mode))
        for ours, each in zip(made, found, strict=True):
            assert np.allclose(ours, each.embedding, atol=1e-5)
            assert abs(np.linalg.norm(each.embedding) - 1) < 1e-5
        assert [token for each in text for token in each.token_ids] == expected[0]
    assert generate(real, prompts, **plain) == expected


NEVER, EASY = {"ttft_ms": 1e-3, "tbt_ms": 1e-3, "jct_ms": 2e-3}, {"jct_ms": 3.6e6}


@pytest.mark.promise(5)
def test_targets_change_no_token_and_what_cannot_be_met_is_flagged(
    real: Engine, served: Client
) -> None:
    plain = {"max_tokens": 12, "ignore_eos": True}
    expected = generate(real, [[5, 6, 7]], **plain)[0]
    (hopeless,) = served.complete([5, 6, 7], slo=NEVER, **plain)
    assert hopeless.token_ids == expected and hopeless.slo is not None
    assert [problem.kind for problem in hopeless.slo.problems] == [
        pb.SLO_PROBLEM_KIND_TTFT_UNREACHABLE,
        pb.SLO_PROBLEM_KIND_TBT_UNREACHABLE,
        pb.SLO_PROBLEM_KIND_JCT_UNREACHABLE,
    ]
    for problem in hopeless.slo.problems:
        assert problem.limit_ms > problem.target_ms
    assert not hopeless.slo.met and not hopeless.slo.targets_met.tbt_ms
    for easy in served.complete([5, 6, 7], slo=EASY, slo_class="chat", n=2, **plain):
        assert easy.token_ids == expected and easy.slo is not None
        assert easy.slo.met and not easy.slo.problems
        assert easy.slo.slo_class == "chat" and easy.slo.tier == pb.TIER_BEST_EFFORT
        assert all(getattr(easy.slo.targets_met, name) for name in TARGETS)
        assert 0 < easy.timings.tbt_ms < easy.timings.total_ms


@pytest.mark.promise(19)
def test_what_is_told_is_what_a_load_test_counts(real: Engine) -> None:
    """Targets in the midst of what the requests get, so that some are met and some are not."""
    outputs: list[Output] = []
    ended = threading.Semaphore(0)

    def take(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason is not None:
            ended.release()

    recorder = StepRecorder()
    real.add_observer(recorder)
    for turn in range(2):
        took = sum(step.step_time for step in recorder.steps) or 1.0
        slos = [SLO(took * share, took * share / 10, took * share) for share in (0.1, 0.3, 0.9)]
        requests = [
            Request(f"{turn}-{i}", (5, 6, 7), SamplingParams(12, ignore_eos=True), slos[i % 3])
            for i in range(8)
        ]
        stamped = {}
        for request in requests:
            real.submit(request, take)
            stamped[request.id] = request
        for _ in requests:
            assert ended.acquire(timeout=PATIENCE)
        for name, request in stamped.items():
            mine = [output for output in outputs if output.request_id == name]
            last = mine[-1]
            assert last.timings is not None and last.verdict is not None
            tokens = [time for output in mine for time in output.token_times]
            arrival = tokens[-1] - last.timings.total
            times = Times.from_tokens([arrival], [tokens], [True])
            counted = attained(times, with_targets(SloColumns.none(1), request.slo))
            assert last.verdict.met == counted.slo()[0]
            assert (last.verdict.ttft, last.verdict.jct) == (counted.ttft[0], counted.jct[0])
            assert last.verdict.tbt == counted.tbt[0]


@pytest.mark.promise(12)
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
    """Platforms that are not there are no news."""
    with serve(JAX_PLATFORMS="") as server:
        assert "tiny-stories" in server.printed and "policy   goodput" in server.printed
        with Client(server.address) as client:
            (completion,) = client.complete("Once upon a time", max_tokens=8)
            assert completion.text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert said.endswith("stopping: nothing runs\n") and "WARNING" not in said, said


def test_what_cannot_be_served_is_one_line() -> None:
    """Of a platform that is asked for and not there. What `build_engine` refuses is all in
    tests/engine/startup/test_build.py; this is the way out."""
    said = refused(JAX_PLATFORMS="cuda")
    assert said.startswith("serve.py: JAX_PLATFORMS=cuda: there is no such device")
