"""Messages over TCP."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from jaxserve.hosts.messages import LENGTH, Message, unpack

MAX_BYTES = 1 << 28  # per message; the largest are masks of 256 rows, some megabytes


class Closed(ConnectionError):
    """The connection is closed, or the other side sent a message that is too long."""


def receive_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    """Receives `size` bytes. deadline: of time.monotonic(). Raises Closed, TimeoutError,
    OSError."""
    parts = bytearray(size)
    view, have = memoryview(parts), 0
    while have < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        count = connection.recv_into(view[have:])
        if not count:
            raise Closed("the connection is closed")
        have += count
    return bytes(parts)


class Channel:
    """One end of a connection, which it owns. Any thread may send, one receives.

    stuck_s: seconds after which a message that is not received is an error.
    """

    def __init__(self, connection: socket.socket, stuck_s: float) -> None:
        self._socket = connection
        connection.settimeout(None)
        # Messages are sent at once, since the next one may depend on the answer.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, rest = divmod(stuck_s, 1)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message. Raises Closed."""
        frame = message.frame
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise Closed(str(error)) from error

    def receive(self, timeout_s: float | None = None, most: int = MAX_BYTES) -> Message:
        """The next message. Raises Closed, also for more than `most` bytes, BadMessage, and
        TimeoutError if it is not complete within timeout_s."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            (length,) = LENGTH.unpack(receive_exactly(self._socket, LENGTH.size, deadline))
            if length > most:
                raise Closed(f"it sends {length} bytes at once")
            return unpack(receive_exactly(self._socket, length, deadline))
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error

    def close(self) -> None:
        """Idempotent; a waiting `receive` raises Closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
