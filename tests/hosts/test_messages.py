"""Messages come out as they went in, and what is none is refused."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.hosts.messages import LENGTH, BadMessage, Message, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
DTYPES = ("int32", "uint32", "uint16", "int64", "float32", "bool")
ARRAYS = st.builds(
    lambda dtype, shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)


@settings(max_examples=40)
@given(
    st.text(max_size=8),
    st.dictionaries(st.text(max_size=4), PLAIN, max_size=3),
    st.lists(ARRAYS, max_size=3),
)
def test_they_come_out_as_they_went_in(
    name: str, fields: dict[str, object], arrays: list[np.ndarray]
) -> None:
    found = unpack(Message(name, fields, arrays).frame[LENGTH.size :])
    assert (found.name, found.fields, len(found.arrays)) == (name, fields, len(arrays))
    for one, other in zip(found.arrays, arrays, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_an_array_that_is_not_in_one_piece_is_sent() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    (found,) = unpack(Message("a", {}, [array]).frame[LENGTH.size :]).arrays
    np.testing.assert_array_equal(found, array)


def header(content: object) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("!I", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        header(["name", {}]),
        header([1, {}, []]),
        header(["name", [], []]),
        header(["name", {}, [["<i4", [2]]]]),  # without its bytes
        header(["name", {}, [["|O", [1]]]]) + b"12345678",
        header(["name", {}, [["(1,i4", [1]]]]) + b"1234",
        header(["name", {}, [["<i4", [10**30]]]]),
        header(["name", {}, [[4, [1]]]]) + b"1234",
        struct.pack("!I", 1 << 16) + b"[" * (1 << 16),
        header(["name", {}, []]) + b"more",
    ],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(BadMessage):
        unpack(content)
