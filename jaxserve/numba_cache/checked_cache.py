"""What numba has compiled, on disk, checked before it is used.

numba itself gives what it finds there to pickle and to LLVM. What a full disk, a bad sector or a
killed machine has left then ends the process, at every start. Here each function has a file for
each of its keys, without an index, and a checksum before its content. Whatever is wrong with a
file, the function is compiled anew, and the file written anew.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

log = logging.getLogger(__name__)

KEPT = 8  # files of a function: for other values that it closes over, and other processors
_VERSIONS = numba.__version__, llvmlite.__version__


def cache_of(function: Any) -> Any:
    """The cache of a function that is to be compiled, as numba's `_cache` attributes take it; one
    that keeps nothing where no folder for it can be written."""
    try:
        return _CheckedCache(function)
    except (RuntimeError, OSError) as error:
        _tell(function, error)
        return NullCache()


class _CheckedCache(FunctionCache):
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator = self._impl.locator
        place = locator.get_cache_path(), self._impl.filename_base, locator.get_source_stamp()
        self._cache_file = _CheckedFiles(*place)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whole, but not ours, or it cannot be read
            log.warning("%s is compiled anew: %s", self._py_func.__qualname__, error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell(self._py_func, error)


class _CheckedFiles(IndexDataCacheFile):
    """The files of one function, by key."""

    def load(self, key: Any) -> Any:
        path = self._path(key)
        try:
            kept = path.read_bytes()
        except FileNotFoundError:
            return None
        size = hashlib.sha256().digest_size
        if kept[:size] != _checksum(path, kept[size:]):
            log.warning("%s is damaged: it is compiled anew", path)
            return None
        return pickle.loads(kept[size:])

    def save(self, key: Any, data: Any) -> None:
        path, content = self._path(key), self._dump(data)
        with self._open_for_write(str(path)) as file:  # in a file of its own, renamed at the end
            file.write(_checksum(path, content))
            file.write(content)
        others = path.parent.glob(f"{path.name.rsplit('.', 2)[0]}.*")
        for old in sorted(others, key=_age)[KEPT:]:
            old.unlink(missing_ok=True)

    def _path(self, key: Any) -> Path:
        told = hashlib.sha256(repr((_VERSIONS, self._source_stamp, key)).encode())
        name = self._index_name.removesuffix(".nbi")
        return Path(self._cache_path) / f"{name}.{told.hexdigest()[:16]}.nbc"


def _checksum(path: Path, content: bytes) -> bytes:
    """Of the content of the file of this name: no other's."""
    return hashlib.sha256(path.name.encode() + content).digest()


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except FileNotFoundError:  # another process has removed it
        return 0.0


def _tell(function: Any, error: Exception) -> None:
    name = function.__qualname__
    log.warning("%s is compiled at each start, it cannot be kept: %s", name, error)
