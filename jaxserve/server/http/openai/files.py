"""Files that clients upload for batches, stored beside the journal."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxserve.server.batches.batch_lines import MAX_LINE_BYTES
from jaxserve.server.batches.journal import owner_words
from jaxserve.server.batches.records import Quota
from jaxserve.server.http.errors import ApiError
from jaxserve.writable import PARTIAL, replace_file

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 256 << 20
MAX_NAME = 255  # characters of a file's name
FORM_BYTES = 1 << 20
"""Most bytes of a form besides its file."""
LINES_A_PIECE = 1000
MAX_LINE = 2 * MAX_LINE_BYTES
"""Most bytes of a line of a file; its line in the journal is shorter."""
_CHUNK = 1 << 20
_NOTE_BYTES = 512  # bytes that a file takes beside its content, about
_ID = re.compile(r"file-[0-9a-f]{32}")
_META, _CONTENT = ".json", ".jsonl"


@dataclass(frozen=True)
class StoredFile:
    """An uploaded file.

    Attributes:
        id: its id.
        filename: the client's name for it.
        purpose: as given by the client.
        bytes: size of its content.
        created: seconds since the epoch.
        owner: name of the API key that uploaded it; "" where none was needed.
    """

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


class Room(NamedTuple):
    """Room for an upload in bytes, and the name of the limit that sets it."""

    bytes: int
    limit: str

    def too_small(self) -> ApiError:
        """The error for a larger file."""
        problem = f"takes more than {max(self.bytes, 0):,} bytes, which is what there is room for"
        return ApiError(413, f"file: {problem} {self.limit}", param="file", code="file_too_large")


class _Shelf:
    """State that all views share: files by id, and bytes reserved by running uploads, by owner."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.files: dict[str, StoredFile] | None = None  # the directory was not read yet
        self.reserved: list[StoredFile] = []


class FileStore:
    """Uploaded files of all owners. Any thread may call; methods wait for the disk, and raise
    ApiError, also if the disk fails.

    Args:
        directory: where the files are. Nothing else may write there.
        max_bytes: size of all files together.
        keep_s: seconds after which a file is deleted.
    """

    def __init__(self, directory: Path, max_bytes: int, keep_s: float) -> None:
        self._directory, self._owner = directory, ""
        self._max_bytes, self._keep_s = max_bytes, keep_s
        self._quota: Quota | None = None
        self._shelf = _Shelf()

    def for_owner(self, owner: str, quota: Quota | None = None) -> FileStore:
        """A view of one API key's files; "" sees all. quota: limits of what it may keep."""
        view = copy.copy(self)
        view._owner, view._quota = owner, quota
        return view

    @contextlib.contextmanager
    def reserve(self, length: int | None) -> Iterator[Room]:
        """Reserves room for an upload until the context ends. length: length of the upload's form;
        None if unknown."""
        with self._shelf.lock, _disk():
            room = self._left()
            if length is not None and length - FORM_BYTES > room.bytes:
                raise room.too_small()
            taken = room.bytes if length is None else min(length, room.bytes)
            place = StoredFile(uuid.uuid4().hex, "", "", taken, 0, self._owner)
            self._shelf.reserved.append(place)
        try:
            yield room
        finally:
            with self._shelf.lock:
                self._shelf.reserved.remove(place)

    def save(self, filename: str, purpose: str, source: BinaryIO, room: Room) -> StoredFile:
        """Stores an upload. It is on disk when this returns.

        Args:
            filename: the client's name for it.
            purpose: as given by the client.
            source: its content.
            room: from `reserve`.
        """
        if len(filename) > MAX_NAME:
            problem = f"file: its name has {len(filename)} characters; at most {MAX_NAME} are taken"
            raise ApiError(400, problem, param="file", code="invalid_value")
        name = f"file-{uuid.uuid4().hex}"
        content = self._directory / (name + _CONTENT)
        with _disk():
            try:
                replace_file(content, _bounded(source, room))
                size, now = content.stat().st_size, int(time.time())
                kept = StoredFile(name, filename, purpose, size, now, self._owner)
                note = json.dumps(asdict(kept)).encode()
                replace_file(self._directory / (name + _META), [note])
            except BaseException:
                content.unlink(missing_ok=True)
                raise
        with self._shelf.lock:
            self._all()[name] = kept
        return kept

    def find_file(self, name: str) -> StoredFile:
        """The file with that id. Raises ApiError if there is none."""
        with self._shelf.lock, _disk():
            stored = self._all().get(name)
        if stored is None or self._owner not in ("", stored.owner):
            raise _no_file(name)
        return stored

    def list_files(self, after: str | None, limit: int) -> tuple[list[StoredFile], bool]:
        """At most `limit` files, the latest first, starting behind the one with the id `after`; and
        whether there are more."""
        with self._shelf.lock, _disk():
            files = [file for file in self._all().values() if self._owner in ("", file.owner)]
        files.sort(key=lambda file: (-file.created, file.id))
        if after is not None:
            last = self.find_file(after)
            files = [e for e in files if (-e.created, e.id) > (-last.created, last.id)]
        return files[:limit], len(files) > limit

    def open_file(self, name: str) -> BinaryIO:
        """Opens the file's content, which stays readable until it is closed, even if the file is
        deleted."""
        self.find_file(name)
        with _disk():
            try:
                return (self._directory / (name + _CONTENT)).open("rb")
            except FileNotFoundError:  # deleted meanwhile
                raise _no_file(name) from None

    def delete_file(self, name: str) -> None:
        """Deletes a file."""
        self.find_file(name)
        with self._shelf.lock, _disk():
            self._forget(name)

    def lines(self, name: str) -> Generator[list[str], None, None]:
        """Yields the file's lines in lists, without blank lines. A line that is too long for a
        batch is cut off."""
        with self.open_file(name) as file, _disk():
            piece: list[str] = []
            size = 0
            while line := file.readline(MAX_LINE + 1):
                rest = line
                while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_LINE + 1)
                if not line.strip():
                    continue
                piece.append(line.decode("utf-8", "replace"))
                size += len(line)
                if len(piece) == LINES_A_PIECE or size >= MAX_LINE:
                    yield piece
                    piece, size = [], 0
            if piece:
                yield piece

    def _left(self) -> Room:
        """Room for one more file of this owner."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in list(self._all().values()):
            if time.time() - file.created > self._keep_s:
                self._forget(file.id)
        everybody = [*self._all().values(), *self._shelf.reserved]
        mine = [file for file in everybody if file.owner == self._owner]
        rooms = [
            Room(MAX_FILE_BYTES, "of one file"),
            Room(self._max_bytes - _size(everybody), "in server.batch_gib"),
        ]
        if self._quota is None:
            return min(rooms)
        if len(mine) >= self._quota.count:
            whose = f"{len(mine)} files of {owner_words(self._owner)}, as many as it may have"
            problem = f"file: there are {whose} (files); delete some"
            raise ApiError(413, problem, param="file", code="too_many_files")
        own = self._quota.max_bytes - _size(mine)
        return min(*rooms, Room(own, f"in files_mib of {owner_words(self._owner)}"))

    def _forget(self, name: str) -> None:
        for suffix in (_META, _CONTENT):  # in this order: a file without a note is ignored
            (self._directory / (name + suffix)).unlink(missing_ok=True)
        self._all().pop(name, None)

    def _all(self) -> dict[str, StoredFile]:
        """Reads the directory once, and deletes files that an earlier server left half-written."""
        if self._shelf.files is None:
            files = {
                file.id: file for file in map(_read, self._directory.glob("*" + _META)) if file
            }
            for path in self._directory.iterdir() if self._directory.is_dir() else ():
                if path.suffix == PARTIAL or (path.suffix == _CONTENT and path.stem not in files):
                    path.unlink(missing_ok=True)
            self._shelf.files = files
        return self._shelf.files


def _no_file(name: str) -> ApiError:
    return ApiError(404, f"there is no {name!r}", param="id", code="not_found")


def _size(files: list[StoredFile]) -> int:
    return sum(file.bytes + _NOTE_BYTES for file in files)


def _read(path: Path) -> StoredFile | None:
    try:
        stored = StoredFile(**json.loads(path.read_text(encoding="utf-8")))
        return stored if _ID.fullmatch(stored.id) and stored.id == path.stem else None
    except (ValueError, TypeError) as error:
        log.warning("%s: is not the note of a file: %s", path, error)
        return None


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """Turns errors of the disk into ApiErrors."""
    try:
        yield
    except OSError as error:
        raise disk_error(error) from error


def disk_error(error: OSError) -> ApiError:
    """The error for the client, without the server's paths."""
    log.warning("the disk of files: %s", error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "file: the server's disk is full", param="file", code="disk_full")
    why = error.strerror or type(error).__name__
    return ApiError(507, f"file: the server's disk: {why}", param="file", code="disk_error")


def _bounded(source: BinaryIO, room: Room) -> Iterator[bytes]:
    size = 0
    while piece := source.read(_CHUNK):
        size += len(piece)
        if size > room.bytes:
            raise room.too_small()
        yield piece
