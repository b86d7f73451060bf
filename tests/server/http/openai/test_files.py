"""Uploads: how much of them there may be, who pays, and what is left where one fails."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import socket
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import openai
import pytest
import python_multipart

from jaxserve.client import Client, ServerError, make_line
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import Access
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import Quota
from jaxserve.server.http.errors import ApiError
from jaxserve.server.http.openai import files
from jaxserve.server.http.openai.files import FileStore, StoredFile
from jaxserve.server.server import Server
from tests.server.access.test_keys import key
from tests.server.batches.serving import journal_of, serving
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain

MIB = 1 << 20
MARK = "-----mark"
KIND = {"Content-Type": f"multipart/form-data; boundary={MARK}"}


@pytest.fixture
def server(engine: FakeEngine, tmp_path: Path) -> Iterator[Server]:
    keys = [key("alice"), key("bob", files_mib=1, files=2), key("dave", concurrency=1)]
    access = Access(Keys(fixed=keys))
    with serving(engine, tmp_path, http=SETTINGS, access=access, max_bytes=16 * MIB) as server:
        yield server


@pytest.fixture
def journal(server: Server) -> Journal:
    return journal_of(server)


def called(server: Server, name: str) -> openai.OpenAI:
    url = f"http://{server.http_address}/v1"
    return openai.OpenAI(base_url=url, api_key=name, max_retries=0)


@pytest.fixture
def alice(server: Server) -> Iterator[openai.OpenAI]:
    with called(server, "alice") as client:
        yield client


@pytest.fixture
def bob(server: Server) -> Iterator[openai.OpenAI]:
    with called(server, "bob") as client:
        yield client


def upload(client: openai.OpenAI, content: bytes, name: str = "lines.jsonl") -> str:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch").id


def line(name: str, **body: Any) -> bytes:
    body = {"prompt": "a", "max_tokens": 2, **body}
    whole = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(whole).encode() + b"\n"


def create(client: openai.OpenAI, content: bytes, **fields: Any) -> Any:
    return client.batches.create(
        input_file_id=upload(client, content),
        endpoint="/v1/completions",
        completion_window="24h",
        **fields,
    )


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "files").iterdir()]


def test_a_reader_who_does_not_read_costs_little(
    server: Server, alice: openai.OpenAI, tmp_path: Path
) -> None:
    name = upload(alice, b"x")
    size = 64 * MIB
    os.truncate(tmp_path / "files" / f"{name}.jsonl", size)  # as if it had been as long
    plain = Plain(server)
    head = (
        f"GET /v1/files/{name}/content HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice\r\n\r\n"
    )
    tracemalloc.start()
    try:
        sockets = [plain.socket() for _ in range(4)]
        for each in sockets:
            each.sendall(head.encode())
        for each in sockets:
            assert each.recv(12) == b"HTTP/1.1 200"
        # All that waits is in the transport by the time that another call is answered.
        assert len(alice.files.list().data) == 1
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    for each in sockets:
        each.close()
    assert len(alice.files.content(name).content) == size


def test_a_key_has_a_quota_of_bytes(alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    first = upload(bob, b"x" * (MIB // 2))
    with pytest.raises(openai.APIStatusError, match="files_mib of key bob") as error:
        upload(bob, b"x" * MIB)
    assert error.value.status_code == 413
    upload(alice, b"x" * (2 * MIB))
    with pytest.raises(openai.APIStatusError, match="files_mib of key alice"):
        upload(alice, b"x" * (4 * MIB))  # a quarter of all is what she has
    bob.files.delete(first)
    upload(bob, b"x" * (MIB // 2))


def test_a_key_has_a_quota_of_files_and_batches(server: Server, bob: openai.OpenAI) -> None:
    content = line("a")
    batches = [create(bob, content).id]
    name = upload(bob, content)
    with pytest.raises(openai.APIStatusError, match="there are 2 files of key bob") as error:
        upload(bob, content)
    assert error.value.status_code == 413

    def another() -> Any:
        return bob.batches.create(
            input_file_id=name, endpoint="/v1/completions", completion_window="24h"
        )

    batches.append(another().id)
    with pytest.raises(openai.APIStatusError, match="there are 2 batches of key bob") as error:
        another()
    assert error.value.status_code == 413
    with (
        Client(server.address, api_key="bob") as grpc,
        pytest.raises(Exception, match="there are 2 batches of key bob"),
    ):
        grpc.submit_batch("one more", [])
    bob.batches.cancel(batches[0])
    delete(bob, batches[0])
    another()


def delete(client: openai.OpenAI, name: str) -> Any:
    return client.delete(f"/batches/{name}", cast_to=object)


def test_lines_and_results_count_and_what_is_refused_leaves_nothing(
    bob: openai.OpenAI, alice: openai.OpenAI, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LINES_A_PIECE", 2)
    long = line("c", prompt="LONG").replace(b"LONG", "\u00fc".encode() * 300_000)
    long = line("a") + line("b") + long  # there a character takes six bytes
    with pytest.raises(openai.APIStatusError, match=r"of key bob would take .* \(files_mib\)"):
        create(bob, long)
    assert bob.batches.list().data == []
    assert journal.noted("", after=None, limit=9) == [], "nor of the lines that did fit"
    create(bob, line("a", prompt="x" * 3000))
    create(alice, long)


def test_results_without_end_are_errors_and_another_key_s_are_not(
    server: Server, alice: openai.OpenAI, bob: openai.OpenAI, engine: FakeEngine, journal: Journal
) -> None:
    engine.text = lambda _: "x" * 8000
    made = [create(each, b"".join(line(str(k)) for k in range(4))).id for each in (bob, alice)]
    journal.max_bytes = 60_000  # there is room for three results of each
    engine.run()
    for client, key_name, name in ((bob, "bob", made[0]), (alice, "alice", made[1])):
        with Client(server.address, api_key=key_name) as grpc:
            results = [each for page in grpc.get_batch(name, follow=True) for each in page.results]
        assert sorted(each.error.code for each in results) == ["", "", "", "RESOURCE_EXHAUSTED"]
        (error,) = client.files.content(f"{name}-errors").text.splitlines()
        assert "for which the batches of the key have no room" in error and "413" in error


def test_a_batch_can_be_deleted_once_it_is_over(
    engine: FakeEngine, alice: openai.OpenAI, bob: openai.OpenAI
) -> None:
    batch = create(alice, line("a"), metadata={"k" * 64: "v" * 512})
    engine.wait(lambda: engine.live)
    with pytest.raises(openai.ConflictError, match="is being served; cancel it first"):
        delete(alice, batch.id)
    alice.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError, match="there is no batch") as neighbour:
        delete(bob, batch.id)
    assert delete(alice, batch.id) == {"id": batch.id, "object": "batch", "deleted": True}
    with pytest.raises(openai.NotFoundError) as gone:
        delete(alice, batch.id)
    assert neighbour.value.body == gone.value.body
    assert alice.batches.list().data == []


def test_metadata_are_bounded(alice: openai.OpenAI) -> None:
    for metadata in ({str(k): "v" for k in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}):
        with pytest.raises(openai.BadRequestError, match="metadata"):
            create(alice, line("a"), metadata=metadata)


def test_a_page_is_bounded_and_goes_on(
    alice: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count(100)
    monkeypatch.setattr(files, "time", SimpleNamespace(time=lambda: next(times)))
    kept = [upload(alice, b"x") for _ in range(3)]
    page = alice.get("/files?limit=2", cast_to=object)
    assert isinstance(page, dict)
    assert page["has_more"] and [each["id"] for each in page["data"]] == [kept[2], kept[1]]
    page = alice.get(f"/files?limit=2&after={page['last_id']}", cast_to=object)
    assert isinstance(page, dict)
    assert not page["has_more"] and [each["id"] for each in page["data"]] == [kept[0]]
    for path in ("/files?limit=0", "/files?limit=1001", "/batches?limit=101"):
        with pytest.raises(openai.BadRequestError, match="limit"):
            alice.get(path, cast_to=object)
    for path in ("/files?after=x", "/batches?after=x"):
        with pytest.raises(openai.NotFoundError, match="'x'"):
            alice.get(path, cast_to=object)


def test_a_disk_that_is_full_when_a_file_is_kept(
    alice: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(alice, b"x")
    before, sync = left(tmp_path), os.fsync

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for at in (1, 2):  # its content, and its note
        calls = iter(range(1, 99))
        monkeypatch.setattr(os, "fsync", lambda f, c=calls, at=at: (full, sync)[next(c) != at](f))
        with pytest.raises(openai.APIStatusError, match="the server's disk is full") as error:
            upload(alice, b"y" * 4096)
        assert error.value.status_code == 507 and str(tmp_path) not in str(error.value)
        assert left(tmp_path) == before
    monkeypatch.undo()
    assert len(alice.files.list().data) == 1
    upload(alice, b"y")


def test_a_disk_that_is_full_while_a_file_comes(
    alice: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> BinaryIO:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)  # what is larger than memory is to hold
    with pytest.raises(openai.APIStatusError, match="the server's disk is full") as error:
        upload(alice, b"y" * (2 * MIB))
    assert error.value.status_code == 507
    monkeypatch.undo()
    upload(alice, b"y" * (2 * MIB))


def test_a_disk_that_is_full_for_lines(
    server: Server, alice: openai.OpenAI, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LINES_A_PIECE", 1)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages + 10}")
    others = [line(f"b{number}", prompt="x" * 3000) for number in range(30)]
    long = line("a") + b"".join(others)
    with pytest.raises(openai.APIStatusError, match="database or disk is full") as error:
        create(alice, long)
    assert (error.value.status_code, error.value.code) == (507, "disk_full")
    with (
        Client(server.address, api_key="alice") as grpc,
        pytest.raises(ServerError, match="database or disk is full") as refused,
    ):
        grpc.submit_batch("mine", [make_line("x" * 100_000)])
    assert refused.value.code == "UNAVAILABLE"
    for table in ("batches", "lines", "results"):
        assert journal._db.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,), table
    journal._db.execute("PRAGMA max_page_count = 100000")
    create(alice, long)


def test_whoever_hangs_up_has_no_place(server: Server, bob: openai.OpenAI, tmp_path: Path) -> None:
    plain = Plain(server)
    with plain.socket() as begun:
        head = f'--{MARK}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        begun.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer bob\r\n"
            + f"Content-Type: {KIND['Content-Type']}\r\nContent-Length: 1000000\r\n\r\n".encode()
            + head.encode()
        )
        until(lambda: not fits(bob))  # it is being read
    until(lambda: fits(bob))  # that it is gone has been noticed
    assert left(tmp_path) == []


def test_a_download_is_an_open_call_until_it_is_read_or_left(server: Server) -> None:
    with called(server, "dave") as dave:
        name = upload(dave, b"x" * (MIB // 2))
        path = f"/v1/files/{name}/content"
        reader = Plain(server).socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer dave\r\n\r\n"
        reader.sendall(head.encode() * 64)  # one after the other: more than any buffer holds
        until(lambda: not may_call(dave))
        reader.close()
        until(lambda: may_call(dave))


def may_call(client: openai.OpenAI) -> bool:
    try:
        client.models.list()
    except openai.RateLimitError as error:
        assert "1 calls are open" in str(error)
        return False
    return True


def fits(client: openai.OpenAI) -> bool:
    """Whether there is room for a file."""
    try:
        client.files.delete(upload(client, b"x" * 900_000))
    except openai.APIStatusError as error:
        assert error.status_code == 413
        return False
    return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"


HOSTILE = {
    "no end": f'--{MARK}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx',
    "nothing": "",
    "no boundary": "x" * 100_000,
    "parts": f'--{MARK}\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 1000,
    "files": f'--{MARK}\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n\r\n' * 99,
    "headers": f"--{MARK}\r\n" + "X: y\r\n" * 100_000,
    "a header": f"--{MARK}\r\nX: " + "y" * MIB,
    "a field": f'--{MARK}\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + "y" * MIB,
}


def test_a_form_that_is_none_is_refused(server: Server) -> None:
    plain, named = Plain(server), {"Authorization": "Bearer alice"}
    other = {"Content-Type": "application/x-www-form-urlencoded"}
    for body, kind in (
        *((each, KIND) for each in HOSTILE.values()),
        ("purpose=batch&file=a", other),
    ):
        connection = plain.connect()
        connection.request("POST", "/v1/files", body, {**kind, **named})
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status == 400, said
        connection.close()
    assert b"multipart/form-data" in said


def test_a_form_is_looked_at_in_pieces(
    server: Server, alice: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks like the end of a part takes the parser long, and the event loop with it."""
    sizes, write = list[int](), python_multipart.MultipartParser.write

    def counted(parser: python_multipart.MultipartParser, data: bytes) -> int:
        sizes.append(len(data))
        return write(parser, data)

    monkeypatch.setattr(python_multipart.MultipartParser, "write", counted)
    content = b"\r\n--" * MIB
    assert alice.files.content(upload(alice, content)).content == content
    assert max(sizes) <= 16 << 10


def test_a_name_is_bounded(alice: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 255"):
        upload(alice, b"x", "x" * 256)
    kept = alice.files.retrieve(upload(alice, b"x", "x" * 255))
    assert kept.filename == "x" * 255


def test_a_line_that_is_far_too_long_fails_by_itself(
    alice: openai.OpenAI, engine: FakeEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 5000)
    monkeypatch.setattr("jaxserve.server.http.openai.batch_file_lines.MAX_LINE", 5000)
    engine.run()
    batch = create(alice, line("a") + line("long", prompt="x" * 20_000) + line("b"))
    with Client(server.address, api_key="alice") as grpc:
        list(grpc.get_batch(batch.id, follow=True))
    counts = alice.batches.retrieve(batch.id).request_counts
    assert counts is not None and (counts.completed, counts.failed) == (2, 1)
    (error,) = alice.files.content(f"{batch.id}-errors").text.splitlines()
    assert "takes more than 5,000 bytes" in error


def test_a_batch_is_no_file(alice: openai.OpenAI) -> None:
    batch = create(alice, line("a"))
    for path in ("", "/content"):
        with pytest.raises(openai.NotFoundError):
            alice.get(f"/files/{batch.id}{path}", cast_to=object)


# The store itself.


def test_what_is_on_its_way_has_its_place(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "files", max_bytes=10 * MIB, keep_s=99.0)
    alice = store.for_owner("alice", Quota(4 * MIB, count=2))
    with alice.reserve(3 * MIB) as room:
        assert room.bytes <= 4 * MIB
        with pytest.raises(ApiError, match="files_mib of key alice"), alice.reserve(3 * MIB):
            pass
        with alice.reserve(None) as rest:  # nobody knows how long it is
            assert 0 < rest.bytes <= MIB
            with pytest.raises(ApiError, match="there are 2 files of key alice"), alice.reserve(1):
                pass
        with store.for_owner("bob", Quota(8 * MIB, count=9)).reserve(7 * MIB):
            pass
        kept = alice.save("a", "batch", io.BytesIO(b"x" * 3 * MIB), room)
    with alice.reserve(MIB // 2) as room, pytest.raises(ApiError, match="takes more than"):
        alice.save("a", "batch", io.BytesIO(b"x" * MIB), room)
    assert sorted(left(tmp_path)) == [f"{kept.id}.json", f"{kept.id}.jsonl"]


def test_only_whoever_runs_the_server_may_look(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir(mode=0o755)
    mask = os.umask(0)
    try:
        kept = saved(FileStore(tmp_path / "files", MIB, 99.0))
    finally:
        os.umask(mask)
    for suffix in ("json", "jsonl"):
        assert (tmp_path / "files" / f"{kept.id}.{suffix}").stat().st_mode & 0o777 == 0o600


def saved(store: FileStore) -> StoredFile:
    with store.reserve(None) as room:
        return store.save("a", "batch", io.BytesIO(b"x"), room)


def test_what_an_earlier_server_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = saved(FileStore(tmp_path / "files", MIB, 99.0))
    torn, other = "file-" + "0" * 32, "file-" + "1" * 32
    for name in (f"{torn}.jsonl", f"{torn}.partial", f"{other}.jsonl"):
        (tmp_path / "files" / name).write_text("x")
    (tmp_path / "files" / f"{other}.json").write_text("{")
    store = FileStore(tmp_path / "files", MIB, 99.0)
    assert [each.id for each in store.list_files(None, 9)[0]] == [first.id]
    assert store.find_file(first.id) == first and "is not the note of a file" in caplog.text
    assert sorted(left(tmp_path)) == sorted(
        [f"{first.id}.json", f"{first.id}.jsonl", f"{other}.json"]
    )
    with store.open_file(first.id) as file:
        store.delete_file(first.id)
        assert file.read() == b"x"
    with pytest.raises(ApiError, match="there is no"):
        store.open_file(first.id)


def test_what_is_old_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "files", MIB, keep_s=99.0)
    old = saved(store)
    monkeypatch.setattr(files, "time", SimpleNamespace(time=lambda: old.created + 100.0))
    new = saved(store)
    assert [each.id for each in store.list_files(None, 9)[0]] == [new.id]
    assert len(left(tmp_path)) == 2
