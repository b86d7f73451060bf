"""Completes a file of prompts as a batch, and keeps going when the client, the network or the
server is interrupted."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tqdm import tqdm

from jaxserve.client.batch_results import BatchOnServer, ResultsFile
from jaxserve.client.client import Client, Completion
from jaxserve.client.errors import ServerError
from jaxserve.client.prompts import Prompts
from jaxserve.client.records import completion_records, error_record
from jaxserve.server.proto import batches_pb2 as pb

PATIENCE_S = 600.0
"""How long the server may be away."""
MAX_LINES = 50_000
"""Longer files are sent as several batches, one after the other."""
_CALL_BYTES = 1 << 20
_CALL_LINES = 10_000  # servers limit the fields of a message
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
# The server, the network or a proxy is down: the call can be repeated.
_PASSING = ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED")


class BatchCancelled(RuntimeError):
    """The batch was cancelled while this client waited for its results."""


class BatchRun:
    """Completes the prompts that have no result in the results file yet.

    Args:
        client: the connection to the server.
        prompts: all prompts.
        results: their results file.
        patience_s: seconds without progress at the server until the run gives up. If the server
            cannot be reached at the start, it gives up at once.
    """

    def __init__(
        self, client: Client, prompts: Prompts, results: ResultsFile, patience_s: float
    ) -> None:
        self._client, self._prompts, self._results = client, prompts, results
        self._patience_s = patience_s
        self._began = False  # this run has found or made its batch at the server
        self._sent = results.batch is not None  # the server may have it
        self._heard = time.monotonic()  # when the server last made progress or was waiting
        self._bar: Any = None

    def run(self) -> None:
        """Runs to the end. Raises BatchCancelled, OSError, and ServerError if the server refuses a
        call or stays away."""
        results = self._results
        if not results.whole:
            self._client.info(timeout=self._patience_s)  # begin nothing if no server answers
            self._heard = time.monotonic()
            with tqdm(
                total=len(self._prompts.lines), initial=results.done, unit="line", file=sys.stderr
            ) as self._bar:
                self._insist()
        results.finish()

    def _insist(self) -> None:
        """Retries until all results are there, waiting out temporary errors."""
        wait_s = FIRST_WAIT_S
        while not self._results.whole:
            heard = self._heard
            try:
                self._follow(self._submitted())
            except ServerError as error:
                if error.code not in _PASSING:
                    if not self._sent:
                        self._results.finish()
                    raise
                if time.monotonic() - self._heard > self._patience_s:
                    raise
                wait_s = FIRST_WAIT_S if self._heard > heard else min(2 * wait_s, LONGEST_WAIT_S)
                self._bar.set_postfix_str(f"waiting: {error}")
                threading.Event().wait(wait_s)

    def _submitted(self) -> BatchOnServer:
        """The batch at the server, with all its lines. If the server has forgotten the batch, it
        was cancelled before this run, or all its results are here, a new batch is made for the
        prompts without a result."""
        results = self._results
        batch = results.batch or results.begin()
        status = self._status(batch)
        if status is None and results.done > batch.first:
            batch = results.begin()
        elif status is not None and self._is_over(batch, status):
            batch, status = results.begin(), None
        self._sent = True
        if status is None:
            status = self._client.submit_batch(batch.batch_id, [], commit=False)
            self._heard = time.monotonic()
        self._began = True
        lines = self._prompts.lines[batch.first : batch.first + MAX_LINES]
        while status.state == pb.BATCH_STATE_OPEN:
            first = status.num_lines
            part = list(_one_call(islice(lines, first, None)))
            status = self._client.submit_batch(
                batch.batch_id, part, first_line=first, commit=first + len(part) == len(lines)
            )
            self._heard = time.monotonic()
        return batch

    def _is_over(self, batch: BatchOnServer, status: pb.BatchStatus) -> bool:
        """Whether the batch has no more results to come: all are here, or it was cancelled before
        this run."""
        if status.state == pb.BATCH_STATE_CANCELLED:
            return not self._began
        stored = self._results.done - batch.first
        return status.state == pb.BATCH_STATE_ENDED and stored >= status.num_lines

    def _status(self, batch: BatchOnServer) -> pb.BatchStatus | None:
        try:
            return self._client.batch_status(batch.batch_id)
        except ServerError as error:
            if error.code != "NOT_FOUND":
                raise
            return None

    def _follow(self, batch: BatchOnServer) -> None:
        """Stores results until the server has no more."""
        first, status, began = self._results.done - batch.first, pb.BatchStatus(), time.monotonic()
        try:
            for message in self._client.get_batch(batch.batch_id, first_line=first):
                self._take(batch, message)
                status = message.status
        finally:
            # The server always sends the batch's status at once, even if no more results will come.
            if time.monotonic() - began > LONGEST_WAIT_S:
                self._heard = time.monotonic()
        if status.state == pb.BATCH_STATE_CANCELLED:
            raise BatchCancelled(f"batch {batch.batch_id} was cancelled")

    def _take(self, batch: BatchOnServer, message: pb.GetBatchResponse) -> None:
        """Stores the results in a message."""
        results = self._results
        expected = range(results.done - batch.first, 2**31)
        for result, line in zip(message.results, expected, strict=False):
            if result.line != line:
                raise ServerError("DATA_LOSS", f"result {result.line} came, not {line}")
        results.append(map(_record, message.results))
        if message.results:
            self._heard = time.monotonic()
        self._bar.update(results.done - self._bar.n)
        failed = {"failed": results.failed} if results.failed else {}
        self._bar.set_postfix(running=message.status.running, **failed)


def _one_call(lines: Iterator[pb.BatchLine]) -> Iterator[pb.BatchLine]:
    size = 0
    for line in islice(lines, _CALL_LINES):
        size += line.ByteSize()
        if size > _CALL_BYTES and size > line.ByteSize():
            return
        yield line


def _record(result: pb.BatchResult) -> dict[str, Any]:
    if result.HasField("error"):
        return error_record(result.error.code, result.error.message)
    return completion_records(
        [Completion.from_message(completion) for completion in result.completions]
    )
