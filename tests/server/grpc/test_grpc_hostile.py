"""What a hostile or a clumsy client does, and who else notices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from jaxserve.client import Client, ServerError, make_request
from jaxserve.server import server as runner
from jaxserve.server.grpc import grpc_server
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.server.fake_engine import PATIENCE, FakeEngine

Code = grpc.StatusCode
GENERATE = "/jaxserve.v1.Generation/Generate"


def ended(call) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    return error.value


def raw(channel: grpc.Channel, message: bytes, method: str = GENERATE):
    return channel.unary_stream(method)(message, timeout=PATIENCE)


def retry_ms(error: grpc.RpcError) -> int:
    """When the refused call may come again."""
    return int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])


# Long texts.


def test_a_message_far_beyond_the_longest_prompt_is_not_read(
    stub, client: Client, engine: FakeEngine
) -> None:
    error = ended(stub.Generate(make_request("x" * (2 << 20))))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    engine.run()
    assert client.complete("hi", max_tokens=1)


# Overload.


@pytest.fixture
def small(engine: FakeEngine):
    with Server(engine, grace_s=0.0, options=ServerOptions(max_calls=2)) as server:
        yield server


def test_calls_beyond_the_limit_are_refused_unread_and_told_when_to_come_again(
    small: Server, engine: FakeEngine
) -> None:
    with grpc.insecure_channel(small.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = [stub.Generate(make_request("hi", max_tokens=1)) for _ in range(2)]
        engine.wait(lambda: len(engine.live) == 2)
        for refused in (stub.Generate(make_request("hi")), raw(channel, b"\xff")):
            error = ended(refused)
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert "server.max_calls" in error.details() and "try again later" in error.details()
            assert 500 <= retry_ms(error) <= 1500
        engine.step()
        assert all(list(call) for call in running)
        engine.run()
        assert list(stub.Generate(make_request("hi", max_tokens=1), timeout=PATIENCE))
    assert len(engine.requests) == 3


# Streams that nobody reads.


@pytest.fixture
def impatient(engine: FakeEngine):
    options = ServerOptions(max_calls=1, stream_buffer_bytes=256 << 10, write_timeout_s=0.3)
    with Server(engine, grace_s=0.0, options=options) as server:
        yield server


def test_a_stream_that_nobody_reads_counts_until_it_is_given_up(
    impatient: Server, engine: FakeEngine
) -> None:
    engine.text = lambda k: "x" * 60_000
    with grpc.insecure_channel(impatient.address) as channel, Client(impatient.address) as other:
        stub = generation_pb2_grpc.GenerationStub(channel)
        unread = stub.Generate(make_request("hi", request_id="unread", max_tokens=4000))
        engine.wait(lambda: engine.live)
        while engine.live:  # until its buffer is full: it is cancelled
            engine.step()
            _let_loop_run(impatient)
        assert engine.cancelled == ["unread"]
        while True:  # refused, until the call is given up
            try:
                assert list(_stepped(other.generate("hi", max_tokens=1, timeout=PATIENCE), engine))
                break
            except ServerError as error:
                assert error.code == "RESOURCE_EXHAUSTED"
        error = ended(unread)  # having read what was on its way
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "read too slowly" in error.details()


def test_who_reads_nothing_for_long_is_given_up_though_little_waits(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.text = lambda k: "x" * 1_000_000
    options = ServerOptions(stream_buffer_bytes=64 << 20, write_timeout_s=0.3)
    with (
        Server(engine, grace_s=0.0, options=options) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        unread = stub.Generate(make_request("hi", request_id="unread", max_tokens=4000))
        engine.wait(lambda: engine.live)
        for _ in range(12):
            engine.step()
        engine.wait(lambda: engine.cancelled == ["unread"])
        assert "server.write_timeout_s is 0.3" in ended(unread).details()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "gave up on 'unread': the call is read too slowly: server.write_timeout_s is 0.3"
    ]


def test_readers_that_vanish_leave_no_traceback(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.text = lambda k: "x" * 200_000
    server = Server(engine, grace_s=0.0, options=ServerOptions(stream_buffer_bytes=64 << 20))
    with grpc.insecure_channel(server.start()) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        calls = [stub.Generate(make_request("hi", max_tokens=4000)) for _ in range(8)]
        engine.wait(lambda: len(engine.live) == 8)
        for _ in range(10):
            engine.step()
        assert all(call.is_active() for call in calls)
    engine.wait(lambda: not engine.live)
    server.stop(timeout=PATIENCE)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_reader_that_does_not_read_holds_no_shutdown_up(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MAX_FLUSH_S", 0.1)
    engine.text = lambda k: "x" * 100_000_000
    server = Server(engine, grace_s=1000.0, options=ServerOptions(write_timeout_s=1000.0))
    unlimited = (("grpc.max_receive_message_length", -1),)
    with grpc.insecure_channel(server.start(), options=unlimited) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        unread = stub.Generate(make_request("hi", max_tokens=1))
        engine.wait(lambda: engine.live)
        engine.step()
        assert server.stop(timeout=PATIENCE)
        assert ended(unread).code() in (Code.CANCELLED, Code.UNAVAILABLE)


def _let_loop_run(server: Server) -> None:
    assert server._loop is not None
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server._loop).result()


def _stepped(stream, engine: FakeEngine):
    """The stream, once the engine has made a step for it, or it was refused: of which the engine
    knows nothing, so whoever waits for it is woken."""

    def wake(_: grpc.Call) -> None:
        with engine.changed:
            engine.changed.notify_all()

    stream._call.add_done_callback(wake)
    engine.wait(lambda: engine.live or stream._call.done())
    engine.step()
    yield from stream


# What is no message.


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (GENERATE, b"\xff\xff"),
        (GENERATE, b"\x12\x02\xff\xfe"),  # text that is not UTF-8
        (GENERATE, b"\x12\x7fcut"),
        ("/jaxserve.v1.Generation/GetServerInfo", b"\xff"),
        ("/jaxserve.v1.Batches/SubmitBatch", b"\xff"),
    ],
)
def test_what_is_no_message_is_an_invalid_argument(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture, method: str, message: bytes
) -> None:
    for _ in range(30):
        error = ended(raw(channel, message, method))
        assert error.code() is Code.INVALID_ARGUMENT
        assert error.details().startswith("request: is not a jaxserve.v1.")
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 10
    assert all("\n" not in record.getMessage() and not record.exc_info for record in lines)


def test_a_call_without_a_request_is_an_invalid_argument(channel: grpc.Channel) -> None:
    error = ended(channel.stream_stream(GENERATE)(iter(()), timeout=PATIENCE))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "there is none" in error.details()


# Silent connections.


@pytest.fixture
def hurried(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Four connections, and little time for each."""
    times = {"grpc.server_handshake_timeout_ms": 300, "grpc.max_connection_idle_ms": 300}
    options = dict(grpc_server._OPTIONS)
    assert options["grpc.max_connection_age_ms"] < options["grpc.max_connection_age_grace_ms"]
    assert times.keys() <= options.keys()
    monkeypatch.setattr(grpc_server, "_OPTIONS", tuple({**options, **times}.items()))
    monkeypatch.setattr(runner, "connections_of_a_door", lambda: 4)
    with Server(engine, host="127.0.0.1", grace_s=0.0) as server:
        yield server


def test_silent_connections_are_few_and_short(hurried: Server, engine: FakeEngine) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(hurried.address))
        assert client.info(timeout=PATIENCE).model == "fake"
        host, port = hurried.address.split(":")
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            for _ in range(20)
        ]
        assert client.info(timeout=PATIENCE).model == "fake"
        for connection in silent:
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 10):  # its settings, and then nothing
                    pass
    with Client(hurried.address) as client:
        assert client.info(timeout=PATIENCE).model == "fake"


def test_an_idle_connection_is_closed_and_made_again(hurried: Server, engine: FakeEngine) -> None:
    states, idle = list[grpc.ChannelConnectivity](), threading.Event()

    def seen(state: grpc.ChannelConnectivity) -> None:
        states.append(state)
        if grpc.ChannelConnectivity.READY in states and state is grpc.ChannelConnectivity.IDLE:
            idle.set()

    engine.run()
    with grpc.insecure_channel(hurried.address) as channel:
        channel.subscribe(seen)
        stub = generation_pb2_grpc.GenerationStub(channel)
        for _ in range(2):
            assert list(stub.Generate(make_request("hi", max_tokens=2), timeout=PATIENCE))
            assert idle.wait(PATIENCE), states
            idle.clear()
            states.clear()
