"""A server with batches, and what tests say to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.batches.journal import Journal
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.server.proto import batches_pb2_grpc
from jaxserve.server.server import Server
from tests.server.batches.journals import opened
from tests.server.fake_engine import FakeEngine

PATIENCE = 60
STATE = {name.removeprefix("BATCH_STATE_"): value for name, value in pb.BatchState.items()}


class CallerBatches:
    """The calls, with less to write."""

    def __init__(self, channel: grpc.Channel, journal: Journal, server: Server) -> None:
        self.stub = batches_pb2_grpc.BatchesStub(channel)
        self.journal, self.server = journal, server

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
def batch_server(
    engine: FakeEngine, directory: Path, *, in_flight: int = 4, keep_s: float = 1e9
) -> Iterator[CallerBatches]:
    """A server over the engine, with its batches in the directory. Its grace is for calls."""
    with opened(directory) as journal:
        settings = BatchSettings(journal, in_flight, keep_s)
        with (
            Server(engine, grace_s=1000.0, batches=settings) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            yield CallerBatches(channel, journal, server)
