"""`jaxserve batch` with OpenAI's lines, over HTTP."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client import ServerError, openai_batch
from jaxserve.client.cli import batch
from jaxserve.client.http_calls import HttpCalls
from jaxserve.client.openai_batch import OpenAiBatch
from tests.server.batches.relay import Relay
from tests.server.batches.serving import PATIENCE, command, serving
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@contextmanager
def server(engine: FakeEngine, folder: Path) -> Iterator[str]:
    """The address of its HTTP."""
    with serving(engine, folder, http=SETTINGS) as running:
        assert running.http_address is not None
        yield running.http_address


@pytest.fixture
def address(engine: FakeEngine, tmp_path: Path) -> Iterator[str]:
    with server(engine, tmp_path / "journal") as found:
        yield found


def line(name: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    return {"custom_id": name, "method": "POST", "url": url, "body": {**asked, **body}}


def write(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return path


def results(path: Path) -> list[dict[str, Any]]:
    """All of them, and nothing beside."""
    assert not path.with_name("results.jsonl.batch").exists()
    return list(map(json.loads, path.with_name("results.jsonl").read_bytes().splitlines()))


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_a_file_of_lines_gives_a_file_of_results(
    address: str, engine: FakeEngine, tmp_path: Path, url: str
) -> None:
    engine.run()
    path = write(tmp_path, *(line(f"line {n}", url, max_tokens=2) for n in range(12)))
    for _ in range(2):
        assert batch(command(address, path)) == 0
        found = results(path)
        assert [each["custom_id"] for each in found] == [f"line {n}" for n in range(12)]
        (choice,) = found[0]["response"]["body"]["choices"]
        assert (choice["message"]["content"] if url == CHAT else choice["text"]) == " w0 w1"
    assert len(engine.requests) == 12, "it was all there"


def test_a_line_in_error_has_its_place_and_the_exit_code_is_1(
    address: str, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    path = write(tmp_path, line("a"), line("b", temperature=-1), line("c", CHAT), line("d"))
    for _ in range(2):
        assert batch(command(address, path)) == 1
        assert "2 of 4 lines failed" in capsys.readouterr().err.splitlines()[-1]
    codes = [each["response"]["status_code"] for each in results(path)]
    assert codes == [200, 400, 400, 200]


def test_a_server_that_restarts_and_a_network_that_fails(tmp_path: Path) -> None:
    path, codes = write(tmp_path, *(line(f"{n}") for n in range(6))), list[int]()
    with Relay() as network:
        arguments = command(network.address, path)
        client = threading.Thread(target=lambda: codes.append(batch(arguments)), daemon=True)
        first = FakeEngine()
        with server(first, tmp_path / "journal") as address:
            network.target = address
            client.start()
            first.wait(lambda: len(first.requests) == 4)
            network.cut()
        second = FakeEngine().run()
        with server(second, tmp_path / "journal") as address:
            network.target = address
            client.join(PATIENCE)
    assert codes == [0]
    assert [each["custom_id"] for each in results(path)] == list("012345")
    assert len(second.requests) == 6


class Flaky(HttpCalls):
    """Loses the answers to some calls, by their numbers, or the calls."""

    def __init__(self, address: str, faults: dict[int, str]) -> None:
        super().__init__(address)
        self._faults, self.count = faults, 0

    @contextmanager
    def call(self, *asked: Any) -> Iterator[http.client.HTTPResponse]:
        fault = self._faults.get(self.count)
        self.count += 1
        if fault == "call":
            raise ServerError("UNAVAILABLE", "lost")
        with super().call(*asked) as response:
            if fault == "answer":
                response.read()
                raise ServerError("UNAVAILABLE", "lost")
            yield response


@pytest.mark.parametrize("fault", ["call", "answer"])
def test_each_line_is_done_once_whichever_answer_is_lost(
    address: str, engine: FakeEngine, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the first, which asks whether anybody is there."""
    engine.run()
    monkeypatch.setattr(openai_batch, "FIRST_WAIT_S", 0.001)
    for number in range(1, 8):
        folder = tmp_path / str(number)
        folder.mkdir()
        names = [f"{number} {n}" for n in range(3)]
        path, calls = write(folder, *map(line, names)), Flaky(address, {number: fault})
        with OpenAiBatch(calls, path, folder / "results.jsonl", PATIENCE) as run:
            run.run()
        assert [each["custom_id"] for each in results(path)] == names
        assert len(engine.requests) == 3 * number


def test_cancelled_the_same_command_begins_another(
    address: str, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, line("a"), line("b"))
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(batch(command(address, path))))
    waiting.start()
    engine.wait(lambda: len(engine.requests) == 2)
    assert batch(command(address, path, "--cancel")) == 1, "the first has the file"
    (found,) = listed(address)
    with HttpCalls(address).call("POST", f"/v1/batches/{found['id']}/cancel", b""):
        waiting.join(PATIENCE)
    assert codes == [1] and "was cancelled" in capsys.readouterr().err
    assert batch(command(address, path, "--cancel")) == 0
    assert capsys.readouterr().out == "cancelled\n"
    engine.run()
    assert batch(command(address, path)) == 0
    assert len(results(path)) == 2 and len(listed(address)) == 2


def listed(address: str) -> list[dict[str, Any]]:
    with HttpCalls(address).call("GET", "/v1/batches") as response:
        return list(json.load(response)["data"])


def test_what_is_refused_leaves_nothing(
    address: str, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, line("a"), line("a"))
    assert batch(command(address, path)) == 1
    assert "each has to have its own" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        batch(command(address, path, "--max_tokens=3"))
    assert ended.value.code == 2
    assert "OpenAI's lines say that in their body" in capsys.readouterr().err
    assert batch(command("localhost:1", path)) == 1
    assert batch(command(address, path, "--cancel")) == 1
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["lines.jsonl"]
    mine = json.dumps(line("a"))
    for lines in ((line("a"), line("b")), (line("a"),)):  # the second time these very lines
        write(tmp_path, *lines)
        (tmp_path / "results.jsonl").write_text(f"{mine}\n")
        assert batch(command(address, path)) == 1
        assert "remove it" in capsys.readouterr().err
        assert (tmp_path / "results.jsonl").read_text() == f"{mine}\n"
    assert engine.requests == []
