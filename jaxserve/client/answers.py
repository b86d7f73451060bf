"""Writes the answers to prompts to stdout, or to a file that a later call can resume.

An answer is a line of JSON with the line number of its prompt. A finished file has the answers in
the order of the prompts.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from jaxserve.client.batch_results import ResultsError
from jaxserve.writable import replace_file


class Answers:
    """Writes the answers to prompts that are given by line number.

    Args:
        path: output file; None for stdout.
        prompts: the prompts by line number. A resumed file may only have answers to these.
        resume: whether to keep the answers that the file has, except errors.

    Attributes:
        done: line numbers that have an answer, in the order of the file.

    Raises:
        ResultsError: If the file to resume holds something else.
        OSError: If the file cannot be read or written.
    """

    def __init__(self, path: Path | None, prompts: Mapping[int, str], *, resume: bool) -> None:
        self._path = path
        self._file: IO[str] = sys.stdout
        self.done: dict[int, None] = {}  # in the order of the file
        if path is None:
            return
        if resume and path.exists():
            kept = _read(path, prompts)
            self.done = dict.fromkeys(kept)
            replace_file(path, kept.values())
        self._file = open(path, "a" if resume else "w", encoding="utf-8")  # noqa: SIM115

    def write(self, line: int, record: Mapping[str, Any]) -> None:
        """Writes the answer to the prompt of a line."""
        print(json.dumps({"line": line, **record}, ensure_ascii=False), file=self._file, flush=True)
        self.done[line] = None

    def close(self) -> None:
        """Closes the file and puts its answers in order."""
        if self._path is None:
            return
        self._file.close()
        if list(self.done) != sorted(self.done):
            with open(self._path, "rb") as file:
                in_order = sorted(file, key=lambda text: int(json.loads(text)["line"]))
            replace_file(self._path, in_order)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(path: Path, prompts: Mapping[int, str]) -> dict[int, bytes]:
    """Complete answers by line number, without errors, in the file's order."""
    kept: dict[int, bytes] = {}
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                break
            record: Any = None
            with contextlib.suppress(ValueError):
                record = json.loads(text)
            known = isinstance(record, dict) and {"line", "prompt"} <= record.keys()
            line = record["line"] if known else None
            if not isinstance(line, int) or record["prompt"] != prompts.get(line, record):
                which = f"line {number} is not the answer to one of these prompts"
                raise ResultsError(f"--resume: {path} holds something else: {which}")
            if "error" not in record:
                kept.setdefault(line, text)
    return kept
