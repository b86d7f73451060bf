"""Runs a file of OpenAI's batch lines on a server, over HTTP, and can resume after interruptions.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The server reads the lines and writes the results. While results are missing, a file
`results.jsonl.batch` beside `results.jsonl` holds a name that is also in the batch's metadata, so
that the batch can be found again at the server.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from tqdm import tqdm

from jaxserve.client.batch_results import ResultsError, state_path
from jaxserve.client.batch_run import FIRST_WAIT_S, LONGEST_WAIT_S, BatchCancelled
from jaxserve.client.errors import ServerError
from jaxserve.client.http_calls import HttpCalls
from jaxserve.file_lock import lock
from jaxserve.writable import replace_file

T = TypeVar("T")
_NAME = "jaxserve_batch"  # in the metadata
_OPEN, _OVER = "validating", ("completed", "cancelled")


def is_openai(path: Path) -> bool:
    """Whether the first non-blank line of a file is in OpenAI's format. Raises OSError."""
    with open(path, "rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        parsed = json.loads(first.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return False
    return isinstance(parsed, dict) and "custom_id" in parsed and "url" in parsed


class OpenAiBatch:
    """A file of lines, and the file of their results, locked against other processes. Use it in a
    `with`.

    Args:
        calls: makes calls to the server.
        path: the lines.
        out: the results; written once all are there.
        patience_s: seconds that the server may be away until the run gives up. If it cannot be
            reached at the start, the run gives up at once.

    Attributes:
        count: number of lines.
        failed: number of results that are errors, once they are there.

    Raises:
        ResultsError: If the file of results holds something else, or another process writes it.
        OSError: If a file cannot be read or written.
    """

    def __init__(self, calls: HttpCalls, path: Path, out: Path, patience_s: float) -> None:
        self._calls, self._path, self._out = calls, path, out
        self._patience_s = patience_s
        self._text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        self._lines = [line for line in self._text.split(b"\n") if line.strip()]
        self._state = state_path(out)
        self.count, self.failed = len(self._lines), 0
        file = lock(out, opened=lambda: open(out, "a+b"))  # noqa: SIM115
        if file is None:
            raise ResultsError(f"--out: another client is writing {out}")
        self._file: IO[bytes] = file
        try:
            self._name = self._read_state()
            self._whole = self._name is None and self._is_whole()
        except BaseException:
            self._file.close()
            raise

    def run(self) -> None:
        """Runs to the end. Raises BatchCancelled, and ServerError if the server refuses a call or
        stays away."""
        if self._whole:
            return
        resumed = self._name is not None
        if not resumed:
            self._get("/ready")  # begin nothing if no server answers
            self._begin()
        with tqdm(total=self.count, unit="line", file=sys.stderr) as bar:
            try:
                batch = self._insist(self._submitted)
            except ServerError as error:
                if not (error.passing or resumed):
                    self._forget()  # the server has refused the batch
                raise
            if resumed and batch["status"] == "cancelled":  # before this run
                self._begin()
                batch = self._insist(self._submitted)
            where, wait_s = f"/v1/batches/{batch['id']}", FIRST_WAIT_S
            while batch["status"] not in _OVER:
                _show(bar, batch)
                threading.Event().wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                batch = self._insist(lambda: self._get(where))
            _show(bar, batch)
            if batch["status"] == "cancelled":
                raise BatchCancelled(f"batch {batch['id']} was cancelled")
            self._write(self._insist(lambda: self._results(batch)))

    def cancel(self) -> str:
        """Ends the batch. Returns its final status: completed or cancelled. Raises ServerError, and
        ResultsError if there is no batch."""
        batch = None if self._name is None else self._found()
        if batch is None:
            raise ResultsError(f"--cancel: there is no batch that {self._out} waits for")
        return str(self._post(f"/v1/batches/{batch['id']}/cancel", {})["status"])

    def __enter__(self) -> OpenAiBatch:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._whole and self._name is None:
            self._out.unlink(missing_ok=True)
        self._file.close()

    def _begin(self) -> None:
        """Creates the batch's name, and stores it on disk before the server learns of it."""
        self._name = uuid.uuid4().hex
        state = {"openai_batch": self._name, "digest": self._digest()}
        replace_file(self._state, [json.dumps(state).encode()])

    def _forget(self) -> None:
        self._state.unlink(missing_ok=True)
        self._name = None

    def _submitted(self) -> dict[str, Any]:
        """The batch at the server; made if it is missing."""
        batch = self._found()
        if batch is not None and batch["status"] != _OPEN:
            return batch
        if batch is not None:  # the client or the server was interrupted
            self._post(f"/v1/batches/{batch['id']}/cancel", {})
            self._begin()
        uploaded = self._upload()["id"]
        asked = {
            "input_file_id": uploaded,
            "endpoint": json.loads(self._lines[0])["url"],
            "completion_window": "24h",
            "metadata": {_NAME: self._name},
        }
        try:
            return self._post("/v1/batches", asked)
        finally:
            with contextlib.suppress(ServerError):  # the server deletes it some days later anyway
                self._get(f"/v1/files/{uploaded}", "DELETE")

    def _found(self) -> dict[str, Any] | None:
        """The batch with this name, if the server has it."""
        after = ""
        while True:
            page = self._get(f"/v1/batches?limit=100{after}")
            for batch in page["data"]:
                if (batch["metadata"] or {}).get(_NAME) == self._name:
                    return dict(batch)
            if not page["has_more"]:
                return None
            after = f"&after={page['last_id']}"

    def _insist(self, work: Callable[[], T]) -> T:
        """Repeats the work as long as it fails with a temporary error."""
        began, wait_s = time.monotonic(), FIRST_WAIT_S
        while True:
            try:
                return work()
            except ServerError as error:
                if not error.passing or time.monotonic() - began > self._patience_s:
                    raise
                threading.Event().wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _results(self, batch: dict[str, Any]) -> list[bytes]:
        """A line of results for each line, in order. Raises ServerError if one is missing."""
        results: dict[int, bytes] = {}
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is None:
                continue
            with self._calls.call("GET", f"/v1/files/{batch[name]}/content") as response:
                for line in response:
                    results[int(json.loads(line)["id"].rpartition("-")[2])] = line
        if sorted(results) != list(range(self.count)):
            came = f"{len(results)} results came for {self.count} lines"
            raise ServerError("DATA_LOSS", f"batch {batch['id']}: {came}")
        return [line for _, line in sorted(results.items())]

    def _write(self, results: list[bytes]) -> None:
        """Writes the results. While the state file exists, the next run writes all of them
        again."""
        try:
            self._file.truncate(0)
            self._file.writelines(results)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ResultsError(f"--out: {self._out}: {error.strerror}") from None
        self.failed = sum(_is_error(line) for line in results)
        self._forget()
        self._whole = True

    def _read_state(self) -> str | None:
        try:
            state = json.loads(self._state.read_bytes())
            name, digest = state["openai_batch"], state["digest"]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise ResultsError(f"--out: {self._state} is of another kind of batch") from None
        if digest != self._digest():
            raise ResultsError(
                f"--out: {self._out} is of an interrupted batch of other lines; remove it and "
                f"{self._state.name} to begin anew"
            )
        return str(name)

    def _is_whole(self) -> bool:
        """Whether the results are there. Raises ResultsError if the file holds something else."""
        self._file.seek(0)
        results = self._file.readlines()
        if not results:
            return False
        same = list(map(_custom_id, results)) == list(map(_custom_id, self._lines))
        if not same or any("response" not in json.loads(line) for line in results):
            raise ResultsError(f"--out: {self._out} is there, and not of {self._path}; remove it")
        self.failed = sum(map(_is_error, results))
        return True

    def _digest(self) -> str:
        return hashlib.sha256(self._text).hexdigest()

    def _upload(self) -> dict[str, Any]:
        edge = uuid.uuid4().hex
        head = (
            f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        )
        body = b"".join((head.encode(), self._text, f"\r\n--{edge}--\r\n".encode()))
        kind = f"multipart/form-data; boundary={edge}"
        with self._calls.call("POST", "/v1/files", body, kind) as response:
            return _read(response)

    def _get(self, path: str, method: str = "GET") -> dict[str, Any]:
        with self._calls.call(method, path) as response:
            return _read(response)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._calls.call("POST", path, json.dumps(body).encode()) as response:
            return _read(response)


def _read(response: Any) -> dict[str, Any]:
    response_body: dict[str, Any] = json.loads(response.read())
    return response_body


def _show(bar: Any, batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    bar.update(counts["completed"] + counts["failed"] - bar.n)
    if counts["failed"]:
        bar.set_postfix(failed=counts["failed"])


def _custom_id(line: bytes) -> Any:
    try:
        return json.loads(line)["custom_id"]
    except (ValueError, TypeError, KeyError):
        return None


def _is_error(line: bytes) -> bool:
    return (json.loads(line)["response"] or {}).get("status_code") != 200
