"""`jaxserve bench` on a small engine with random weights, and its errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench import cli, runs
from jaxserve.bench.load_target import BenchError, EngineTarget
from jaxserve.bench.report import text
from jaxserve.configs import base
from jaxserve.engine.errors import QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.sched.request import SLO, Request, Tier
from jaxserve.sched.slo.classes import draw_terms, parse_classes, with_targets
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.server.server import Server
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, fixed_lengths
from jaxserve_lab.bench import fidelity
from tests.engine.harness import engine, write_shape
from tests.server.fake_engine import INFO

# The shapes of tests.engine.harness.engine: somebody has compiled them.
SMALL = (
    "--load_format=random",
    "--config.cache.block_size=4",
    "--config.cache.num_blocks=1024",
    "--config.scheduler.max_batch_tokens=64",
    "--config.scheduler.max_prefill_tokens=64",
    "--config.scheduler.max_rows=32",
    "--config.engine.row_buckets=(8,32)",
    "--config.engine.token_buckets=(64,)",
    "--config.engine.compilation_cache_dir=",
)
CONFIGS = Path(base.__file__).parent
LENGTHS = ("--num_requests=6", "--input_len=9", "--output_len=5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--model={write_shape(tmp_path_factory.mktemp('shape'), 'opt')}"


@pytest.fixture(scope="module")
def address(model: str) -> Iterator[str]:
    """A server over a small engine."""
    shape = Path(model.removeprefix("--model="))
    with engine(shape) as running, Server(running, grace_s=0.0) as server:
        yield server.address


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a command with --json, and returns its last line's object."""

    def run(*argv: str) -> dict[str, Any]:
        code = cli.main([*argv, "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    return run


def check_common(found: dict[str, Any], command: str) -> None:
    assert found["command"] == command
    assert found["workload"]["seed"] == 0
    assert found["machine"]["cores"] >= 1 and found["machine"]["cpu"]
    assert {"jax", "jaxlib", "python", "jaxserve"} <= set(found["versions"])
    assert found["model"]["vocab_size"] == 96


def test_throughput(bench: Callable[..., dict[str, Any]], model: str) -> None:
    policy = ("--policy=vllm:requeue=true", "--config.scheduler.params.watermark=0.25")
    found = bench("throughput", model, *SMALL, *LENGTHS, "--repeats=2", *policy)
    check_common(found, "throughput")
    assert found["model"]["policy"] == "vllm:requeue=true:watermark=0.25"
    assert found["config"]["scheduler"]["params"] == {"watermark": "0.25"}
    results = found["results"]
    for seconds, out, total in zip(
        results["seconds"]["values"],
        results["output_tokens_per_s"]["values"],
        results["total_tokens_per_s"]["values"],
        strict=True,
    ):
        assert out == pytest.approx(6 * 5 / seconds)
        assert total == pytest.approx(6 * (9 + 5) / seconds)
    assert len(results["seconds"]["values"]) == 2
    steps = found["engine"]["steps"]
    assert steps["with_prefill"]["count"] >= 2
    assert steps["fullest_decode"]["rows"] == 6
    assert steps["all"]["host_ms"]["p50"] > 0
    assert found["engine"]["compiles_after_warmup"] == 0
    assert found["engine"]["preemptions"] == 0
    said = text(found)
    assert "output tokens/s" in said and "host work in it" in said and "preemptions" in said


def test_latency(bench: Callable[..., dict[str, Any]], model: str) -> None:
    found = bench("latency", model, *SMALL, "--num_requests=3", "--input_len=9", "--output_len=5")
    check_common(found, "latency")
    results = found["results"]
    for ttft, tpot, e2e, rate in zip(
        *(results[n]["values"] for n in ("ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s")),
        strict=True,
    ):
        assert ttft + 4 * tpot == pytest.approx(e2e)
        assert rate == pytest.approx(5 / e2e * 1e3)
    assert found["engine"]["steps"]["decode"]["count"] >= 3 * 4 - 1


def test_load_in_process(bench: Callable[..., dict[str, Any]], model: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,output_tokens\n9,5\n20,1\n3,7\n")
    found = bench(
        "load", model, *SMALL, f"--lengths={file}", "--rate=200", "--arrivals=gamma", "--cv=2",
        "--slo_ttft_ms=60000", "--slo_tbt_ms=0.0001",
    )  # fmt: skip
    check_common(found, "load")
    assert found["workload"]["num_requests"] == 3
    assert found["workload"]["prompt_tokens"] == 32
    results = found["results"]
    assert results["requests"] == {"finished": 3, "rejected": 0, "failed": 0}
    assert results["output_tokens"] == 13
    assert results["slo"]["ttft_attainment"] == 1.0
    assert results["slo"]["tbt_attainment"] == pytest.approx(1 / 3)  # the one of a single token
    assert results["sent_late_ms"]["max"] >= 0


def test_load_against_a_server(
    bench: Callable[..., dict[str, Any]], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench("load", f"--address={address}", *LENGTHS, "--rate=500", "--slo_ttft_ms=60000")
    check_common(found, "load")
    assert found["config"] is None and "engine" not in found
    assert found["results"]["requests"]["finished"] == 6
    assert found["results"]["output_tokens"] == 30
    assert found["results"]["slo"]["attainment"] == 1.0
    assert cli.main(["load", f"--address={address}", "--rate=9", "--input_len=9000"]) == 1
    assert "serves at most 64 in all" in capsys.readouterr().err


CLASSES = "--classes=a:0.5:ttft=60s,b:0.5:tier=best_effort:jct=1ms"


def test_load_by_class(
    bench: Callable[..., dict[str, Any]], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a server, whose tier and targets are the requests' own, to the last line of text."""
    sizes = ("--num_requests=24", "--input_len=9", "--output_len=5")
    argv = ("load", f"--address={address}", *sizes, "--rate=500", CLASSES)
    results = bench(*argv)["results"]
    classes = results["classes"]
    assert sum(group["requests"] for group in classes.values()) == 24
    assert classes["a"]["slo"]["attainment"] == 1.0
    assert classes["b"]["slo"]["jct_attainment"] == classes["b"]["slo"]["attainment"] == 0.0
    assert results["tiers"]["best_effort"] == classes["b"]
    assert results["slo"]["attainment"] == pytest.approx(classes["a"]["requests"] / 24)
    assert cli.main(argv) == 0
    assert "class b" in capsys.readouterr().out.splitlines()[-1]


def test_requests_carry_their_own_tier_slo_and_limit() -> None:
    class Willing(FullEngine):
        def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
            self._calls = 0  # refuses nobody
            super().submit(request, on_output)

    classes = parse_classes("a:0.5:ttft=1s:tbt=50ms,b:0.5:tier=best_effort:jct=9s")
    lengths = Lengths(np.arange(1, 21), np.arange(2, 22))
    terms = draw_terms(classes, 20, np.random.default_rng(0))
    engine, limit = Willing(), lengths.output_len + np.arange(20) % 2
    runs.load(
        EngineTarget(engine),
        Workload.create(all_at_once(20), lengths, limit=limit, terms=terms),
        0,
    )
    wanted = [(SLO(ttft=1.0, tbt=0.05), Tier.REALTIME), (SLO(jct=9.0), Tier.BEST_EFFORT)]
    assert [(r.slo, r.tier) for r in engine.requests] == [wanted[i] for i in terms.slo_class]
    assert [r.sampling.max_tokens for r in engine.requests] == limit.tolist()
    assert [len(r.prompt) for r in engine.requests] == lengths.prompt_len.tolist()


def test_a_request_with_a_larger_limit_ends_at_its_length(
    bench: Callable[..., dict[str, Any]], address: str, model: str
) -> None:
    """Who serves it cannot tell it from one that ends by itself."""
    for where in ([model, *SMALL], [f"--address={address}"]):
        found = bench("load", *where, *LENGTHS, "--rate=500", "--max_tokens=40")
        assert found["results"]["requests"] == {"finished": 6, "rejected": 0, "failed": 0}
        assert found["results"]["output_tokens"] == 6 * 5


class FullEngine:
    """Takes one request and refuses the next."""

    def __init__(self) -> None:
        self._calls = 0
        self.requests: list[Request] = []

    def check(self, request: Request) -> None:
        pass

    def cancel(self, request_id: str) -> None:
        pass

    def info(self) -> Any:
        return replace(INFO, model="full", vocab_size=96, max_model_len=64, pool_tokens=64)

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        self._calls += 1
        if self._calls % 2 == 0:
            raise QueueFull("full")
        self.requests.append(request)
        ids = tuple(range(request.sampling.max_tokens))
        times = tuple(1e9 + t for t in ids)
        on_output(Output(request.id, 0, ids, finish_reason=FinishReason.LENGTH, token_times=times))


def test_refused_requests_count_and_miss_their_slo() -> None:
    target = EngineTarget(FullEngine())
    terms = with_targets(SloColumns.none(4), SLO(tbt=1.5))
    workload = Workload.create(all_at_once(4), fixed_lengths(3, 2, 4), terms=terms)
    found = runs.load(target, workload, seed=0)
    assert found["requests"] == {"finished": 2, "rejected": 2, "failed": 0}
    assert found["first_error"] == "full"
    assert found["slo"]["attainment"] == 0.5
    with pytest.raises(BenchError, match="a request was rejected: full"):
        runs.throughput(target, 4, 3, 2, repeats=1, seed=0)


def test_the_sender_does_not_wait_for_answers() -> None:
    """Open loop: all requests are out although none has been answered."""
    released = threading.Event()
    waiting: list[threading.Thread] = []

    class SlowEngine(FullEngine):
        def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
            def answer() -> None:
                released.wait(60)
                reason = FinishReason.LENGTH
                on_output(Output(request.id, 0, (1,), finish_reason=reason, token_times=(1e9,)))

            waiting.append(threading.Thread(target=answer))
            waiting[-1].start()
            if len(waiting) == 5:
                released.set()

    workload = Workload.create(np.linspace(0, 0.01, 5), fixed_lengths(3, 1, 5))
    found = runs.load(EngineTarget(SlowEngine()), workload, seed=0)
    assert found["requests"]["finished"] == 5


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["throughput", "--num_requests=0"], "--num_requests must be at least 1, got 0"),
        (["throughput", "--seed=-1"], "--seed must be at least 0"),
        (["throughput", "--config.scheduler.max_row=3"], "did you mean scheduler.max_rows"),
        (["throughput", "--config=nowhere.py"], "there is no file 'nowhere.py'"),
        (["throughput", "--rate=3"], "rate"),
        (["latency", "--port=3"], "--port is for serve.py"),
        (["load", "--rate=0"], "--rate must be a positive number, got 0.0"),
        (["load", "--rate=nan"], "--rate must be a positive number"),
        (["load"], "--rate or --programs is needed, and only one of them"),
        (["load", "--rate=1", "--programs=2"], "--rate or --programs is needed, and only one"),
        (["load", "--programs=2"], "--programs needs --lengths of closed sessions"),
        (["load", "--programs=2", "--lengths=sharegpt"], "these requests are of no programs"),
        (["load", "--rate=1", "--cv=2"], "--arrivals=gamma needs --cv"),
        (["load", "--rate=1", "--arrivals=gamma"], "--arrivals=gamma needs --cv"),
        (["load", "--rate=1", "--lengths=x.csv", "--input_len=3"], "gives both lengths"),
        (["load", "--rate=1", "--address=x:1", "--policy=vllm"], "its own configuration"),
        (["fidelity", "--config.engine.record=x"], "fidelity makes recordings of its own"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--slo_tbt_ms=-1", "--slo_tbt_ms: must be a positive number"),
        ("--slo_jct_ms=nan", "--slo_jct_ms: must be a positive number"),
        ("--classes=a:2", "--classes: class a: a share is in (0, 1], got 2"),
        ("--max_tokens=few", "--max_tokens: must be a positive number or"),
    ],
)
def test_what_a_flag_does_not_take_is_said_with_its_name(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["load", "--rate=1", flag])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and said in err and not out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["throughput", "--policy=nobody"], "there is no policy 'nobody'"),
        (
            ["load", "--rate=1", "--lengths=missing.csv"],
            "there is no workload or file 'missing.csv'",
        ),
        (["load", "--rate=1", "--address=localhost:1"], "no server answers at localhost:1"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(
    argv: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = "--address=localhost:1" in argv
    extra = [] if elsewhere else [model, "--load_format=random"]
    assert cli.main([*argv, *extra]) == (1 if elsewhere else 2)
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_more_requests_than_rows_of_the_file(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,output_tokens\n9,5\n")
    assert cli.main(["load", model, "--rate=1", f"--lengths={file}", "--num_requests=2"]) == 2
    assert "2 requests are asked for, of 1 lengths" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 6, 32])
def test_fidelity_has_conversations(count: int) -> None:
    """Each turn goes on with the one before of its session, all with the same system prompt."""
    made = fidelity.conversations(count, 200, 5.0, 0).workload
    assert len(made) == count and made.lengths.total.max() <= 200
    later = np.flatnonzero(made.prefix_of > 0 if count > 8 else made.prompt_len > 30)
    before = made.prefix_of[later]
    assert (made.prefix_len[later] == made.lengths.total[before]).all()
    assert (made.prompt_len - made.prefix_len)[1:].max(initial=10) == 10
    assert (made.limit == made.output_len).all()


def test_fidelity_takes_several_configs() -> None:
    files = ",".join(str(CONFIGS / name) for name in ("tiny_cpu.py", "opt_125m_cpu.py"))
    args = cli.parse(["fidelity", f"--config={files}", "--policy=vllm", "--repeats=2"])
    assert [config.model.preset for config in args.configs] == ["", "opt-125m"]
    assert [config.scheduler.policy for config in args.configs] == ["vllm", "vllm"]
    assert args.configs[0].scheduler.max_rows != args.configs[1].scheduler.max_rows
    args = cli.parse(["fidelity"])
    assert len(args.configs) == 1
    for flag, problem in (("--rate=0", "positive"), ("--config=a,b", "no file 'a'")):
        with pytest.raises(UsageError, match=problem):
            cli.parse(["fidelity", flag])


def test_throughput_asks_for_no_target() -> None:
    """Nobody reads along, and policies need not keep gaps short for anybody."""
    engine = FullEngine()
    with pytest.raises(BenchError):
        runs.throughput(EngineTarget(engine), 4, 3, 2, repeats=1, seed=0)
    assert {(request.tier, request.slo) for request in engine.requests} == {
        (Tier.BEST_EFFORT, SLO())
    }
