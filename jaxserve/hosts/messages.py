"""Messages between hosts: a name, plain fields and arrays, as bytes.

    4 bytes, big-endian: the length of the rest
    4 bytes, big-endian: the length of the header
    header: JSON, [name, fields, [[dtype, shape] of each array]]
    the arrays one after the other, in C order

A message is data only: nothing in it is executed.
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LENGTH = struct.Struct("!I")
_DTYPE = re.compile(r"[<>|][iufb]\d{1,2}")  # of arrays of numbers


class BadMessage(ValueError):
    """Bytes that are not a message."""


@dataclass(frozen=True)
class Message:
    """A message between hosts.

    Attributes:
        name: its type.
        fields: JSON values by name.
        arrays: arrays of numbers.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()

    @functools.cached_property
    def frame(self) -> bytes:
        """The message as bytes, with its length in front. Encoded once for all receiving hosts."""
        described = [[array.dtype.str, array.shape] for array in self.arrays]
        header = json.dumps([self.name, self.fields, described], separators=(",", ":")).encode()
        arrays = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in self.arrays]
        size = LENGTH.size + len(header) + sum(array.size for array in arrays)
        lengths = LENGTH.pack(size), LENGTH.pack(len(header))
        return b"".join([*lengths, header, *(array.data for array in arrays)])


def unpack(content: bytes) -> Message:
    """Decodes a frame without its leading length. The arrays are read-only. Raises BadMessage."""
    try:
        (length,) = LENGTH.unpack_from(content)
        at = LENGTH.size + length
        name, fields, described = json.loads(content[LENGTH.size : at])
        arrays = []
        for code, shape in described:
            if not _DTYPE.fullmatch(code):  # before numpy interprets it
                raise BadMessage(f"arrays of {code!r} are not sent")
            dtype, count = np.dtype(code), math.prod(shape)
            arrays.append(np.frombuffer(content, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
    except BadMessage:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise BadMessage(f"not a message: {error}") from error
    if at != len(content) or not isinstance(name, str) or not isinstance(fields, dict):
        raise BadMessage("not a message: its parts do not fit")
    return Message(name, fields, tuple(arrays))
