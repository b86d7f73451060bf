"""The console: a page, and what it is fed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jaxserve.client import Client
from jaxserve.config import SchedulerConfig
from jaxserve.engine.output import FinishReason
from jaxserve.engine.stats import RequestStats
from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cache.cache_kinds import CacheKind, Direction
from jaxserve.sched.cache.pool_map import BlockUse, pool_map
from jaxserve.sched.request import NO_CLASS, SLO, Request, Tier
from jaxserve.sched.slo.ttft_estimator import Wait
from jaxserve.sched.slo.verdict import Verdict
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.http import live_feed, web_console
from jaxserve.server.http.live_feed import PARTS, STEPS, LiveFeed, scheduling_decision
from jaxserve.server.http.web_console import FOLDER, PAGE, Events
from jaxserve.server.requests.engine_requests import EngineRequests
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import INFO, FakeEngine, step_stats
from tests.server.http.conftest import SETTINGS, Plain


def events(plain: Plain) -> Iterator[dict[str, Any]]:
    connection = plain.connect()
    connection.request("GET", "/console/events")
    response = connection.getresponse()
    assert response.getheader("content-type", "").startswith("text/event-stream")
    try:
        while line := response.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


@pytest.mark.promise(27)
def test_the_page_needs_nothing_from_elsewhere(plain: Plain) -> None:
    assert {"/", "/console/main.mjs", "/console/console.css"} <= PAGE.keys()
    for where in PAGE:
        connection = plain.connect()
        connection.request("GET", where)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        kind = {"css": "text/css", "mjs": "text/javascript"}.get(
            where.rpartition(".")[2], "text/html"
        )
        assert response.status == 200 and response.getheader("content-type", "").startswith(kind)
        policy = response.getheader("content-security-policy", "")
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy
        assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
        loaded = re.findall(r"(?:src|href)=\"(?!data:|#)([^\"]*)", text) if where == "/" else []
        assert {f"/{each}" for each in loaded} <= PAGE.keys()
        for name in re.findall(r"^import .*from \"(.*)\"", text, re.MULTILINE):
            assert f"/console/{name.removeprefix('./')}" in PAGE
        assert not re.findall(r"@import|url\(", text) or not where.endswith(".css")
        if not where.endswith("marked.mjs"):
            assert "://" not in text
            assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document.write|eval\(", text)


def test_whose_the_parser_of_markdown_is() -> None:
    """Its licence comes along, and the version is said where it is used."""
    (version,) = re.findall(r"marked v(\S+) ", (FOLDER / "marked.mjs").read_text())
    assert f"marked {version}," in (FOLDER / "markdown.mjs").read_text()
    assert "MIT" in (FOLDER / "marked-LICENSE.txt").read_text()
    metadata = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert str(FOLDER.relative_to(Path(__file__).parents[3]) / "marked-LICENSE.txt") in metadata


def test_what_a_request_may_say_and_what_is_meant_where_it_does_not(
    plain: Plain, engine: FakeEngine
) -> None:
    engine.load_adapter("stories", "x")
    info = plain.call("GET", "/console/info")[1]
    assert (info["model"], info["chat"]) == (INFO.model, False)  # it has no chat template
    assert info["defaults"] == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
    assert info["slo_classes"] == {
        "offline": {"targets": {"jct_ms": 60_000}, "tier": "best_effort"}
    }
    assert info["adapters"] == ["stories"]


def test_a_snapshot_is_put_together_once_for_all_who_look(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Feed:
        count = 0

        def snapshot(self) -> dict[str, Any]:
            self.count += 1
            return {"count": self.count}

    async def three() -> list[bytes]:
        requests = EngineRequests(engine)
        events = Events(requests, cast(LiveFeed, feed))
        found = [await anext(events.stream()) for _ in range(2)]
        requests.stop_admission()
        return [*found, await anext(events.stream())]

    monkeypatch.setattr(web_console, "PAUSE_S", 1000.0)
    feed = Feed()
    first, second, closed = asyncio.run(three())
    assert first == second == b'data: {"count":1,"closed":null}\n\n'
    assert b'"closed":"the server is shutting down"' in closed and feed.count == 2


def test_the_page_shows_what_the_events_have(plain: Plain) -> None:
    """Each name that the script takes of a snapshot is there, and each place that it fills."""
    (snapshot,) = (each for each, _ in zip(events(plain), range(1), strict=False))
    script = (FOLDER / "operations.mjs").read_text()
    taken = set(re.findall(r"\bstate\.(\w+)", script))
    assert "latency" in taken and taken <= set(snapshot), taken - set(snapshot)
    assert set(re.findall(r"\bstate\.pool\.(\w+)", script)) <= set(snapshot["pool"])
    page = PAGE["/"].read_text()
    for name in ("main", "chat", "operations"):
        places = set(re.findall(r"\$\(\"([\w-]+)\"\)", (FOLDER / f"{name}.mjs").read_text()))
        assert places and places <= set(re.findall(r"id=\"([\w-]+)\"", page)), name


def test_values_change_while_load_runs(plain: Plain, engine: FakeEngine, server: Server) -> None:
    with Client(server.address) as client:
        stream = iter(client.generate("Hi", max_tokens=3, tier="best_effort"))
        engine.wait(lambda: engine.live)
        engine.step()
        next(stream)
        feed = events(plain)
        first = next(feed)
        assert (first["running"], first["seen"]) == (1, 1)
        row = {"tier": "best_effort", "class": NO_CLASS, "running": 1, "waiting": 0}
        assert first["requests"] == [row]
        assert first["pool"]["map"].startswith("110") and len(first["pool"]["map"]) == 1024
        assert first["steps"] == [[0, 0, 0, 0, 0]] or first["steps"][0][0] >= 0
        engine.step(2)
        list(stream)
        later = next(feed)
        while later["running"]:
            later = next(feed)
        assert later["seen"] == 2 and later["pool"]["map"] == "0" * 1024
        feed.close()  # type: ignore[attr-defined]


def test_the_events_end_with_the_server(plain: Plain, engine: FakeEngine) -> None:
    feed = events(plain)
    assert next(feed)["closed"] is None
    engine.fail(RuntimeError("out of luck"))
    *_, last = feed
    assert "out of luck" in last["closed"]


def test_the_feed_keeps_the_last_steps_and_minutes() -> None:
    engine = FakeEngine()
    feed = LiveFeed(engine, SchedulerConfig(max_rows=16))
    assert feed.snapshot()["decision"] == "Nothing has been served yet."
    assert feed.snapshot()["latency"] == []
    for rows in range(1, STEPS + 10):
        feed.on_step(step_stats(rows))
    feed.on_first_token(0.5, Tier.REALTIME)
    feed.on_first_token(9.0, Tier.BEST_EFFORT)
    for tbt in (0.010, 0.020, 0.030):
        feed.on_inter_token(tbt, Tier.REALTIME)
    snapshot = feed.snapshot()
    assert len(snapshot["steps"]) == STEPS and snapshot["seen"] == STEPS + 9
    assert snapshot["steps"][-1] == [STEPS + 9, 0, 0, 0, 0]
    realtime, best_effort = snapshot["latency"]
    assert realtime["ttft_ms"] == {"p50": 500.0, "p99": 500.0}
    assert realtime["tbt_ms"]["p50"] == pytest.approx(20.0)
    assert best_effort["tier"] == "best_effort" and best_effort["ttft_ms"]["p50"] == 9000.0
    assert best_effort["tbt_ms"] is None
    assert snapshot["tokens_per_s"] == pytest.approx(0.5)


def test_the_last_step_says_how_many_drafts_it_had() -> None:
    feed = LiveFeed(FakeEngine(), SchedulerConfig(max_rows=16))
    accepted = {"prompt_lookup": 4, "grammar": 1}
    feed.on_step(dataclasses.replace(step_stats(2), num_draft_tokens=7, accepted=accepted))
    assert "2 decodes + 7 drafts, 5 right" in feed.snapshot()["decision"]


def ended(prompt_tokens: int, met: bool | None = None) -> RequestStats:
    verdict = None if met is None else Verdict(SLO(), "gold", Tier.REALTIME, met, None, None)
    length = FinishReason.LENGTH
    return RequestStats(0, length, Tier.REALTIME, prompt_tokens, 1, 0, 0.0, 0.1, 0.1, verdict)


def test_what_a_newcomer_of_median_length_would_wait() -> None:
    engine, asked = FakeEngine(), list[Request]()
    feed = LiveFeed(engine, SchedulerConfig(max_rows=16))
    assert feed.snapshot()["newcomer"] is None, "nobody knows how long prompts are"
    engine.expected_wait = lambda one: asked.append(one) or Wait(0.5, 0.1)  # type: ignore[method-assign]
    for tokens in (3, 70, 90, 1000):
        feed.on_finish(ended(tokens))
    assert feed.snapshot()["newcomer"] == {"prompt_tokens": 80, "ttft_ms": 500.0}
    assert [(len(one.prompt), one.tier) for one in asked] == [(80, Tier.REALTIME)]


def test_targets_met_have_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, now = LiveFeed(FakeEngine(), SchedulerConfig(max_rows=16)), [1000.0]
    monkeypatch.setattr(live_feed.time, "monotonic", lambda: now[0])
    for second, met in ((0.0, False), (1.0, True), (200.0, True), (310.0, False), (310.0, True)):
        now[0] = 1000.0 + second
        feed.on_finish(ended(5, met))
    feed.on_finish(ended(5))  # without targets
    now[0] = 1310.5
    (gold,) = feed.snapshot()["attainment"]
    history = gold.pop("history")
    assert gold == {"class": "gold", "met": 2, "missed": 1, "refused": 0, "given_up": 0}
    assert len(history) == PARTS and history[-1] == [1, 1, 0]
    assert [part for part in history if any(part)] == [[1, 0, 0], [1, 1, 0]]


def counts(feed: LiveFeed) -> dict[str, tuple[int, ...]]:
    """By class: met, missed, given up and still running, refused."""
    kinds = ("met", "missed", "given_up", "refused")
    return {
        each["class"]: tuple(each[kind] for kind in kinds) for each in feed.snapshot()["attainment"]
    }


def test_who_is_given_up_counts_once_running_or_ended(engine: FakeEngine, server: Server) -> None:
    """100% of one, and six given up, is not what there is to say of seven."""
    feed = server._feed
    assert feed is not None
    with Client(server.address) as client:
        stream = iter(client.generate("Hi", max_tokens=2, slo={"ttft_ms": 100}))
        engine.give_up()
        assert counts(feed) == {NO_CLASS: (0, 0, 1, 0)}
        engine.step(2)
        list(stream)
        stream = iter(client.generate("Hi", max_tokens=1, slo={"ttft_ms": 9000}))
        engine.wait(lambda: engine.live)
        assert counts(feed) == {NO_CLASS: (0, 1, 0, 0)}, "the other one has nothing to do with it"
        engine.step()
        list(stream)
    assert counts(feed) == {NO_CLASS: (1, 1, 0, 0)}


def test_who_is_refused_has_missed_its_targets(engine: FakeEngine) -> None:
    engine.wait_s = Wait(seconds=90.0, alone=0.1)
    options = ServerOptions(refuse_late=0.75)
    with Server(engine, grace_s=0.0, http=SETTINGS, options=options) as server:
        feed = server._feed
        assert server.http_address is not None and feed is not None
        plain, body = Plain(server), {"prompt": "Hi", "slo": {"ttft_ms": 500}, "n": 2}
        status, answer, _ = plain.call("POST", "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (429, "expected_late")
        assert plain.call("POST", "/v1/completions", {**body, "n": 0})[0] == 400
    assert counts(feed) == {NO_CLASS: (0, 0, 0, 2)}
    assert feed.snapshot()["attainment"][0]["history"][-1] == [0, 0, 2]


def test_the_page_s_files_need_no_key(engine: FakeEngine) -> None:
    """They have nothing of what it shows."""
    with Server(engine, http=SETTINGS, access=Access(Keys(fixed=[key("alice")]))) as server:
        for where, status in (*((where, 200) for where in PAGE), ("/console/info", 401)):
            connection = Plain(server).connect()
            connection.request("GET", where)
            assert connection.getresponse().status == status
            connection.close()


@pytest.mark.parametrize(
    ("waiting", "free", "rows", "tokens", "says"),
    [
        (0, 500, 4, 4, "nobody else waits"),
        (3, 500, 4, 512, "the batch is full, 3 wait"),
        (1, 500, 16, 20, "all 16 rows are taken, 1 waits"),
        (2, 3, 4, 20, "the pool is full, 2 wait"),
        (2, 500, 4, 20, "the policy holds back, 2 wait"),
    ],
)
def test_why_no_more_were_in_the_batch(
    waiting: int, free: int, rows: int, tokens: int, says: str
) -> None:
    stats = dataclasses.replace(FakeEngine().stats(), waiting=waiting, blocks_free=free)
    step = dataclasses.replace(
        step_stats(rows), num_decodes=0, num_decode_tokens=0, num_prefill_tokens=tokens
    )
    line = scheduling_decision(step, stats, SchedulerConfig(max_rows=16))
    assert line.endswith(f": {says}")
    assert line.startswith(f"{tokens} prompt tokens (8.0 ms, predicted 9.0)")


def test_a_map_of_the_pool() -> None:
    pool = BlockPool(16, 4, max_owners=4, width=4)
    tier = np.array([Tier.REALTIME, Tier.BEST_EFFORT, Tier.REALTIME, Tier.REALTIME])
    pool.open_cache(0, CacheKind.KV)
    pool.grow(0, 5)  # two blocks a plane
    pool.open_cache(1, CacheKind.KV, Direction.RIGHT)
    pool.grow(1, 4)
    pool.open_cache(2, CacheKind.HIDDEN)
    pool.grow(2, 4)
    uses = pool_map(pool, tier)
    keys, values = pool.blocks_of(0)
    assert (uses[keys] == BlockUse.K_REALTIME).all() and (uses[values] == BlockUse.V_REALTIME).all()
    (key,), (value,) = pool.blocks_of(1)
    assert uses[key] == BlockUse.K_BEST_EFFORT and uses[value] == BlockUse.V_BEST_EFFORT
    assert (uses[pool.blocks_of(2)] == BlockUse.HIDDEN_REALTIME).all()
    assert np.count_nonzero(uses == BlockUse.FREE) == pool.num_free == 16 - 4 - 2 - 1


@pytest.mark.parametrize("most", [16, 64, 100, 4096])
def test_a_picture_of_a_large_pool_has_the_shares_of_all_blocks(
    most: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V are taken in turn: every second block would be all K."""
    uses = np.zeros(1024, np.uint8)
    uses[:512:2], uses[1:512:2] = BlockUse.K_REALTIME, BlockUse.V_REALTIME
    uses[512:768] = BlockUse.SHARED
    monkeypatch.setattr(live_feed, "MAX_CELLS", most)
    monkeypatch.setattr(engine, "block_map", lambda: uses)
    pool = LiveFeed(engine, SchedulerConfig()).snapshot()["pool"]
    counts = np.bincount(uses, minlength=len(BlockUse))
    assert pool["counts"] == counts.tolist()
    cells = np.array([int(cell) for cell in pool["map"]])
    assert len(cells) <= most
    shown = pool["every"] * np.bincount(cells, minlength=len(BlockUse))
    assert np.abs(shown - counts).max() <= pool["every"] * (len(uses) / pool["every"] ** 2 + 1)
    assert (shown[counts > 0] > 0).all()
