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
from jaxserve.server.access.keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.batches.batches import BatchSettings
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import NewLine, UnknownBatch
from jaxserve.server.runner import Server
from tests.server.access.test_keys import key
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

KEYS = Keys(fixed=[key("alice"), key("bob")])


@contextlib.contextmanager
def serving(directory: Path, keys: Keys) -> Iterator[Server]:
    engine, journal = FakeEngine(), Journal(directory, max_bytes=1 << 20)
    settings, access = BatchSettings(journal, in_flight=4, keep_s=3600.0), Access(keys)
    with (
        contextlib.closing(journal),
        Server(engine, grace_s=0.0, http=SETTINGS, batches=settings, access=access) as server,
    ):
        engine.run()
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
            (lambda: bob.submit_batch("mine", lines), "FAILED_PRECONDITION"),
        ):
            with pytest.raises(ServerError) as error:
                call()
            assert error.value.code == code
        *_, last = alice.get_batch("mine")
        assert last.status.done == 1
        alice.delete_batch("mine")
        bob.submit_batch("mine", lines)  # nobody's any more
        with pytest.raises(ServerError, match="there is no batch"):
            alice.batch_status("mine")


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


def test_a_journal_from_before_there_were_owners(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path, 1 << 20)) as journal:
        journal.append("old", "m", 0, [NewLine("{}")], commit=False)
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        db.execute("DROP TABLE owners")
    with contextlib.closing(Journal(tmp_path, 1 << 20)) as journal:
        assert journal.status("old").owner == ""
        with pytest.raises(UnknownBatch):
            journal.status("old", "alice")
        journal.append("new", "m", 0, [NewLine("{}")], commit=False, owner="alice")
        assert journal.status("new", "alice").owner == journal.status("new").owner == "alice"
        journal.delete("new")
        journal.append("new", "m", 0, [NewLine("{}")], commit=False, owner="bob")
        assert journal.status("new").owner == "bob"
    with contextlib.closing(sqlite3.connect(tmp_path / "batches.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM owners").fetchone() == (1,)
        assert db.execute("PRAGMA user_version").fetchone() == (1,)  # older servers may open it
