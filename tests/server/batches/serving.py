"""Journals, servers with batches, what tests say to them, and files of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.batches.journal import Journal
from jaxserve.server.batches.records import NewLine, Position
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.server.proto import batches_pb2_grpc
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine

PATIENCE = 60
ROOM = 2**30
START: Mapping[str, Position] = {}
STATE = {name.removeprefix("BATCH_STATE_"): value for name, value in pb.BatchState.items()}


def lines(count: int, first: int = 0) -> list[NewLine]:
    return [NewLine(f"request {number}") for number in range(first, first + count)]


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[Journal]:
    journal = Journal(directory, **{"max_bytes": ROOM, **options})
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def serving(
    engine: FakeEngine,
    directory: Path,
    *,
    in_flight: int = 4,
    keep_s: float = 1e9,
    max_bytes: int = ROOM,
    **options: Any,
) -> Iterator[Server]:
    """A server over the engine, with its batches in the directory."""
    with opened(directory, max_bytes=max_bytes) as journal:
        settings = BatchSettings(journal, in_flight, keep_s)
        with Server(engine, **{"grace_s": 0.0, "batches": settings, **options}) as server:
            yield server


def journal_of(server: Server) -> Journal:
    assert server._batch_settings is not None
    return server._batch_settings.journal


class CallerBatches:
    """The calls, with less to write."""

    def __init__(self, channel: grpc.Channel, server: Server) -> None:
        self.stub = batches_pb2_grpc.BatchesStub(channel)
        self.journal, self.server = journal_of(server), server

    def submit(
        self, batch_id: str, lines: Sequence[Any] = (), *, first: int = 0, commit: bool = True
    ) -> pb.BatchStatus:
        """lines: texts, or messages."""
        messages = [pb.BatchLine(text=x) if isinstance(x, str) else x for x in lines]
        request = pb.SubmitBatchRequest(
            batch_id=batch_id, first_line=first, lines=messages, commit=commit
        )
        return self.stub.SubmitBatch(request, timeout=PATIENCE).status

    def pages(self, batch_id: str, first: int = 0, *, follow: bool) -> Iterator[Any]:
        request = pb.GetBatchRequest(batch_id=batch_id, first_line=first, follow=follow)
        return self.stub.GetBatch(request, timeout=PATIENCE)

    def status(self, batch_id: str) -> pb.BatchStatus:
        *_, last = self.pages(batch_id, follow=False)
        return last.status

    def results(self, batch_id: str, first: int = 0, *, follow: bool = True) -> list[Any]:
        return [
            each for page in self.pages(batch_id, first, follow=follow) for each in page.results
        ]

    def cancel(self, batch_id: str) -> pb.BatchStatus:
        return self.stub.CancelBatch(pb.CancelBatchRequest(batch_id=batch_id)).status

    def delete(self, batch_id: str) -> None:
        self.stub.DeleteBatch(pb.DeleteBatchRequest(batch_id=batch_id))


@contextmanager
def batch_server(engine: FakeEngine, directory: Path, **options: Any) -> Iterator[CallerBatches]:
    """Its grace is for calls."""
    with (
        serving(engine, directory, grace_s=1000.0, **options) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield CallerBatches(channel, server)


def write(path: Path, count: int) -> Path:
    """Prompts whose tokens say which they are."""
    sampling = {"max_tokens": 1}
    asked = ({"id": f"id {n}", "token_ids": [n + 1], "sampling": sampling} for n in range(count))
    path.write_text("\n\n".join(map(json.dumps, asked)) + "\n")
    return path


def command(address: str, prompts: Path, *flags: str) -> list[str]:
    out = prompts.with_name("results.jsonl")
    return [f"--address={address}", str(prompts), f"--out={out}", *flags]
