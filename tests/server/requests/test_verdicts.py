"""Every final message says whether the targets were met, and so do client and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.client import Client
from jaxserve.client.cli import complete
from jaxserve.client.records import EXPECTED_MISSED, verdict_line, verdict_record
from jaxserve.sched.cost.reachability import SloProblem, SloProblemKind
from jaxserve.sched.request import SLO, Tier
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine
from tests.server.telemetry.test_prometheus import scrape, value

# The fake engine takes 200 ms for the first token, 20 ms for the next, and 300 ms in all.
CHAT = ServiceLevel(SLO(ttft=0.25, tbt=0.05), Tier.REALTIME, "chat")
BAD = SloProblem(SloProblemKind.TTFT_UNREACHABLE, 0.1, 0.15)


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Server]:
    with Server(engine, metrics_port=0, grace_s=0.0, slo_classes={"chat": CHAT}) as server:
        yield server


@pytest.mark.promise(19)
def test_what_was_asked_what_was_got_and_whether_that_is_enough(
    client: Client, engine: FakeEngine
) -> None:
    engine.run()
    engine.problems = (BAD,)
    options = {"slo_class": "chat", "slo": {"tbt_ms": 60.0, "jct_ms": 250.0}, "max_tokens": 4}
    for completion in client.complete("hi", n=2, **options):
        # Tokens at 200, 220, 240 and 300 ms: of 20, 20 and 60 the 99th percentile.
        assert completion.timings.tbt_ms == pytest.approx(59.2)
        assert completion.timings.max_tbt_ms == pytest.approx(60.0)
        assert completion.slo == pb.SloVerdict(
            slo_class="chat",
            tier=pb.TIER_REALTIME,
            targets=pb.Slo(ttft_ms=250, tbt_ms=60, jct_ms=250, max_tbt_ms=2000),
            ttft_met=True,
            tbt_met=True,
            jct_met=False,
            targets_met=pb.TargetsMet(ttft_ms=True, tbt_ms=True, jct_ms=False, max_tbt_ms=True),
            met=False,
            problems=[
                pb.SloProblem(
                    kind=pb.SLO_PROBLEM_KIND_TTFT_UNREACHABLE, target_ms=100, limit_ms=150
                )
            ],
        )


def test_a_stream_that_stands_still_once_is_missed(client: Client, engine: FakeEngine) -> None:
    engine.run()
    # Tokens at 200, 220, 240 and 300 ms: the 99th percentile is within it, the longest is not.
    asked = {"tbt_ms": 59.5, "max_tbt_ms": 59.5}
    (one,) = client.complete("hi", max_tokens=4, slo=asked)
    assert one.slo is not None and not one.slo.met
    assert one.slo.targets == pb.Slo(**asked)
    assert one.slo.targets_met == pb.TargetsMet(tbt_ms=True, max_tbt_ms=False)
    line = "slo default missed: TBT 59.2 of 59.5 ms, longest TBT 60 of 59.5 ms, missed"
    assert verdict_line(one.slo, one.timings) == line
    (alone,) = client.complete("hi", max_tokens=4, slo={"max_tbt_ms": 61.0})
    assert alone.slo is not None and alone.slo.met
    assert alone.slo.targets_met == pb.TargetsMet(max_tbt_ms=True)


def test_the_longest_default_is_a_number_of_milliseconds(
    client: Client, engine: FakeEngine
) -> None:
    engine.run()
    (one,) = client.complete("hi", max_tokens=2, slo={"tbt_ms": 1e308})
    assert one.slo is not None and math.isfinite(one.slo.targets.max_tbt_ms) and one.slo.met


def test_a_target_that_is_not_there_has_no_verdict(client: Client, engine: FakeEngine) -> None:
    engine.run()
    (one,) = client.complete("hi", max_tokens=2, slo={"jct_ms": 300.0})
    assert one.slo is not None and one.slo.targets_met.jct_ms and one.slo.met
    assert one.slo.slo_class == "default"
    assert [field.name for field, _ in one.slo.targets_met.ListFields()] == ["jct_ms"]
    assert not one.slo.HasField("ttft_met") and not one.slo.HasField("tbt_met")
    (none,) = client.complete("hi", max_tokens=1)
    assert none.slo is None and not none.timings.HasField("tbt_ms")
    assert none.timings.ttft_ms == 200


def test_who_waits_is_told_once_that_targets_are_given_up(
    client: Client, engine: FakeEngine, server: Server
) -> None:
    stream = client.generate("hi", max_tokens=3, slo_class="chat")
    engine.give_up()
    assert value(scrape(server), "slo_given_up_total", slo_class="chat", tier="realtime") == 1
    engine.step(3)
    messages = list(stream)
    assert sum(message.expected_missed for message in messages) == 1
    assert sum(len(message.token_ids) for message in messages) == 3
    assert messages[-1].finish.slo.targets_met.ttft_ms


def test_a_cancelled_request_is_judged_too(client: Client, engine: FakeEngine) -> None:
    stream = client.generate("hi", max_tokens=9, request_id="mine", slo_class="chat")
    engine.wait(lambda: engine.live)
    engine.step()
    assert next(stream).token_ids
    engine.cancel("mine")
    finish = next(stream).finish
    assert finish.reason == pb.FINISH_REASON_CANCELLED
    # Its second token has not come 100 ms after the first one.
    assert finish.slo.targets_met.ttft_ms and not finish.slo.targets_met.tbt_ms


def test_a_server_of_the_last_release_is_understood() -> None:
    verdict = pb.SloVerdict(targets=pb.Slo(ttft_ms=250, jct_ms=250), ttft_met=True, jct_met=False)
    older = verdict_record(verdict)["targets_met"]
    verdict = pb.SloVerdict(
        targets=verdict.targets, targets_met=pb.TargetsMet(ttft_ms=True, jct_ms=False)
    )
    assert older == verdict_record(verdict)["targets_met"] == {"ttft_ms": True, "jct_ms": False}
    assert "TTFT 0 of 250 ms, JCT 0 of 250 ms, missed" in verdict_line(verdict, pb.Timings())


def test_the_client_prints_it(
    server: Server, engine: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine.run()
    flags = [f"--address={server.address}", "hi", "--max_tokens=4", "--slo_class=chat"]
    assert complete(flags) == 0
    line = (
        "slo chat missed: TTFT 200 of 250 ms, TBT 59.2 of 50 ms, missed, "
        "longest TBT 60 of 2000 ms\n"
    )
    assert capsys.readouterr().err == line
    engine.problems = (BAD, SloProblem(SloProblemKind.JCT_BEFORE_TTFT, 0.2, 0.25))
    assert complete([*flags, "--n=2", "--tbt_ms=100"]) == 0
    line = (
        "slo chat met: TTFT 200 of 250 ms, TBT 59.2 of 100 ms, longest TBT 60 of 2000 ms; "
        "note: ttft_ms 100 is less than the 150 that the prompt takes alone; "
        "note: jct_ms 200 is less than ttft_ms, 250\n"
    )
    assert capsys.readouterr().err == 2 * line
    assert complete([f"--address={server.address}", "hi", "--max_tokens=4"]) == 0
    assert capsys.readouterr().err == ""
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("one\n")
    flags = [f"--file={source}", f"--out={target}", "--max_tokens=4", "--slo_class=chat"]
    assert complete([f"--address={server.address}", *flags]) == 0
    (completion,) = json.loads(target.read_text())["completions"]
    assert completion["timings"]["tbt_ms"] == pytest.approx(59.2)
    assert completion["timings"]["max_tbt_ms"] == pytest.approx(60.0)
    assert completion["slo"] == {
        "class": "chat",
        "tier": "realtime",
        "targets": {"ttft_ms": 250.0, "tbt_ms": 50.0, "max_tbt_ms": 2000.0},
        "targets_met": {"ttft_ms": True, "tbt_ms": False, "max_tbt_ms": True},
        "met": False,
        "problems": [
            {"kind": "ttft_unreachable", "target_ms": 100.0, "limit_ms": 150.0},
            {"kind": "jct_before_ttft", "target_ms": 200.0, "limit_ms": 250.0},
        ],
    }


def test_the_client_says_at_once_that_they_are_given_up(
    server: Server, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.gives_up = True
    engine.run()
    flags = [f"--address={server.address}", "hi", "--max_tokens=2", "--slo_class=chat"]
    assert complete(flags) == 0
    out, error = capsys.readouterr()
    said, line = error.strip().splitlines()
    assert out == "hi w0 w1\n" and said == EXPECTED_MISSED and line.startswith("slo chat ")


def test_the_client_lists_the_classes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete([f"--address={server.address}", "--info"]) == 0
    out = capsys.readouterr().out
    assert "slo_classes        chat (ttft_ms 250, tbt_ms 50)\n" in out


def test_the_metrics_count_it_by_class_and_tier(server: Server, engine: FakeEngine) -> None:
    with Client(server.address) as client:
        engine.run()
        client.complete("hi", n=2, max_tokens=4, slo_class="chat")  # misses its TBT
        client.complete("hi", max_tokens=3, slo_class="chat", slo={"tbt_ms": 100.0})
        client.complete("hi", max_tokens=4, slo={"jct_ms": 1e3}, tier="best_effort")
        client.complete("hi", max_tokens=4)  # has no targets
    samples = scrape(server)
    chat = {"slo_class": "chat", "tier": "realtime"}
    counts = {"all": (1, 2), "ttft": (3, 0), "tbt": (1, 2), "max_tbt": (3, 0)}
    for target, (attained, missed) in counts.items():
        assert value(samples, "slo_attained_total", target=target, **chat) == attained
        assert value(samples, "slo_missed_total", target=target, **chat) == missed
    other = {"slo_class": "default", "tier": "best_effort"}
    for target in ("all", "jct"):
        assert value(samples, "slo_attained_total", target=target, **other) == 1
        assert value(samples, "slo_missed_total", target=target, **other) == 0
    counted = {labels for name, labels in samples if name == "jaxserve:slo_attained_total"}
    assert len(counted) == 4 + 2
