"""The header of a GGUF file: metadata by name, and where each tensor lies.

The file is untrusted: counts and lengths in it are checked against limits and the file's size
before anything is read or allocated.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.checkpoint_files import regular_file

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_FIELDS, _MAX_TENSORS, _MAX_DIMENSIONS = 4096, 1 << 17, 4
_MAX_STRING, _MAX_ITEMS, _MAX_ALL_ITEMS = 16 << 20, 4 << 20, 16 << 20
_MAX_STRINGS = 256 << 20  # bytes of all strings
_MAX_SHOWN = 80
_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1",
            10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
_LENGTH = struct.Struct("<Q")


class GGUFError(ValueError):
    """A GGUF file cannot be used; the message names the file and what is wrong, in one line."""


class TensorType(NamedTuple):
    """How a tensor's elements are stored.

    Attributes:
        name: GGML's name, such as "Q4_K".
        block: elements that are stored together.
        block_bytes: bytes of those.
    """

    name: str
    block: int
    block_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
"""The types that can be read, by GGML's number."""
OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8"},
    **{38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0"},
}
"""The names of other types, likewise."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes:
        name: its name, such as "blk.3.attn_q.weight".
        shape: its dimensions, rows first, as NumPy and Hugging Face have them.
        type: how its elements are stored.
        offset: its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, elements along the last dimension."""
        return self.shape[-1] // self.type.block * self.type.block_bytes

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
        path: the file.
        metadata: values by key: a number, bool or str, a list of str, or an array of numbers.
        tensors: tensors by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def error(self, problem: str) -> GGUFError:
        """The error that names the file."""
        return GGUFError(f"{self.path}: {problem}")


def read_header(path: str | Path) -> Header:
    """Reads a file's header, or returns the last call's if the file is unchanged.

    Raises:
        GGUFError: If the file cannot be read, is cut off, or has features that are not supported.
    """
    file = Path(os.path.expanduser(path))
    try:
        regular_file(file)
        stat = os.stat(file)
    except (OSError, ValueError) as error:
        raise GGUFError(f"cannot read {file}: {error}") from None
    return _read_header(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)  # for the template, the config, the tokenizer and the weights
def _read_header(file: Path, mtime_ns: int, size: int) -> Header:
    try:
        if size < 24:
            raise ValueError("it is cut off in its header")
        with file.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        with data:
            return _Cursor(data).header(file)
    except (OSError, ValueError) as error:
        raise GGUFError(f"{file}: {error}") from None


class _Cursor:
    """Reads values one after another, never beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._text, self._items = data, 0, 0, 0

    def header(self, file: Path) -> Header:
        if self._take(4) != MAGIC:
            raise ValueError("it is not a GGUF file")
        version = self._number(4)
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            what = "it is big-endian" if swapped else f"GGUF version {version}"
            raise ValueError(f"{what} is not supported (known: versions 2 and 3, little-endian)")
        tensors, fields = self._number(8), self._number(8)
        _at_most("its header", tensors, _MAX_TENSORS, "tensors")
        _at_most("its header", fields, _MAX_FIELDS, "fields")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string("the name of a field")
            if key in metadata:
                raise ValueError(f"it has the field {_shown(key)} twice")
            metadata[key] = self._value(_shown(key))
        infos = [self._tensor() for _ in range(tensors)]
        return Header(file, metadata, self._placed(infos, metadata))

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError("it is cut off in its header")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _string(self, what: str) -> str:
        (length,) = _LENGTH.unpack(self._take(8))
        _at_most(what, length, _MAX_STRING, "bytes")
        self._text += length
        _at_most("its header", self._text, _MAX_STRINGS, "bytes of strings")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8") from None

    def _value(self, key: str) -> Any:
        kind = self._number(4)
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            kind, count = self._number(4), self._number(8)
            _at_most(key, count, _MAX_ITEMS, "items")
            self._items += count
            _at_most("its header", self._items, _MAX_ALL_ITEMS, "items of all lists")
            if kind == _STRING:
                return [self._string(key) for _ in range(count)]
            return self._numbers(key, kind, count)
        (value,) = self._numbers(key, kind, 1)
        if kind == _FLOAT32:  # so that 0.2 is 0.2, as in config.json
            return float(str(value))
        return bool(value) if kind == _BOOL else value.item()

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMBERS:
            raise ValueError(f"{key} has values of kind {kind}, which is not supported")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _tensor(self) -> tuple[str, list[int], int, int]:
        name = self._string("the name of a tensor")
        dimensions = self._number(4)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {_shown(name)} has {dimensions} dimensions; 1 to 4 are known")
        return name, [self._number(8) for _ in range(dimensions)], self._number(4), self._number(8)

    def _placed(
        self, infos: list[tuple[str, list[int], int, int]], metadata: Mapping[str, Any]
    ) -> dict[str, TensorInfo]:
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 0 < align <= 1 << 20 or align & (align - 1):
            raise ValueError(f"general.alignment is {_shown(align)}, which is not a power of two")
        begin = -(-self._at // align) * align
        placed: dict[str, TensorInfo] = {}
        for name, dimensions, kind, offset in infos:
            named = f"tensor {_shown(name)}"
            if name in placed:
                raise ValueError(f"it has {named} twice")
            if kind not in TYPES:
                known = ", ".join(type_.name for type_ in TYPES.values())
                kind_name = f"{OTHER_TYPES[kind]} ({kind})" if kind in OTHER_TYPES else str(kind)
                raise ValueError(f"{named} is of GGML type {kind_name}; known are {known}")
            info = TensorInfo(name, tuple(dimensions[::-1]), TYPES[kind], begin + offset)
            elements = 1
            for size in dimensions:
                elements *= size
            if elements == 0 or info.shape[-1] % info.type.block:
                raise ValueError(
                    f"{named}: shape {list(info.shape)} is not possible with {info.type.name}, "
                    f"blocks of {info.type.block}"
                )
            end = info.offset + elements // info.type.block * info.type.block_bytes
            if end > len(self._data):
                raise ValueError(
                    f"it is cut off: {named} ends at byte {end:,}, the file at {len(self._data):,}"
                )
            placed[name] = info
        return placed


def _at_most(what: str, number: int, most: int, unit: str) -> None:
    if number > most:
        raise ValueError(f"{what} has {number:,} {unit}, and {most:,} are allowed")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
