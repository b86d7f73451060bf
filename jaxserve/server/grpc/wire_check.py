"""Checks a protobuf message before it is parsed: the parser holds the interpreter until it is done,
and a field of two bytes may take a hundred in memory."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from jaxserve.sched.request import InvalidRequest

MAX_FIELDS = 1 << 18
"""Most fields of a message, including those of nested messages and entries of lists: parsing them
takes some 40 ms at most. Packed numbers count as one field."""
_VARINT, _EIGHT, _DELIMITED, _FOUR = 0, 1, 2, 5
_SIZES = {_EIGHT: 8, _FOUR: 4}


def check_fields(raw: bytes, kind: Descriptor, limit: int = MAX_FIELDS) -> None:
    """Checks that a message has few enough fields to be parsed. Malformed messages are left to the
    parser. Any thread may call this.

    Args:
        raw: the message, as it came.
        kind: its type.
        limit: the most fields.

    Raises:
        InvalidRequest: If it has more.
    """
    left = limit
    waiting = [(0, len(raw), kind)]
    while waiting:
        at, end, message = waiting.pop()
        while at < end:
            tag, at = _varint(raw, at, end)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(raw, at, end)
            elif wire == _DELIMITED:
                size, at = _varint(raw, at, end)
                field = message.fields_by_number.get(tag >> 3)
                if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                    waiting.append((at, min(at + size, end), field.message_type))
                at += size
            elif wire in _SIZES:
                at += _SIZES[wire]
            else:
                break
            left -= 1
            if left < 0:
                raise InvalidRequest("request", f"has more than {limit:,} fields")


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """The varint at this place, and where it ends."""
    value = shift = 0
    while at < end and shift < 64:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end  # cut off: the message ends here
