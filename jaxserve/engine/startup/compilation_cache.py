"""The on-disk cache of compiled steps, and the check that its entries are intact.

JAX never overwrites an entry, so one that a killed process, a full disk or a bad sector has damaged
would be compiled again at every start. Checksums beside the entries tell which ones to remove.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxserve.engine.startup.json_file import JsonFile
from jaxserve.writable import missing_folders, remove_empty

log = logging.getLogger(__name__)

INDEX = "checksums.json"
ENTRIES = "*-cache"  # files of JAX's, one for each program
_FIELD = "engine.compilation_cache_dir"
_ZLIB = b"\x78"  # how what JAX compresses without zstandard begins; it has a checksum of its own


def use(directory: str) -> str:
    """Keeps compiled steps on disk, so that the next start is fast, and removes damaged ones.
    Returns the directory, or "" if it cannot be written, which is logged once. "" leaves JAX's own
    setting (JAX_COMPILATION_CACHE_DIR) unchanged."""
    if not directory:
        return ""
    path = Path(os.path.expanduser(directory))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        removed = remove_damaged(path)
    except OSError as error:
        problem = f"nothing can be kept there, every start will compile anew: {error}"
        log.warning("%s: %s", _FIELD, problem)
        return ""
    if removed:
        count = "1 damaged entry" if removed == 1 else f"{removed} damaged entries"
        log.warning("%s: %s removed from %s, to be compiled again", _FIELD, count, path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


@contextlib.contextmanager
def gone_if_refused(directory: str) -> Iterator[None]:
    """The directory, if it is made within, goes again where what cannot be served ends that before
    anything was compiled, by this start or another one beside it. directory: "" for none."""
    path = Path(os.path.expanduser(directory))
    made = missing_folders(path) if directory else []
    try:
        yield
    except Exception:
        if made and not any(path.glob(ENTRIES)):
            shutil.rmtree(path, ignore_errors=True)
            remove_empty(made[1:])
        raise


def remove_damaged(path: Path) -> int:
    """Removes damaged entries. Returns how many. Raises OSError."""
    known, removed = _read(path), 0
    for entry in path.glob(ENTRIES):
        content = entry.read_bytes()
        expected = known.get(entry.name)
        whole = _whole(content) if expected is None else zlib.crc32(content) == expected
        if not whole:
            entry.unlink(missing_ok=True)
            removed += 1
    return removed


def note(directory: str) -> None:
    """Records checksums of the entries, right after the steps have been read or written. directory:
    "" for none."""
    if not directory:
        return
    path = Path(os.path.expanduser(directory))
    known, found = _read(path), {}
    try:
        for entry in path.glob(ENTRIES):
            found[entry.name] = known.get(entry.name) or zlib.crc32(entry.read_bytes())
        if found != known:
            JsonFile(path / INDEX).write(found)
    except OSError as error:
        log.warning("%s: %s", _FIELD, error)


def _read(path: Path) -> dict[str, int]:
    """The recorded checksums; empty if there are none, or the file is not ours."""
    try:
        return {name: int(value) for name, value in JsonFile(path / INDEX).read().items()}
    except (ValueError, TypeError):
        return {}


def _whole(content: bytes) -> bool:
    """Whether an entry without a checksum is complete. The process that wrote it may have been
    killed."""
    if not content.startswith(_ZLIB):
        return False
    decompress = zlib.decompressobj()
    try:
        decompress.decompress(content)
    except zlib.error:
        return False
    return decompress.eof
