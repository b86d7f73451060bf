"""Batches and files belong to the key that they came with."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.client import Client, ServerError, make_line
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import NewLine, Position, UnknownBatch
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.batches.serving import serving as with_batches
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

KEYS = Keys(fixed=[key("alice"), key("bob")])


@contextlib.contextmanager
def serving(directory: Path, keys: Keys) -> Iterator[Server]:
    with with_batches(FakeEngine().run(), directory, http=SETTINGS, access=Access(keys)) as server:
        yield server


def http(server: Server, name: str) -> openai.OpenAI:
    url = f"http://{server.http_address}/v1"
    return openai.OpenAI(base_url=url, api_key=name, max_retries=0)


def of_http(client: openai.OpenAI) -> Any:
    body = {"prompt": "a", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = client.files.create(file=io.BytesIO(json.dumps(line).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def names(page: Any) -> list[str]:
    return [each.id for each in page.data]


@pytest.mark.promise(15)
def test_over_grpc(tmp_path: Path) -> None:
    with (
        serving(tmp_path, KEYS) as server,
        Client(server.address, api_key="alice") as alice,
        Client(server.address, api_key="bob") as bob,
    ):
        lines = [make_line("a", max_tokens=2)]
        alice.submit_batch("mine", lines)
        assert alice.submit_batch("mine", lines).num_lines == 1  # again, as it was
        for call, code in (
            (lambda: bob.batch_status("mine"), "NOT_FOUND"),
            (lambda: list(bob.get_batch("mine")), "NOT_FOUND"),
            (lambda: bob.cancel_batch("mine"), "NOT_FOUND"),
            (lambda: bob.delete_batch("mine"), "NOT_FOUND"),
        ):
            with pytest.raises(ServerError) as error:
                call()
            assert error.value.code == code
            assert str(error.value) == "batch_id: there is no batch 'mine'", "nor of anybody else"
        assert bob.submit_batch("mine", [*lines, *lines]).num_lines == 2  # of his own
        *_, last = alice.get_batch("mine")
        assert last.status.done == last.status.num_lines == 1
        alice.delete_batch("mine")
        with pytest.raises(ServerError, match="there is no batch"):
            alice.batch_status("mine")
        assert bob.cancel_batch("mine").num_lines == 2


@pytest.mark.promise(15)
def test_over_http(tmp_path: Path) -> None:
    with (
        serving(tmp_path, KEYS) as server,
        http(server, "alice") as alice,
        http(server, "bob") as bob,
        Client(server.address, api_key="alice") as grpc,
    ):
        mine, other = of_http(alice), of_http(bob)
        list(grpc.get_batch(mine.id))
        assert names(alice.batches.list()) == [mine.id]
        assert names(alice.files.list()) == [mine.input_file_id]
        done = alice.batches.retrieve(mine.id)
        assert done.output_file_id and '"a"' in alice.files.content(done.output_file_id).text
        for call in (
            lambda: bob.batches.retrieve(mine.id),
            lambda: bob.batches.cancel(mine.id),
            lambda: bob.files.retrieve(mine.input_file_id),
            lambda: bob.files.content(mine.input_file_id),
            lambda: bob.files.content(done.output_file_id),
            lambda: bob.files.delete(mine.input_file_id),
            lambda: bob.batches.create(
                input_file_id=mine.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert names(bob.batches.list()) == [other.id]
        assert names(bob.files.list()) == [other.input_file_id]
        assert alice.files.delete(mine.input_file_id).deleted


def test_without_keys_everybody_sees_all_and_with_them_nobody_what_was_nobody_s(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, KEYS) as server, http(server, "alice") as alice:
        hers = of_http(alice)
    with serving(tmp_path, Keys()) as server, http(server, "none") as anybody:
        open_to_all = of_http(anybody)
        assert set(names(anybody.batches.list())) == {hers.id, open_to_all.id}
    with serving(tmp_path, KEYS) as server, http(server, "alice") as alice:
        assert names(alice.batches.list()) == [hers.id]
        assert names(alice.files.list()) == [hers.input_file_id]


VERSION_1 = """
CREATE TABLE batches (key INTEGER PRIMARY KEY AUTOINCREMENT, batch_id TEXT NOT NULL UNIQUE,
    model TEXT NOT NULL, state TEXT NOT NULL, num_lines INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, changed REAL NOT NULL);
CREATE TABLE commits (place INTEGER PRIMARY KEY AUTOINCREMENT,
    batch INTEGER NOT NULL UNIQUE REFERENCES batches ON DELETE CASCADE);
CREATE TABLE lines (batch INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE,
    line INTEGER NOT NULL, request TEXT NOT NULL, PRIMARY KEY (batch, line));
CREATE TABLE results (batch INTEGER NOT NULL REFERENCES batches ON DELETE CASCADE,
    line INTEGER NOT NULL, failed INTEGER NOT NULL, result TEXT NOT NULL,
    PRIMARY KEY (batch, line));
INSERT INTO batches VALUES (7, 'old', 'm', 'committed', 2, 1, 0, 1.0);
INSERT INTO commits VALUES (3, 7);
INSERT INTO lines VALUES (7, 0, 'first'), (7, 1, 'second');
INSERT INTO results VALUES (7, 0, 0, 'done');
PRAGMA user_version = 1;
"""
OWNERS = """
CREATE TABLE owners (batch INTEGER PRIMARY KEY REFERENCES batches ON DELETE CASCADE,
    owner TEXT NOT NULL);
INSERT INTO owners VALUES (7, 'alice');
"""


@pytest.mark.parametrize(("more", "owner"), [("", ""), (OWNERS, "alice")])
def test_a_journal_from_before_ids_were_each_owner_s(tmp_path: Path, more: str, owner: str) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        db.executescript(VERSION_1 + more)
    for _ in range(2):  # the second time it is as it should be
        with contextlib.closing(Journal(tmp_path, 1 << 20)) as journal:
            status = journal.status("old", owner)
            assert (status.key, status.owner, status.num_lines, status.done) == (7, owner, 2, 1)
            (work,) = journal.waiting("m", {}, 9)
            assert (work.request, work.owner, work.position) == ("second", owner, Position(3, 1))
            assert [each.result for each in journal.results("old", 0, max_bytes=99)] == ["done"]
            with pytest.raises(UnknownBatch):
                journal.status("old", "bob")
            journal.append("old", "m", 0, [NewLine("x")], commit=False, owner="bob")
            assert journal.status("old", "bob").key > 7
            journal.delete("old", "bob")
    with contextlib.closing(Journal(tmp_path, 1 << 20)) as journal:
        journal.cancel("old", owner)
        journal.delete("old", owner)
        while journal.sweep():
            pass
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        for table in ("batches", "commits", "lines", "results"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


def test_notes_of_batches_were_files(tmp_path: Path) -> None:
    with serving(tmp_path, KEYS) as server, http(server, "alice") as alice:
        hers = of_http(alice)
    note = tmp_path / "files" / f"{hers.id}.json"
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        (found,) = db.execute("SELECT note FROM batches").fetchone()
        db.execute("UPDATE batches SET note = ''")
        db.commit()
    note.write_text(json.dumps({**json.loads(found), "owner": "alice"}))
    with serving(tmp_path, KEYS) as server, http(server, "alice") as alice:
        assert names(alice.batches.list()) == [hers.id] and not note.exists()
        assert names(alice.files.list()) == [hers.input_file_id]
