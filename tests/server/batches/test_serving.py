"""Batches over gRPC: submitted, served, followed, cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from jaxserve.client import Client
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.sched.request import Grammar, Request, Thinking, Tier
from jaxserve.server import frontends
from jaxserve.server.batches import batch_lines as lines_module
from jaxserve.server.batches import batch_runner as batch_runner
from jaxserve.server.batches.batch_lines import Line, Result
from jaxserve.server.batches.records import NewLine
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.server.proto import batches_pb2_grpc
from jaxserve.server.requests.call_outcome import CallOutcome
from jaxserve.server.requests.engine_requests import RequestFields
from jaxserve.server.server import Server
from tests.server.batches.serving import PATIENCE, STATE, CallerBatches, batch_server, opened
from tests.server.fake_engine import FIRST, FakeEngine


@pytest.fixture
def door(engine: FakeEngine, tmp_path: Path) -> Iterator[CallerBatches]:
    with batch_server(engine, tmp_path) as door:
        yield door


def line(text: str = "hi", **sampling) -> pb.BatchLine:
    return pb.BatchLine(text=text, sampling=sampling)


def test_a_batch_is_served_with_all_that_its_lines_say(
    door: CallerBatches, engine: FakeEngine
) -> None:
    engine.run()
    first = line("one", max_tokens=2, logprobs=1, stop=["x", "y"], logit_bias={7: 1.5}, seed=3)
    first.id, first.cache_salt = "first", "s\0"
    second = line(max_tokens=1, n=2, prompt_logprobs=1)
    second.token_ids.ids.extend([5, 6])
    assert door.submit("b", [first, second]).batch_id == "b"
    one, two = door.results("b")
    assert (one.line, one.id, two.line, two.id) == (0, "first", 1, "")
    (completion,) = one.completions
    assert (completion.index, completion.text) == (0, " w0 w1")
    assert list(completion.token_ids) == [FIRST, FIRST + 1]
    assert [(e.token_id, e.logprob, e.top[0].token_id) for e in completion.logprobs] == [
        (FIRST, -0.5, FIRST),
        (FIRST + 1, -0.5, FIRST + 1),
    ]
    assert completion.finish.usage.prompt_tokens == 3
    assert completion.finish.timings.ttft_ms == 200
    assert not completion.prompt_logprobs
    assert [each.index for each in two.completions] == [0, 1]
    for each in two.completions:
        (entry,) = each.prompt_logprobs
        assert (entry.token_id, entry.logprob, entry.top[0].token_id) == (6, -6 / 8, 7)
    request, other = engine.requests
    assert request.tier is other.tier is Tier.BEST_EFFORT
    sampling = request.sampling
    assert (sampling.stop, sampling.logit_bias, sampling.seed) == (("x", "y"), ((7, 1.5),), 3)
    assert other.prompt == (5, 6)
    assert (request.cache_salt, other.cache_salt) == ("s\0", "")
    status = door.status("b")
    assert (status.state, status.num_lines, status.done) == (STATE["ENDED"], 2, 2)
    assert status.model == "fake" and not (status.failed or status.waiting or status.running)


def test_a_line_without_a_salt_is_as_servers_without_salts_wrote_it() -> None:
    assert Line("a", {}).to_json() == '{"name": "", "prompt": "a", "sampling": {}}'
    for salt in ("", "me", "\0\ud800"):
        line = Line((5, 6), {"stop": ("x",)}, "b", salt)
        assert Line.from_json(line.to_json()) == line


def test_a_line_whose_request_fails_is_over(door: CallerBatches, engine: FakeEngine) -> None:
    """It would fail the next server's, too; the engine goes on, and so do the others."""
    door.submit("b", ["one", "two"])
    engine.wait(lambda: len(engine.live) == 2)
    (name, running), _ = engine.live.items()
    del engine.live[name]
    problem = "RuntimeError: out of order"
    running.on_output(Output(name, 0, finish_reason=FinishReason.ERROR, error=problem))
    engine.run()
    failed, served = door.results("b")
    assert (failed.error.code, failed.error.message) == ("INTERNAL", problem)
    assert served.completions
    status = door.status("b")
    assert (status.failed, status.done, status.state) == (1, 1, STATE["ENDED"])


def test_lines_in_error_fail_by_themselves(
    door: CallerBatches, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 10_000)
    engine.run()
    unknown = pb.BatchLine.FromString(line("hi").SerializeToString() + b"\xc8\x01\x05")
    named = pb.BatchLine(id="x" * 129, text="hi")
    bad = [pb.BatchLine(id="none"), line(""), line("x" * 5000), line(temperature=-1.0)]
    bad += [line("x" * 20_000), unknown, named, pb.BatchLine(token_ids={"ids": [100_000]})]
    status = door.submit("b", [*bad, line(max_tokens=1)])
    assert (status.failed, status.state) == (len(bad), STATE["COMMITTED"])
    *failed, served = door.results("b")
    assert served.completions[0].text == " w0"
    for result, words in zip(
        failed,
        (
            "prompt: is required",
            "prompt: is empty; at least 1 token is needed",
            "prompt: has 5000 tokens; at most 4095 can be served",
            "temperature: must be at least 0 and at most 100, got -1.0",
            "bytes; at most 10,000 are allowed",
            "line: field number 25 is unknown to this server",
            "id: has 129 characters; at most 128 are allowed",
            "prompt: token id 100000 is outside 0..99999",
        ),
        strict=True,
    ):
        assert words in result.error.message
        assert result.error.code == "INVALID_ARGUMENT" and not result.completions
    assert failed[0].id == "none" and failed[6].id == "x" * 128
    assert len(engine.requests) == 1


def test_results_come_in_the_order_of_lines(door: CallerBatches, engine: FakeEngine) -> None:
    door.submit("b", [line(max_tokens=2), line(max_tokens=1), line(max_tokens=3)])
    engine.wait(lambda: len(engine.live) == 3)
    pages = door.pages("b", follow=True)
    engine.step()  # line 1 is done
    assert next(p for p in pages if p.status.done == 1).status.running == 2
    assert [r.line for r in door.results("b", follow=False)] == [1], "what is there, at once"
    engine.step()  # line 0
    assert [r.line for r in next(p for p in pages if p.results).results] == [0, 1]
    assert [r.line for r in door.results("b", follow=False)] == [0, 1]
    engine.step()
    assert [r.line for p in pages for r in p.results] == [2]
    assert [r.line for r in door.results("b", first=1)] == [1, 2]


def test_many_results_take_many_messages(
    door: CallerBatches, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.server.batches.batch_operations.PAGE_BYTES", 1000)
    engine.run()
    door.submit("b", [line(max_tokens=3)] * 12)
    assert [result.line for result in door.results("b")] == [*range(12)]
    assert len(list(door.pages("b", follow=False))) > 3


def test_a_large_batch_goes_in_several_calls(door: CallerBatches, engine: FakeEngine) -> None:
    engine.run()
    for first in range(0, 30, 10):
        lines = [line(f"prompt {first + i}", max_tokens=1) for i in range(10)]
        status = door.submit("b", lines, first=first, commit=False)
    assert (status.state, status.num_lines) == (STATE["OPEN"], 30)
    assert not engine.requests
    assert door.submit("b", first=30).state == STATE["COMMITTED"]
    assert len(door.results("b")) == 30
    expected = [f"prompt {i}" for i in range(30)]
    assert ["".join(map(chr, request.prompt)) for request in engine.requests] == expected


def test_without_an_id_the_server_makes_one_up(door: CallerBatches, engine: FakeEngine) -> None:
    engine.run()
    names = {door.submit("", [line(max_tokens=1)]).batch_id for _ in range(2)}
    assert len(names) == 2
    for name in names:
        assert len(door.results(name)) == 1


def unknown(batch_id: str) -> pb.CancelBatchRequest:
    """With a field that only a newer client knows."""
    message = pb.CancelBatchRequest(batch_id=batch_id)
    return pb.CancelBatchRequest.FromString(message.SerializeToString() + b"\xc8\x01\x05")


REFUSED = [
    (lambda door: door.submit("x" * 129, ["hi"]), "INVALID_ARGUMENT", "batch_id: has 129"),
    (lambda door: door.status("x" * 129), "INVALID_ARGUMENT", "batch_id: has 129"),
    (lambda door: door.cancel("x" * 20_000), "INVALID_ARGUMENT", "batch_id: has 20000"),
    (lambda door: door.delete("x" * 129), "INVALID_ARGUMENT", "batch_id: has 129"),
    (lambda door: door.stub.CancelBatch(unknown("b")), "INVALID_ARGUMENT", "number 25 is unkn"),
    (lambda door: door.submit("b", first=-1), "INVALID_ARGUMENT", "first_line: must be at lea"),
    (lambda door: door.status("c"), "NOT_FOUND", "batch_id: there is no batch 'c'"),
    (lambda door: door.cancel("c"), "NOT_FOUND", "batch_id: there is no batch 'c'"),
    (lambda door: door.delete("c"), "NOT_FOUND", "batch_id: there is no batch 'c'"),
    (lambda door: door.submit("b", ["hi"], first=2), "OUT_OF_RANGE", "go on at 1, not at 2"),
    (lambda door: door.submit("b", ["ho"]), "ALREADY_EXISTS", "line 0 .* another one"),
    (lambda door: door.submit("b", ["hi", "ho"]), "FAILED_PRECONDITION", "takes no more lines"),
    (lambda door: door.delete("b"), "FAILED_PRECONDITION", "cancel it first"),
]


def test_refusals(door: CallerBatches) -> None:
    door.submit("b", ["hi"])
    for call, code, words in REFUSED:
        with pytest.raises(grpc.RpcError, match=words) as error:
            call(door)
        assert error.value.code().name == code


def test_a_server_without_a_directory_refuses_batches(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = batches_pb2_grpc.BatchesStub(channel)
        with pytest.raises(grpc.RpcError, match=r"takes no batches: server\.batch_dir") as error:
            stub.SubmitBatch(pb.SubmitBatchRequest())
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_the_engine_never_has_more_than_the_limit(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had: list[int] = []
    submit = engine.submit

    def live() -> int:
        return sum(running.request.sampling.n for running in engine.live.values())

    def spied(request: Request, on_output) -> None:
        with engine.changed:
            submit(request, on_output)
            had.append(live())

    monkeypatch.setattr(engine, "submit", spied)
    with batch_server(engine, tmp_path, in_flight=3) as door:
        sizes = [1, 1, 2, 5, 1, 3, 2, 2]  # of which 5 goes alone
        door.submit("b", [line(max_tokens=2, n=n) for n in sizes])
        for together in (2, 2, 5, 1, 3, 2, 2):
            engine.wait(lambda together=together: had and live() == together)
            engine.step()
            engine.step()
        assert [len(result.completions) for result in door.results("b")] == sizes
    assert had == [1, 2, 2, 5, 1, 3, 2, 2]


def test_a_full_queue_makes_batches_wait(
    door: CallerBatches, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.server.batches.batch_runner.RETRY_S", 0.01)
    refused = []
    submit = engine.submit

    def spied(request: Request, on_output) -> None:
        try:
            submit(request, on_output)
        except Exception as error:
            with engine.changed:
                refused.append(error)
                engine.changed.notify_all()
            raise

    monkeypatch.setattr(engine, "submit", spied)
    engine.max_requests = 1
    with Client(door.server.address) as client:
        stream = client.generate("first", max_tokens=1)
        engine.wait(lambda: engine.live)
        door.submit("b", [line(max_tokens=1)] * 2)
        engine.wait(lambda: len(refused) > 1)
        engine.run()
        assert len(list(stream)) == 1
        assert len(door.results("b")) == 2


def test_those_who_follow_keep_nobody_from_submitting(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontends, "_FEW_CALLS", 1)
    monkeypatch.setattr(frontends, "_READERS", 1)
    with batch_server(engine, tmp_path) as door:
        door.submit("b", [line(max_tokens=1)])
        pages = door.pages("b", follow=True)
        next(pages)
        door.submit("next", [line(max_tokens=1)])
        with pytest.raises(grpc.RpcError, match="as many as this server takes of GetBatch"):
            next(door.pages("next", follow=False))
        engine.run()
        assert [each.line for page in pages for each in page.results] == [0]
        assert len(door.results("next")) == 1


def test_cancelling_ends_what_runs_and_what_waits(door: CallerBatches, engine: FakeEngine) -> None:
    door.submit("b", [line(max_tokens=1), *[line()] * 9])
    engine.wait(lambda: len(engine.live) == 4)
    pages = door.pages("b", follow=True)
    engine.step()
    next(page for page in pages if page.results)
    status = door.cancel("b")
    assert (status.state, status.done, status.waiting) == (STATE["CANCELLED"], 1, 0)
    assert [result.line for page in pages for result in page.results] == []
    door.submit("next", [line(max_tokens=1)])  # behind it: the runner has come past it
    engine.wait(lambda: [r for r in engine.live.values() if r.request.sampling.max_tokens == 1])
    assert len(engine.live) == 1
    engine.step()
    assert len(door.results("next")) == 1
    assert door.cancel("next").state == STATE["ENDED"], "it was over before"
    door.delete("b")
    with pytest.raises(grpc.RpcError, match="no batch 'b'"):
        door.status("b")


def test_results_are_written_down_beside_the_event_loop(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with log-probabilities of all tokens take seconds."""
    threads, to_json = list[str](), Result.to_json

    def seen(result: Result) -> str:
        if result.completions:
            threads.append(threading.current_thread().name)
        return to_json(result)

    monkeypatch.setattr(Result, "to_json", seen)
    engine.run()
    with batch_server(engine, tmp_path) as door:
        door.submit("b", [line(max_tokens=2, logprobs=3)])
        (result,) = door.results("b")
    assert [len(each.top) for each in result.completions[0].logprobs] == [3, 3]
    assert len(threads) == 1 and threads[0].startswith("jaxserve-beside")


def test_lines_wait_while_the_engine_hangs_and_go_on_after_it(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.01)
    with batch_server(engine, tmp_path, in_flight=1) as door:
        requests, refused = door.server._frontends.requests, threading.Event()
        door.submit("b", [line(max_tokens=1), line(max_tokens=1)])
        engine.wait(lambda: len(engine.requests) == 1)
        opened_before = requests.open_stream

        def spied(*arguments, **named):
            try:
                return opened_before(*arguments, **named)
            except EngineStopped:
                refused.set()
                raise

        monkeypatch.setattr(requests, "open_stream", spied)
        requests.stalled = "no step for 60 s"
        engine.step()
        assert refused.wait(PATIENCE)
        requests.stalled = None
        engine.wait(lambda: len(engine.requests) == 2)
        engine.step()
        assert [result.line for result in door.results("b")] == [0, 1]


class Gated(FakeEngine):
    """Compiles grammars, and takes the requests of `refused`, only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.begun, self.refused = threading.Event(), list[str](), "nobody"
        self.most = 0  # continuations that it had at once

    def check_grammar(self, grammar: Grammar, thinking: Thinking | None = None) -> None:
        with self.changed:
            self.begun.append(grammar.text)
            self.changed.notify_all()
        assert self.may.wait(PATIENCE)

    def submit(self, request: Request, on_output: Callable[[Output], None]) -> None:
        with self.changed:
            if request.tenant == self.refused and not self.may.is_set():
                self.begun.append(request.id)
                self.changed.notify_all()
                raise QueueFull("its share")
            super().submit(request, on_output)
            self.most = max(self.most, sum(r.request.sampling.n for r in self.live.values()))

    def texts(self, tenant: str) -> list[str]:
        return [text_of(request) for request in self.requests if request.tenant == tenant]


def text_of(request: Request) -> str:
    return "".join(map(chr, request.prompt))


def stored(*lines: Line) -> list[NewLine]:
    return [NewLine(line.to_json()) for line in lines]


SLOW = Line("a0", {"max_tokens": 1, "n": 2, "grammar": Grammar.regex("slow")})


@pytest.mark.parametrize("why", ["a slow grammar", "a full share of the queue"])
def test_a_line_that_has_to_wait_holds_up_its_owners_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.01)
    engine, first = Gated(), SLOW
    if why != "a slow grammar":
        first, engine.refused = Line("a0", {"max_tokens": 1}), "alice"
    hers = stored(first, *(Line(f"a{n}", {"max_tokens": 1}) for n in (1, 2, 3)))
    his = stored(*(Line(f"b{n}", {"max_tokens": 1}) for n in range(4)))
    with batch_server(engine, tmp_path, in_flight=2) as door:
        door.journal.append("a", "fake", 0, hers, commit=True, owner="alice")
        door.journal.append("b", "fake", 0, his, commit=True, owner="bob")
        door.submit("mine", [line("c0", max_tokens=1)])
        engine.wait(lambda: engine.begun)
        for _ in range(2):
            engine.wait(lambda: len(engine.live) == 2)
            engine.step()
        engine.wait(lambda: len(engine.live) == 1)
        assert engine.texts("alice") == []
        assert engine.texts("bob") == ["b0", "b1", "b2", "b3"] and engine.texts("") == ["c0"]
        engine.may.set()
        engine.run()
        assert len(door.results("a")) == 4
        assert engine.texts("alice") == ["a0", "a1", "a2", "a3"], "in order"
    assert engine.most == 2, "the bound holds for what comes late, too"


def test_owners_take_turns_and_nobody_overtakes_a_line_that_needs_much_room(
    tmp_path: Path,
) -> None:
    sizes = {"alice": [2, 1, 1, 1], "bob": [1, 1, 1, 1]}  # at first, bob's are served
    with opened(tmp_path) as journal:
        for owner in ("bob", "alice"):
            lines = stored(*(Line("hi", {"max_tokens": 1, "n": n}) for n in sizes[owner]))
            journal.append(owner, "fake", 0, lines, commit=True, owner=owner)
    engine = FakeEngine().run()
    with batch_server(engine, tmp_path, in_flight=2) as door:
        assert [len(door.results(owner)) for owner in sizes] == [4, 4]
    assert [request.tenant for request in engine.requests] == ["bob", "alice"] * 4


def test_a_line_that_is_cancelled_while_it_is_made_ready_is_over(tmp_path: Path) -> None:
    engine = Gated()
    with batch_server(engine, tmp_path) as door:
        door.journal.append("b", "fake", 0, stored(SLOW, Line("a1", {})), commit=True)
        door.submit("next", [line("next", max_tokens=1)])
        engine.wait(lambda: engine.begun)
        door.cancel("b")
        engine.may.set()
        engine.run()
        assert len(door.results("next")) == 1
        assert engine.texts("") == ["next"]
        lines = door.server._tracker.lines
        assert (lines[CallOutcome.CANCELLED], lines[CallOutcome.OK]) == (1, 1)


@pytest.mark.parametrize("why", ["a slow grammar", "a full share of the queue"])
def test_a_line_that_is_made_ready_when_the_server_stops_is_over(tmp_path: Path, why: str) -> None:
    engine, first = Gated(), SLOW
    if why != "a slow grammar":
        first, engine.refused = Line("a0", {}), "alice"
    with batch_server(engine, tmp_path) as door:
        door.journal.append("b", "fake", 0, stored(first, first), commit=True, owner="alice")
        door.submit("mine", [line("c0")])
        engine.wait(lambda: engine.begun and engine.live)
        door.server.stop(PATIENCE)
        lines = door.server._tracker.lines
        assert (lines[CallOutcome.SHUTTING_DOWN], sum(lines.values())) == (2, 2)
        assert door.journal.status("b").done == 0
        engine.may.set()


def test_a_defect_in_making_a_line_ready_ends_that_line_alone(
    door: CallerBatches, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = door.server._frontends.requests
    make_request = requests.make_request

    async def broken(fields: RequestFields) -> Request:
        if fields.prompt == "bad":
            raise RuntimeError("out of order")
        return await make_request(fields)

    monkeypatch.setattr(requests, "make_request", broken)
    engine.run()
    door.submit("b", [line("bad"), line("good", max_tokens=1)])
    failed, served = door.results("b")
    assert (failed.error.code, failed.error.message) == ("INTERNAL", "out of order")
    assert served.completions
