"""What a scrape says, as Prometheus' own parser reads it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.client import Client, ServerError
from jaxserve.config import ConfigError
from jaxserve.engine.adapters import AdapterLoad
from jaxserve.sched.programs.program_table import ProgramCall
from jaxserve.sched.programs.verdict import ProgramEnd, ProgramVerdict
from jaxserve.server.access.api_keys import Caller, Keys
from jaxserve.server.access.options import Access
from jaxserve.server.http.metrics_server import MAX_CONNECTIONS, MetricsServer
from jaxserve.server.http.transport import protocol
from jaxserve.server.requests.call_outcome import CallOutcome, CallTracker
from jaxserve.server.server import Server
from jaxserve.server.telemetry.metrics import (
    MOST_TOOLS,
    READER,
    EngineMetrics,
    Histogram,
    MetricsRegistry,
)
from tests.server.access.test_keys import key
from tests.server.fake_engine import PATIENCE, FakeEngine, let_a_deadline_pass, step_stats
from tests.server.http.conftest import SETTINGS

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def metrics(engine: FakeEngine) -> Iterator[Server]:
    with Server(engine, metrics_port=0, grace_s=0.0) as server:
        yield server


def scrape(server: Server) -> Samples:
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=20) as reply:
        text = reply.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"jaxserve:{name}", frozenset({"model_name": "fake", **labels}.items())]


def test_programs_are_counted_by_what_came_of_them(metrics: Server, engine: FakeEngine) -> None:
    def ended(took: float, end: ProgramEnd, deadline: float | None = 5.0) -> None:
        made = ProgramVerdict("", "a", "agent", end, 3, took, deadline, given_up=took > 50)
        for observer in engine.observers:
            observer.on_program(made)

    ended(2.0, ProgramEnd.OVER)
    ended(3.0, ProgramEnd.OVER)
    ended(6.0, ProgramEnd.SILENT)
    ended(60.0, ProgramEnd.SILENT)
    ended(7.0, ProgramEnd.OVER, None)
    for number, (tools, pause) in enumerate(
        [((), None), ((), 0.5), (("ls",), 0.75), (("ls",), 1.0), (("ls", "cat"), 4.0)]
    ):
        for observer in engine.observers:
            observer.on_program_call(number, ProgramCall(1, True, "", tools, pause, math.inf))
    samples = scrape(metrics)
    counts = {("over", "met"): 2, ("silent", "missed"): 1, ("silent", "given_up"): 1}
    for (ending, outcome), count in {**counts, ("over", "ended"): 1}.items():
        labels = {"slo_class": "agent", "ending": ending, "outcome": outcome}
        assert value(samples, "programs_total", **labels) == count
    assert value(samples, "program_seconds_sum") == 78.0
    assert value(samples, "program_calls_sum") == 15
    for tool, seconds in (("", 0.5), ("ls", 1.75), ("several", 4.0)):
        assert value(samples, "program_pause_seconds_sum", tool=tool) == seconds
    assert value(samples, "num_programs", state="running") == 2
    assert value(samples, "num_programs", state="waiting") == 5


def test_names_of_tools_are_bounded_and_only_their_keys(engine: FakeEngine) -> None:
    made = EngineMetrics(engine, CallTracker(()))
    for tenant in ("alice", "bob", "carol"):
        for number in range(10 * MOST_TOOLS):
            for name in (f"{tenant} {number}", "ls"):
                made.on_program_call(number, ProgramCall(1, True, tenant, (name,), 1.0, math.inf))

    def tools(reader: Caller | None) -> dict[str, float]:
        context = contextvars.copy_context()
        context.run(READER.set, reader)
        family = next(one for one in context.run(list, made.collect()) if "pause" in one.name)
        return {
            one.labels["tool"]: one.value for one in family.samples if one.name.endswith("_count")
        }

    every = tools(None)
    assert len(every) <= MOST_TOOLS and sum(every.values()) == 3 * 2 * 10 * MOST_TOOLS
    assert sum("alice" in name for name in every) == MOST_TOOLS // 4 - 1
    hers = tools(Caller(key("alice")))
    assert not any("bob" in name or "carol" in name for name in hers)
    assert hers["ls"] == 10 * MOST_TOOLS and every["ls"] == 3 * hers["ls"]
    assert sum(hers.values()) == sum(every.values())
    assert tools(Caller(key("root", admin=1))) == every


def test_counts_follow_what_was_served(metrics: Server, engine: FakeEngine) -> None:
    with Client(metrics.address) as client:
        engine.run()
        client.complete("hello", max_tokens=3)
        client.complete("hi", max_tokens=2, n=2, tier="best_effort")
    samples = scrape(metrics)
    assert value(samples, "generation_tokens_total") == 7
    assert value(samples, "best_effort_tokens_total") == 4
    assert value(samples, "lengthened_steps_total") == engine.steps
    assert value(samples, "lengthened_seconds_total") == pytest.approx(0.002 * engine.steps)
    assert value(samples, "request_success_total", finished_reason="length") == 3
    assert value(samples, "request_success_total", finished_reason="abort") == 0
    assert value(samples, "request_prompt_tokens_count") == 3
    assert value(samples, "request_prompt_tokens_sum") == 5 + 2 + 2
    assert value(samples, "request_generation_tokens_sum") == 7
    assert value(samples, "engine_steps_total") == engine.steps
    for tier, ended, tokens in (("realtime", 1, 3), ("best_effort", 2, 4)):
        assert value(samples, "time_to_first_token_seconds_count", tier=tier) == ended
        assert value(samples, "time_to_first_token_seconds_sum", tier=tier) == 0.2 * ended
        assert value(samples, "inter_token_latency_seconds_count", tier=tier) == tokens - ended
        assert value(samples, "e2e_request_latency_seconds_count", tier=tier) == ended
        assert value(samples, "request_queue_time_seconds_count", tier=tier) == ended
        buckets = ("0.1", 0), ("0.25", ended), ("+Inf", ended)
        for le, count in buckets:
            name = "time_to_first_token_seconds_bucket"
            assert value(samples, name, tier=tier, le=le) == count


def test_calls_are_counted_by_how_they_end(metrics: Server, engine: FakeEngine) -> None:
    engine.max_requests = 2
    with Client(metrics.address) as client, grpc.insecure_channel(metrics.address) as channel:

        def refused(**options: object) -> str:
            with pytest.raises(ServerError) as error:
                client.complete("hi", **options)
            return error.value.code

        client.info()
        assert refused(max_tokens=0) == refused(top_p=2.0) == "INVALID_ARGUMENT"
        with pytest.raises(grpc.RpcError):
            list(channel.unary_stream("/jaxserve.v1.Generation/Generate")(b"\xff"))
        running = client.generate("hi", request_id="mine")
        engine.wait(lambda: engine.live)
        assert refused(request_id="mine") == "ALREADY_EXISTS"
        late_calls = let_a_deadline_pass(client, engine, "late")
        assert list(engine.live) == ["mine"]
        other = client.generate("hi")
        engine.wait(lambda: len(engine.live) == 2)
        assert refused() == "RESOURCE_EXHAUSTED"
        other.cancel()
        running.cancel()
        engine.wait(lambda: not engine.live)
        engine.run()
        assert client.complete("hi", max_tokens=2)
    expected = {
        "ok": 1,
        "invalid": 2,
        "malformed": 1,
        "duplicate": 1,
        "queue_full": 1,
        "cancelled": 2,
    }
    samples = scrape(metrics)
    timed_out = value(samples, "calls_total", method="Generate", ending="timed_out")
    assert 1 <= timed_out <= late_calls
    for ending in set(CallOutcome) - {CallOutcome.TIMED_OUT}:
        count = expected.get(ending, 0)
        assert value(samples, "calls_total", method="Generate", ending=ending) == count, ending
    assert value(samples, "calls_total", method="GetServerInfo", ending="ok") == 1


def test_idle_connections_make_room_for_scrapes(metrics: Server) -> None:
    assert metrics.metrics_address is not None
    host, _, port = metrics.metrics_address.rpartition(":")
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            for _ in range(10 * MAX_CONNECTIONS)
        ]
        assert value(scrape(metrics), "num_blocks") == 1024
        for each in idle[: 9 * MAX_CONNECTIONS]:
            assert each.recv(1) == b""  # closed


def test_pages_of_other_sites_may_not_scrape(metrics: Server) -> None:
    url = f"http://{metrics.metrics_address}/metrics"
    for lie in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        with pytest.raises(urllib.error.HTTPError, match="403") as error:
            urllib.request.urlopen(urllib.request.Request(url, headers=lie), timeout=20)
        assert b"server." in error.value.read()


def test_a_scrape_that_drips_is_ended(metrics: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)
    assert metrics.metrics_address is not None
    host, _, port = metrics.metrics_address.rpartition(":")
    deadline = time.monotonic() + PATIENCE
    address = (host, int(port))
    with (
        socket.create_connection(address, timeout=0.01) as dripping,
        contextlib.suppress(ConnectionError),
    ):
        while True:
            dripping.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                assert dripping.recv(1) == b""
                break
            assert time.monotonic() < deadline, "the connection stays"
    assert value(scrape(metrics), "num_blocks") == 1024


def test_a_key_sees_the_adapters_that_it_may_use() -> None:
    """And one that may use all sees all."""
    engine = FakeEngine()
    engine.adapter_load = lambda: AdapterLoad(  # type: ignore[method-assign]
        8, ("law", "sql"), ("sql", "tax")
    )
    given = (("any", {}), ("lawyer", {"adapters": "law,tax"}), ("none", {"adapters": "-"}))
    access = Access(Keys(fixed=[key(name, **own) for name, own in given]))
    told = (("any", "law,sql", "sql,tax"), ("lawyer", "law", "tax"), ("none", "", ""))
    with Server(engine, grace_s=0.0, http=SETTINGS, metrics_port=0, access=access) as server:
        for address in (server.metrics_address, server.http_address):
            for name, running, waiting in told:
                headers = {"Authorization": f"Bearer {name}"}
                request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
                with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                    page = response.read().decode()
                (line,) = (each for each in page.splitlines() if "lora_requests_info{" in each)
                assert f'running_lora_adapters="{running}"' in line, name
                assert f'waiting_lora_adapters="{waiting}"' in line, name


def test_gauges_are_a_snapshot_of_the_engine(metrics: Server, engine: FakeEngine) -> None:
    with Client(metrics.address) as client:
        stream = client.generate("hi")
        engine.wait(lambda: engine.live)
        engine.step()
        samples = scrape(metrics)
        stream.cancel()
        engine.wait(lambda: not engine.live)
    assert value(samples, "num_requests_running") == 1
    assert value(samples, "num_requests_waiting") == 0
    for (tier, state), count in {
        ("realtime", "running"): 1,
        ("realtime", "waiting"): 0,
        ("best_effort", "running"): 0,
    }.items():
        about = {"slo_class": "default", "tier": tier, "state": state}
        assert value(samples, "num_requests", **about) == count
    assert value(samples, "kv_cache_usage_perc") == 1 / 1024
    assert value(samples, "num_blocks") == 1024
    assert value(samples, "num_blocks_free") == 1023
    config = {"block_size": "16", "num_gpu_blocks": "512", "enable_prefix_caching": "False"}
    assert value(samples, "cache_config_info", **config) == 1
    about = {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": "late"}
    assert value(samples, "lora_requests_info", **about) > 1e9  # seconds since 1970
    assert value(samples, "prefix_cache_queries_total", tier="realtime") == 300
    assert value(samples, "prefix_cache_queries_total", tier="best_effort") == 100
    assert value(samples, "prefix_cache_hits_total", tier="realtime") == 240
    assert value(samples, "prefix_cache_hits_total", tier="best_effort") == 0
    assert value(samples, "prefix_cache_host_hits_total", tier="realtime") == 80
    assert value(samples, "prefix_cache_host_tokens") == 96
    assert value(samples, "prefix_cache_evicted_tokens_total") == 160
    assert value(samples, "num_blocks_used", kind="kv", tier="realtime") == 1
    assert value(samples, "num_blocks_used", kind="kv", tier="best_effort") == 0
    assert value(samples, "num_blocks_used", kind="kv", tier="shared") == 5
    assert value(samples, "num_host_slots") == 640
    assert value(samples, "num_host_slots_used") == 64
    assert value(samples, "checkpointed_slots_total") == 300
    assert value(samples, "restored_slots_total") == 200
    assert value(samples, "host_memory_full_total") == 2
    assert value(samples, "num_preemptions_total") == 3
    assert value(samples, "compiles_after_warmup_total") == 0
    assert value(samples, "step_time_seconds_count") == 1
    assert value(samples, "step_time_seconds_sum") == 0.01
    assert value(samples, "host_time_seconds_sum") == 0.001
    assert value(samples, "device_time_seconds_sum") == 0.008
    assert value(samples, "predicted_time_seconds_sum") == 0.009
    assert value(samples, "step_time_error") == 0.125
    assert value(samples, "iteration_tokens_sum") == 1
    assert value(samples, "padding_tokens_total") == 1
    assert value(samples, "prompt_tokens_total") == 0
    after = scrape(metrics)
    assert value(after, "num_requests_running") == 0
    assert value(after, "request_success_total", finished_reason="abort") == 1


def test_drafts_are_counted_by_who_drafts(engine: FakeEngine) -> None:
    metrics = EngineMetrics(engine, CallTracker(()))
    lookup, grammar = "prompt_lookup", "grammar"
    right, wrong = {lookup: 3, grammar: 2}, {lookup: 4, grammar: 0}
    for _ in range(2):
        metrics.on_step(dataclasses.replace(step_stats(2), accepted=right, rejected=wrong))
    found = {
        (
            sample.name.removeprefix("jaxserve:spec_decode_num_"),
            sample.labels["drafter"],
        ): sample.value
        for family in metrics.collect()
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert found == {
        ("draft_tokens_total", lookup): 14,
        ("accepted_tokens_total", lookup): 6,
        ("draft_tokens_total", grammar): 4,
        ("accepted_tokens_total", grammar): 4,
    }


def test_counters_and_only_they_end_in_total(engine: FakeEngine) -> None:
    text = MetricsRegistry(engine, CallTracker(())).page().decode()
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(types) > 30
    assert [name for name, kind in types if (kind == "counter") != name.endswith("_total")] == []


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for observed in (0.5, 1.0, 1.5, 5.0, 6.0):
        histogram.observe(observed)
    assert histogram.cumulative() == ([("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)], 14.0)


def test_no_metrics_without_a_port(server: Server) -> None:
    assert server.metrics_address is None


def test_a_taken_metrics_port_is_one_clear_line(metrics: Server) -> None:
    assert metrics.metrics_address is not None
    port = int(metrics.metrics_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"server.metrics_port: cannot listen .*{port}"):
        registry = MetricsRegistry(FakeEngine(), CallTracker(())).registry
        MetricsServer(registry, "localhost", port, Access())


def test_the_page_of_operations_lists_all_metrics() -> None:
    rows = []
    for family in MetricsRegistry(FakeEngine(), CallTracker(())).registry.collect():
        labels = ", ".join(f"`{label}`" for label in family._labelnames if label != "model_name")
        cells = [f"`{family.name}`", family.type, labels, family.documentation]
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    table = re.findall(r"^\| `jaxserve:.*$", page, re.MULTILINE)
    assert table == rows, "docs/operations.md's table of metrics should be:\n" + "\n".join(rows)
