"""The results file of a batch, and what is needed to go on after an interruption.

A line of results is on the disk before it counts. Beside `results.jsonl` stands
`results.jsonl.batch` while there are results to come: the batch at the server, and of which prompts
it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from jaxserve.client.prompts import Prompts


class ResultsError(ValueError):
    """The results cannot go there; the message says why."""


@dataclass(frozen=True)
class BatchOnServer:
    """batch_id: the client's own making. first: which of the prompts is its line 0. digest: of all
    prompts."""

    batch_id: str
    first: int
    digest: str


def state_path(path: Path) -> Path:
    """What stands beside a results file while there are results to come."""
    return path.with_name(f"{path.name}.batch")


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """All of a file, whatever happens meanwhile."""
    scratch = path.with_name(f"{path.name}.new")
    with open(scratch, "wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


class ResultsFile:
    """Results of the first `done` prompts, of which `failed` are errors, in a file that no other
    process writes meanwhile.

    Raises ResultsError for a file that holds something else, OSError.
    """

    def __init__(self, path: Path, prompts: Prompts) -> None:
        self.path, self._prompts = path, prompts
        self._state = state_path(path)
        self._digest = prompts.digest()
        self.done = self.failed = 0
        self._file = _locked(path)
        try:
            self.batch = self._read_state()
            self._read_results()
        except BaseException:
            self._file.close()
            raise

    @property
    def whole(self) -> bool:
        """There is a result for each prompt."""
        return self.done == len(self._prompts.lines)

    def begin(self) -> BatchOnServer:
        """A new batch, of the prompts without a result. It is on the disk before it is returned, so
        whatever happens at the server is found again."""
        self.batch = BatchOnServer(uuid.uuid4().hex, self.done, self._digest)
        replace_file(self._state, [json.dumps(asdict(self.batch)).encode()])
        self._sync_folder()
        return self.batch

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Results of the next prompts, in their order: on the disk when it returns. Each gets the
        number of its line, and its id if it has one. Raises ResultsError where there is no room."""
        lines = []
        for number, record in enumerate(records, self.done):
            line = self._prompts.lines[number]
            named = {"id": line.id} if line.id else {}
            lines.append({"line": self._prompts.numbers[number], **named, **record})
        if not lines:
            return
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            self._file.write(text.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ResultsError(f"--out: {self.path}: {error.strerror}") from None
        self.done += len(lines)
        self.failed += sum("error" in line for line in lines)

    def finish(self) -> None:
        """All is there: nothing is needed any more to go on."""
        self._state.unlink(missing_ok=True)
        self.batch = None
        self._sync_folder()

    def close(self) -> None:
        """Lets others write it. An empty file without a batch was made for nothing."""
        if not self.done and self.batch is None:
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # of what a full disk has not taken: it does not count
            self._file.close()

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_state(self) -> BatchOnServer | None:
        try:
            text = self._state.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            found = BatchOnServer(**json.loads(text))
        except (ValueError, TypeError):
            raise ResultsError(f"--out: {self._state} is not what this client writes") from None
        if found.digest != self._digest:
            raise ResultsError(
                f"--out: {self.path} is of an interrupted batch of other prompts or parameters; "
                f"remove it and {self._state.name} to begin anew"
            )
        return found

    def _read_results(self) -> None:
        """Counts the results, and cuts off one that was being written."""
        self._file.seek(0)
        end = 0
        for text in self._file:
            if not text.endswith(b"\n"):
                self._check_started()
                self._file.truncate(end)
                break
            end += len(text)
            self._count(text)
        if not self.whole:
            self._check_started()

    def _count(self, text: bytes) -> None:
        numbers = self._prompts.numbers
        expected = numbers[self.done] if self.done < len(numbers) else None
        found: Any = None
        with contextlib.suppress(ValueError):
            found = json.loads(text)
        if not isinstance(found, dict) or expected is None or found.get("line") != expected:
            which = f"line {self.done + 1} is not the result of a line of {self._prompts.path}"
            raise ResultsError(f"--out: {self.path} holds something else: {which}")
        self.done += 1
        self.failed += "error" in found

    def _check_started(self) -> None:
        if self.batch is None and self._file.tell():
            raise ResultsError(
                f"--out: {self.path} is there, and not of an interrupted batch; remove it, or name "
                "another"
            )

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _locked(path: Path) -> IO[bytes]:
    """The file, made if it is not there, which nobody else has until it is closed. Raises
    ResultsError, OSError."""
    while True:
        file = open(path, "a+b")  # noqa: SIM115  (closed by whoever gets it)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BlockingIOError:
            file.close()
            raise ResultsError(f"--out: another client is writing {path}") from None
        except FileNotFoundError:
            pass  # who had it for nothing has removed it: what is written to this one is lost
        except OSError:
            file.close()
            raise
        file.close()
