"""`jaxserve batch`, through all that may happen to it, and what it says where it does nothing."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.client import Client, ServerError, batch_run
from jaxserve.client.batch_results import ResultsFile
from jaxserve.client.batch_run import BatchRun
from jaxserve.client.cli import batch
from jaxserve.client.prompts import read_prompts
from jaxserve.server.server import Server
from tests.server.batches.relay import Relay
from tests.server.batches.serving import PATIENCE, CallerBatches, batch_server, command, write
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def door(engine: FakeEngine, tmp_path: Path) -> Iterator[CallerBatches]:
    with batch_server(engine, tmp_path / "journal") as door:
        yield door


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", 6)


def check(prompts: Path, count: int) -> None:
    """A result for each line, once, in order, and nothing left beside it."""
    out = prompts.with_name("results.jsonl")
    found = [json.loads(line) for line in out.read_bytes().splitlines()]
    names = [(n * 2 + 1, f"id {n}") for n in range(count)]
    assert [(record["line"], record["id"]) for record in found] == names
    assert all(record["completions"][0]["text"] == " w0" for record in found)
    assert not prompts.with_name("results.jsonl.batch").exists()


def served(engine: FakeEngine) -> list[int]:
    return sorted(request.prompt[0] for request in engine.requests)


def test_a_file_of_prompts_gives_a_file_of_results(
    door: CallerBatches, engine: FakeEngine, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    assert batch(command(door.server.address, prompts)) == 0
    check(prompts, 6)
    assert "6/6" in capsys.readouterr().err
    assert batch(command(door.server.address, prompts)) == 0
    assert len(engine.requests) == 6, "it was all there"


def test_a_line_in_error_has_a_record_and_the_exit_code_is_1(
    door: CallerBatches, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    prompts = tmp_path / "prompts.jsonl"
    bad = {"prompt": "x", "sampling": {"temperature": -1}}
    prompts.write_text("\n".join(map(json.dumps, [{"prompt": "x"}, bad, {"prompt": "y"}])))
    arguments = command(door.server.address, prompts, "--max_tokens=2", "--logprobs=1")
    for _ in range(2):
        assert batch(arguments) == 1
        assert "1 of 3 prompts failed" in capsys.readouterr().err.splitlines()[-1]
    one, two, three = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert one["completions"][0]["text"] == three["completions"][0]["text"] == " w0 w1"
    assert one["completions"][0]["logprobs"][0]["top"] == [[100, -0.5]]
    assert "id" not in one
    assert two["error"]["code"] == "INVALID_ARGUMENT" and two["line"] == 2
    assert two["error"]["message"].startswith("temperature: must be at least 0")


def test_an_interrupted_client_goes_on_where_it_was(
    door: CallerBatches,
    engine: FakeEngine,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    append = ResultsFile.append

    def interrupted(results: ResultsFile, records) -> None:
        append(results, records)
        if results.done:
            raise KeyboardInterrupt
        with engine.changed:  # has four of the six lines; they become results at once
            engine.step()

    monkeypatch.setattr(ResultsFile, "append", interrupted)
    assert batch(command(door.server.address, prompts)) == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    monkeypatch.undo()
    engine.run()
    assert batch(command(door.server.address, prompts)) == 0
    check(prompts, 6)
    assert served(engine) == [1, 2, 3, 4, 5, 6]


class Fault(ServerError):
    def __init__(self) -> None:
        super().__init__("UNAVAILABLE", "a fault")


class FlakyClient(Client):
    """Calls fail before they are made, or their answers are lost; a 0 lets one through."""

    def __init__(self, address: str, faults: list[int]) -> None:
        super().__init__(address)
        self._faults = iter(faults)

    def _answer(self, method, message, timeout):
        fault = next(self._faults, 0)
        if fault == 1:
            raise Fault
        answer = super()._answer(method, message, timeout)
        if fault > 1:
            raise Fault
        return answer

    def info(self, *, timeout=None):
        return super()._answer(lambda *a, **k: None, None, timeout)

    def get_batch(self, batch_id, **options):
        fault = next(self._faults, 0)
        for number, message in enumerate(super().get_batch(batch_id, **options), start=1):
            if number == fault:
                raise Fault
            yield message


@pytest.mark.promise(20)
@settings(max_examples=15)
@given(
    faults=st.lists(st.integers(0, 3), max_size=20),
    count=st.integers(1, 9),
    lines_a_batch=st.sampled_from((3, 50_000)),
    call_bytes=st.sampled_from((10, 60, 1 << 20)),
)
def test_no_line_is_lost_or_done_twice_whatever_fails(
    faults: list[int], count: int, lines_a_batch: int, call_bytes: int
) -> None:
    engine = FakeEngine().run()
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        batch_server(engine, Path(folder) / "journal") as door,
        closing(FlakyClient(door.server.address, faults)) as client,
    ):
        patch.setattr(batch_run, "FIRST_WAIT_S", 0)
        patch.setattr(batch_run, "MAX_LINES", lines_a_batch)
        patch.setattr(batch_run, "_CALL_BYTES", call_bytes)
        path = write(Path(folder) / "prompts.jsonl", count)
        prompts = read_prompts(path, {})
        with ResultsFile(path.with_name("results.jsonl"), prompts) as results:
            BatchRun(client, prompts, results, PATIENCE).run()
        check(path, count)
        assert served(engine) == [*range(1, count + 1)]


def test_a_server_that_restarts_and_a_network_that_fails(prompts: Path, tmp_path: Path) -> None:
    codes = []
    with Relay() as network:
        arguments = command(network.address, prompts)
        client = threading.Thread(target=lambda: codes.append(batch(arguments)), daemon=True)
        first = FakeEngine()
        with batch_server(first, tmp_path / "journal") as door:
            network.target = door.server.address
            client.start()
            first.wait(lambda: len(first.live) == 4)
            first.step()
            first.wait(lambda: len(first.live) == 2)
            network.cut()
            network.target = door.server.address
        network.cut()
        second = FakeEngine().run()
        with batch_server(second, tmp_path / "journal") as door:
            network.target = door.server.address
            client.join(PATIENCE)
    assert codes == [0]
    check(prompts, 6)
    assert served(second) == [5, 6]


def test_a_server_that_lost_the_batch_does_only_what_is_missing(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FakeEngine()
    append = ResultsFile.append

    def interrupted(results: ResultsFile, records) -> None:
        append(results, records)
        if results.done:
            raise KeyboardInterrupt
        first.step()

    with batch_server(first, tmp_path / "one", in_flight=2) as door:
        monkeypatch.setattr(ResultsFile, "append", interrupted)
        assert batch(command(door.server.address, prompts)) == 130
        monkeypatch.undo()
    done = len(prompts.with_name("results.jsonl").read_bytes().splitlines())
    assert 0 < done < 6
    second = FakeEngine().run()
    with batch_server(second, tmp_path / "other") as door:
        assert batch(command(door.server.address, prompts)) == 0
    check(prompts, 6)
    assert served(second) == [*range(done + 1, 7)]


def test_cancelling_and_beginning_again(
    door: CallerBatches, engine: FakeEngine, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    arguments = command(door.server.address, prompts)
    client = threading.Thread(target=lambda: codes.append(batch(arguments)), daemon=True)
    client.start()
    engine.wait(lambda: len(engine.live) == 4)
    assert batch([*arguments, "--cancel"]) == 1
    assert "another client is writing" in capsys.readouterr().err
    batch_id = json.loads(prompts.with_name("results.jsonl.batch").read_text())["batch_id"]
    door.cancel(batch_id)
    client.join(PATIENCE)
    assert codes == [1]
    assert f"batch {batch_id} was cancelled" in capsys.readouterr().err
    assert batch([*arguments, "--cancel"]) == 0
    assert "has 0 of 6 results" in capsys.readouterr().out
    engine.run()
    assert batch(arguments) == 0
    check(prompts, 6)
    assert batch([*arguments, "--cancel"]) == 1
    assert "--cancel: there is no batch" in capsys.readouterr().err


def test_cancelling_what_is_done_says_so(
    door: CallerBatches,
    engine: FakeEngine,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(results: ResultsFile, records) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ResultsFile, "append", interrupted)
    arguments = command(door.server.address, prompts)
    assert batch(arguments) == 130
    monkeypatch.undo()
    batch_id = json.loads(prompts.with_name("results.jsonl.batch").read_text())["batch_id"]
    engine.run()
    assert len(door.results(batch_id)) == 6
    assert batch([*arguments, "--cancel"]) == 0
    assert "done already; " in capsys.readouterr().out
    assert batch(arguments) == 0
    check(prompts, 6)
    assert served(engine) == [1, 2, 3, 4, 5, 6]


def test_patience_has_an_end(prompts: Path, tmp_path: Path) -> None:
    engine = FakeEngine()
    with batch_server(engine, tmp_path / "journal") as door:
        client = FlakyClient(door.server.address, [0, 0, 1] + [1] * 1000)
        read = read_prompts(prompts, {})
        with ResultsFile(prompts.with_name("results.jsonl"), read) as results, closing(client):
            with pytest.raises(Fault):
                BatchRun(client, read, results, patience_s=0.0).run()
            assert results.batch is not None, "the same command goes on"


def test_patience_with_a_server_that_answers_and_serves_nothing_has_an_end(
    prompts: Path, tmp_path: Path
) -> None:
    engine = FakeEngine()
    with batch_server(engine, tmp_path / "journal") as door:
        read = read_prompts(prompts, {})
        with (
            ThreadPoolExecutor() as pool,
            ResultsFile(prompts.with_name("results.jsonl"), read) as results,
            Client(door.server.address) as client,
        ):
            run = pool.submit(BatchRun(client, read, results, patience_s=0.3).run)
            engine.wait(lambda: engine.live)
            engine.fail(RuntimeError("no more memory"))
            with pytest.raises(ServerError, match="the engine failed: no more memory"):
                run.result(PATIENCE)
            assert results.batch is not None, "the same command goes on"


def test_a_server_that_does_not_answer_is_given_up(
    door: CallerBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.client.client._BATCH_CALL_S", 0.01)
    answer, status = threading.Event(), door.journal.status
    monkeypatch.setattr(door.journal, "status", lambda *who: answer.wait() and status(*who))
    with Client(door.server.address) as client:
        for call in (client.batch_status, client.cancel_batch):
            with pytest.raises(ServerError) as error:
                call("b")
            assert error.value.code == "DEADLINE_EXCEEDED"
    answer.set()


def test_a_refusal_is_one_line_and_leaves_nothing_behind(
    server: Server, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(command(server.address, prompts)) == 1
    assert "takes no batches: server.batch_dir" in capsys.readouterr().err.splitlines()[-1]
    assert batch(command("127.0.0.1:1", prompts)) == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err
    assert [*prompts.parent.glob("results*")] == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "the following arguments are required: FILE, --out"),
        (["prompts.jsonl"], "the following arguments are required: --out"),
        (["prompts.jsonl", "--out=-"], "a batch needs a file for its results"),
        (["prompts.jsonl", "--out=prompts.jsonl"], "be written over the prompts"),
        (["x.batch", "--out=x"], "be written over the prompts"),
        (["prompts.jsonl", "--out=."], "--out: . is a folder"),
        (["prompts.jsonl", "--out=no/such"], "--out: there is no folder no"),
        (["prompts.jsonl", "--out=/dev/null"], "--out: /dev/null is not a file"),
        (["prompts.jsonl", "--out=x", "--tier=realtime"], "unrecognized arguments: --tier"),
        (["prompts.jsonl", "--out=x", "hi"], "unrecognized arguments: hi"),
        (
            ["hi", "--out=x", "--timeout=0"],
            "--timeout must be more than 0 and at most 1e+09 s",
        ),
        (["hi", "--out=x", "--timeout=nan"], "seconds, got nan"),
        (["hi", "--out=x", "--timeout=inf"], "seconds, got inf"),
    ],
)
def test_flags_that_do_not_go_together(
    prompts: Path,
    flags: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(prompts.parent)
    Path("x.batch").touch()
    with pytest.raises(SystemExit) as caught:
        batch(flags)
    assert caught.value.code == 2
    problem, _ = capsys.readouterr().err.splitlines()
    assert complaint in problem


def test_prompts_that_cannot_be_read_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    assert batch(command("localhost:1", path)) == 1
    assert "prompts.jsonl: No such file or directory" in capsys.readouterr().err
    path.write_text('{"prompt": 1}')
    assert batch(command("localhost:1", path)) == 1
    error = capsys.readouterr().err
    assert error == f"jaxserve batch: {path}, line 1: prompt: must be a string\n"
    path.write_bytes(b'{"prompt": "\xff"}')
    assert batch(command("localhost:1", path)) == 1
    assert "is not UTF-8" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [path]
