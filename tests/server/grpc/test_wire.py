"""Messages whose parsing would take long, or much memory."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from jaxserve.client import Client, ServerError, make_line, make_request
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.grpc import calls
from jaxserve.server.grpc.wire_check import MAX_FIELDS, check_fields
from jaxserve.server.proto import batches_pb2, generation_pb2_grpc
from jaxserve.server.proto import generation_pb2 as pb
from tests.server.batches.serving import serving
from tests.server.fake_engine import PATIENCE, FakeEngine
from tests.server.grpc.test_grpc_hostile import ended, raw

GENERATE = pb.GenerateRequest.DESCRIPTOR
MANY = 1 << 20


def fits(message: bytes, limit: int, kind=GENERATE) -> bool:
    try:
        check_fields(message, kind, limit)
    except InvalidRequest as error:
        assert str(error) == f"request: has more than {limit:,} fields"
        return False
    return True


def test_fields_are_counted_however_deep_they_are() -> None:
    request = make_request(
        [1, 300, 70_000], request_id="a", stop=["x", "y"], logit_bias={5: 1.5}, temperature=0.5
    )
    # request_id; token_ids, ids; sampling, temperature, stop x 2, logit_bias, its key and value.
    count = 10
    message = request.SerializeToString()
    assert fits(message, count) and not fits(message, count - 1)


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff" * 50, b"\x12\x7fcut", b"\x0b\x0b", b"\x12\xff\xff\xff\xff\xff\xff\x01a"],
)
def test_what_is_no_message_is_left_to_the_parser(message: bytes) -> None:
    assert fits(message, 10)


@pytest.mark.parametrize(
    "field", [b"\x72\x00", b"\xa0\x06\x01", b"\xa5\x06abcd", b"\xa1\x06" + b"8" * 8]
)
def test_a_message_of_many_fields_is_refused_before_it_is_parsed(
    channel: grpc.Channel, client: Client, engine: FakeEngine, field: bytes
) -> None:
    """As deep as `sampling`, a list's entries and numbers that the server does not know."""
    entries = field * (MANY // len(field))
    size = len(entries)
    prefix = bytes([4 << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    error = ended(raw(channel, prefix + entries))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request: has " in error.details() or error.details().startswith("stop: has ")
    engine.run()
    assert client.complete("hi", max_tokens=1)


def test_a_long_prompt_waits_for_no_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of files and batches may all be busy."""

    async def busy(*arguments: object) -> None:
        raise AssertionError("a thread is asked for")

    monkeypatch.setattr(calls.asyncio, "to_thread", busy)
    with pytest.raises(ServerError, match="17000 tokens"):
        client.complete("x" * 17_000)


def test_a_call_has_no_more_than_its_method_needs(engine: FakeEngine, tmp_path: Path) -> None:
    """The server takes 8 MiB, of lines of batches."""
    with (
        serving(engine, tmp_path) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        error = ended(stub.Generate(make_request("x" * (2 << 20)), timeout=PATIENCE))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "bytes are taken" in error.details()
        lines = batches_pb2.SubmitBatchRequest(batch_id="a", lines=[make_line("x" * (2 << 20))])
        submit = "/jaxserve.v1.Batches/SubmitBatch"
        assert list(raw(channel, lines.SerializeToString(), submit))
        empty = b"\x1a\x00" * (MAX_FIELDS + 1)
        error = ended(raw(channel, empty, submit))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == f"request: has more than {MAX_FIELDS:,} fields"
