"""Batches that outlive a server, its engine, or a moment of its disk."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from threading import Event

import grpc
import pytest

from jaxserve.server.batches.journal import Journal
from tests.server.batches.serving import PATIENCE, STATE, batch_server
from tests.server.batches.test_serving import line
from tests.server.fake_engine import INFO, FakeEngine


def test_lines_in_flight_wait_for_the_next_server(tmp_path: Path) -> None:
    first = FakeEngine()
    with batch_server(first, tmp_path) as door:
        door.submit("b", [line(f"{n}", max_tokens=1 if n < 2 else 9) for n in range(6)])
        first.wait(lambda: len(first.live) == 4)
        pages = door.pages("b", follow=True)
        first.step()
        next(page for page in pages if page.status.done == 2)
        first.wait(lambda: len(first.live) == 4)
        door.server.stop(PATIENCE)
        with pytest.raises(grpc.RpcError, match="shutting down") as error:
            list(pages)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not first.live and len(first.cancelled) == 4
    second = FakeEngine().run()
    with batch_server(second, tmp_path) as door:
        assert [result.line for result in door.results("b")] == [*range(6)]
        assert door.status("b").done == 6
    prompts = ["".join(map(chr, request.prompt)) for request in second.requests]
    assert prompts == ["2", "3", "4", "5"], "in order, and not what was done"


def test_an_engine_that_fails_leaves_the_batch_for_the_next_server(tmp_path: Path) -> None:
    for fail in ("fail", "fail_silently"):
        first = FakeEngine()
        with batch_server(first, tmp_path / fail) as door:
            door.submit("b", [line(max_tokens=1), line(), line()])
            first.wait(lambda first=first: len(first.live) == 3)
            pages = door.pages("b", follow=True)
            first.step()
            next(page for page in pages if page.results)
            getattr(first, fail)(RuntimeError("out of memory"))
            with pytest.raises(grpc.RpcError, match="the engine failed: out of memory") as error:
                list(pages)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.RpcError, match="out of memory"):
                door.submit("c", [line()])
            status = door.status("b")  # can still be read
            assert (status.state, status.done, status.failed) == (STATE["COMMITTED"], 1, 0)
        second = FakeEngine().run()
        with batch_server(second, tmp_path / fail) as door:
            assert len(door.results("b")) == 3
        assert len(second.requests) == 2


@pytest.mark.promise(20)
def test_a_disk_that_fails_for_a_moment_loses_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.server.batches.batch_runner.RETRY_S", 0.01)
    engine = FakeEngine().run()
    with batch_server(engine, tmp_path) as door:
        record, waiting = door.journal.record, door.journal.waiting
        failures = {"record": 2, "waiting": 2}

        def flaky(name: str, function, *arguments):
            if failures[name]:
                failures[name] -= 1
                raise sqlite3.OperationalError("disk I/O error")
            return function(*arguments)

        monkeypatch.setattr(door.journal, "record", lambda *a: flaky("record", record, *a))
        monkeypatch.setattr(door.journal, "waiting", lambda *a: flaky("waiting", waiting, *a))
        door.submit("b", [line(max_tokens=1)] * 5)
        assert len(door.results("b")) == 5
        assert not any(failures.values()) and len(engine.requests) == 5


def test_a_disk_that_does_not_answer_is_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments, **options):
        raise sqlite3.OperationalError("database or disk is full")

    with batch_server(FakeEngine(), tmp_path) as door:
        monkeypatch.setattr(door.journal, "append", broken)
        with pytest.raises(grpc.RpcError, match="disk: database or disk is full") as error:
            door.submit("b", [line()])
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_server_of_another_model_leaves_it_alone(tmp_path: Path) -> None:
    with batch_server(FakeEngine(), tmp_path) as door:
        door.submit("b", [line(max_tokens=1)])
    other = FakeEngine().run()
    other.info = lambda: dataclasses.replace(INFO, model="other")
    with batch_server(other, tmp_path) as door:
        assert door.status("b").model == "fake"
        with pytest.raises(grpc.RpcError, match=r"for the model 'fake'; this .* 'other'") as error:
            door.results("b")
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        door.submit("c", [line(max_tokens=1)])
        assert len(door.results("c")) == 1
    assert len(other.requests) == 1
    with batch_server(FakeEngine().run(), tmp_path) as door:
        assert len(door.results("b")) == 1


def test_what_is_old_is_forgotten_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with batch_server(FakeEngine().run(), tmp_path) as door:
        door.submit("over", [line(max_tokens=1)])
        assert len(door.results("over")) == 1
        door.submit("open", [line()], commit=False)
    clean, cleaned = Journal.clean, Event()

    def spied(journal: Journal, keep_s: float) -> int:
        try:
            return clean(journal, keep_s)
        finally:
            cleaned.set()

    monkeypatch.setattr(Journal, "clean", spied)
    with batch_server(FakeEngine(), tmp_path, keep_s=0.0) as door:
        assert cleaned.wait(PATIENCE)
        for name in ("over", "open"):
            with pytest.raises(grpc.RpcError, match=f"no batch '{name}'"):
                door.status(name)


def test_who_follows_a_batch_hears_that_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, due = Journal.clean, Event()
    monkeypatch.setattr(Journal, "clean", lambda *a: clean(*a) if due.is_set() else 0)
    monkeypatch.setattr("jaxserve.server.batches.batch_operations._CLEAN_S", 0.01)
    with batch_server(FakeEngine(), tmp_path, keep_s=0.0) as door:
        door.submit("open", [line()], commit=False)
        pages = door.pages("open", follow=True)
        next(pages)
        due.set()
        with pytest.raises(grpc.RpcError, match="no batch 'open'"):
            next(pages)
        due.clear()
        door.submit("gone", [line()], commit=False)
        pages = door.pages("gone", follow=True)
        next(pages)
        door.delete("gone")
        with pytest.raises(grpc.RpcError, match="no batch 'gone'"):
            next(pages)
