"""Files that clients upload to make batches of, on disk beside the journal."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxserve.server.http.errors import ApiError

MAX_FILE_BYTES = 256 << 20
_CHUNK = 1 << 20
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_META, _CONTENT = ".json", ".jsonl"


@dataclass(frozen=True)
class StoredFile:
    """What is known of an upload. created: seconds since the epoch. owner: name of the API key that
    it came with; "" where none was needed."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created: int
    owner: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Uploads, and notes of batches that were made of them. Any thread may call; methods wait for
    the disk. max_bytes: of all uploads together. keep_s: for how long they are kept. Sees all."""

    def __init__(self, directory: Path, max_bytes: int, keep_s: float) -> None:
        self._directory, self._owner = directory, ""
        self._max_bytes, self._keep_s = max_bytes, keep_s
        self._lock = threading.Lock()

    def of(self, owner: str) -> FileStore:
        """The same for one API key, for which others' files and notes are not there; "" sees
        all."""
        view = copy.copy(self)
        view._owner = owner
        return view

    def save(self, filename: str, purpose: str, source: BinaryIO) -> StoredFile:
        """Keeps an upload; once this returns, it is on the disk. Raises ApiError for one that is
        too large."""
        name = new_id("file")
        with self._lock:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clean()
            room = self._max_bytes - sum(p.stat().st_size for p in self._all(_CONTENT))
            path = self._directory / (name + _CONTENT)
            try:
                size = _copy(source, path, min(room, MAX_FILE_BYTES))
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            kept = StoredFile(name, filename, purpose, size, int(time.time()), self._owner)
            self._note(name, asdict(kept))
        return kept

    def find(self, name: str) -> StoredFile:
        """Raises ApiError where there is none."""
        return StoredFile(**self.note(name))

    def all_files(self) -> list[StoredFile]:
        """The latest first."""
        found = [self.find(name) for name in self.notes("file")]
        return sorted(found, key=lambda each: (-each.created, each.id))

    def read(self, name: str) -> bytes:
        """Its content. Raises ApiError where there is none."""
        self.find(name)
        return (self._directory / (name + _CONTENT)).read_bytes()

    def delete(self, name: str) -> None:
        """Forgets a file or a note. Raises ApiError where there is none."""
        self.note(name)
        with self._lock:
            for suffix in (_META, _CONTENT):
                (self._directory / (name + suffix)).unlink(missing_ok=True)

    def note(self, name: str) -> dict[str, Any]:
        """What was noted under an id. Raises ApiError where nothing was."""
        path = self._directory / (name + _META)
        found = None
        if _ID.fullmatch(name) and path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
        if found is None or self._owner not in ("", found.get("owner", "")):
            raise ApiError(404, f"there is no {name!r}", param="id", code="not_found")
        assert isinstance(found, dict)
        return found

    def keep_note(self, name: str, note: dict[str, Any]) -> None:
        """Notes it under a new id, with whose it is."""
        with self._lock:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._note(name, {**note, "owner": self._owner})

    def notes(self, kind: str) -> list[str]:
        """Ids of that kind, "file" or "batch"."""
        found = []
        for path in self._all(_META):
            if path.stem.startswith(kind + "-"):
                with contextlib.suppress(ApiError):  # somebody else's, or gone meanwhile
                    self.note(path.stem)
                    found.append(path.stem)
        return found

    def _clean(self) -> None:
        for path in self._directory.iterdir():
            if time.time() - path.stat().st_mtime > self._keep_s:
                path.unlink(missing_ok=True)

    def _note(self, name: str, note: dict[str, Any]) -> None:
        _write(self._directory / (name + _META), json.dumps(note).encode())

    def _all(self, suffix: str) -> list[Path]:
        paths = self._directory.glob("*" + suffix) if self._directory.is_dir() else ()
        return [path for path in paths if _ID.fullmatch(path.stem)]


def new_id(kind: str) -> str:
    """A fresh one: kind-..."""
    return f"{kind}-{uuid.uuid4().hex}"


def _copy(source: BinaryIO, path: Path, limit: int) -> int:
    size = 0
    with path.open("xb") as target:
        while piece := source.read(_CHUNK):
            size += len(piece)
            if size > limit:
                problem = (
                    f"takes more than {max(limit, 0):,} bytes, which is what there is room for"
                )
                raise ApiError(413, f"file: {problem}", param="file", code="file_too_large")
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    return size


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())
    partial.replace(path)
