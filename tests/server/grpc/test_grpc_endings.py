"""How calls end before their time, and what slow readers get."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import Client, ServerError, make_request
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from tests.server.fake_engine import FIRST, FakeEngine, let_a_deadline_pass

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_cancelling_the_call_cancels_the_request(stub, engine: FakeEngine) -> None:
    call = stub.Generate(make_request("hi", request_id="mine", n=2))
    engine.wait(lambda: engine.live)
    engine.step()
    next(call)
    call.cancel()
    engine.wait(lambda: engine.cancelled == ["mine"])
    assert not engine.live


def test_dropping_the_clients_iterator_cancels_the_request(
    client: Client, engine: FakeEngine
) -> None:
    for _ in _after_start(client.generate("hi", request_id="mine"), engine):
        break
    engine.wait(lambda: engine.cancelled == ["mine"])


def test_a_passed_deadline_cancels_the_request_and_its_id_can_be_used_again(
    client: Client, engine: FakeEngine
) -> None:
    let_a_deadline_pass(client, engine, "mine")
    assert engine.cancelled == ["mine"] and not engine.live
    engine.run()
    (completion,) = client.complete("hi", max_tokens=2, request_id="mine")
    assert completion.token_ids == [FIRST, FIRST + 1]


def test_a_request_cancelled_in_the_engine_ends_its_call(
    client: Client, engine: FakeEngine
) -> None:
    stream = client.generate("hi", request_id="mine")
    messages = []
    with pytest.raises(ServerError) as error:
        for message in _after_start(stream, engine):
            messages.append(message)
            if len(messages) == 1:
                engine.cancel("mine")
    assert error.value.code == "CANCELLED"
    assert messages[-1].finish.reason == pb.FINISH_REASON_CANCELLED
    assert engine.cancelled == ["mine"]  # not a second time by the service


@pytest.mark.parametrize("how", ["fail", "fail_silently"])
def test_an_engine_failure_is_internal_and_not_serving(
    server: Server, channel: grpc.Channel, client: Client, engine: FakeEngine, how: str
) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    streams = [client.generate("hi", request_id=f"{i}") for i in range(3)]
    engine.wait(lambda: len(engine.live) == 3)
    engine.step()
    assert [next(stream).text for stream in streams] == [" w0"] * 3
    getattr(engine, how)(RuntimeError("out of device memory"))
    for stream in streams:
        with pytest.raises(ServerError, match="out of device memory") as error:
            list(stream)
        assert error.value.code == "INTERNAL"
    watch = health.Watch(health_pb2.HealthCheckRequest(service="jaxserve.v1.Generation"))
    assert any(status.status == NOT_SERVING for status in watch)
    watch.cancel()
    assert health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
    with pytest.raises(ServerError, match="out of device memory") as error:
        client.complete("hi", timeout=20)
    assert error.value.code == "UNAVAILABLE"
    assert server.failed


def test_a_slow_reader_gets_fewer_messages_and_all_of_the_text(engine: FakeEngine) -> None:
    steps = 800
    engine.text = lambda k: f"{k:03d}" + "x" * 25_000  # fills the transport's buffers soon
    options = ServerOptions(stream_buffer_bytes=steps * 26_000)
    with (
        Server(engine, grace_s=0.0, options=options) as server,
        Client(server.address) as client,
    ):
        call = client.generate("hi", max_tokens=steps)
        engine.wait(lambda: engine.live)
        for _ in range(steps):
            engine.step()
            _let_loop_run(server)  # else all would be one batch, and merged for another reason
        messages = list(call)
    assert "".join(m.text for m in messages) == "".join(engine.text(k) for k in range(steps))
    assert [t for m in messages for t in m.token_ids] == list(range(FIRST, FIRST + steps))
    assert len(messages) < steps / 2
    assert messages[-1].finish.usage.output_tokens == steps


def _after_start(stream, engine: FakeEngine):
    """The stream, with one step made before each message is asked for."""
    engine.wait(lambda: engine.live)
    engine.step()
    yield from stream


def _let_loop_run(server: Server) -> None:
    """Returns after several turns of the server's event loop."""

    async def turns() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    assert server._loop is not None
    asyncio.run_coroutine_threadsafe(turns(), server._loop).result()
