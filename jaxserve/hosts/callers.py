"""Accepts connections to a leader while its group gathers: from followers, and from strangers."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

from jaxserve.hosts.channel import Channel
from jaxserve.hosts.link import PATIENCE_S

MOST = 64  # most connections that have not identified themselves
_LOOK_S = 0.5  # interval of checks whether gathering is over


class Callers:
    """Accepts connections, and hears each on its own thread, so that silent ones delay nobody. If
    there are MOST silent connections, the oldest is dropped for the next one: followers speak at
    once.

    listener: still owned by the caller. hear(channel, address) returns the index of a follower; for
        anybody else it returns None and closes the channel.
    """

    def __init__(self, listener: socket.socket, hear: Callable[[Channel, str], int | None]) -> None:
        self._listener, self._hear = listener, hear
        self._came: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._silent: dict[Channel, None] = {}  # in order of arrival
        self._over = False
        listener.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._accept, name="jaxserve-callers", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> tuple[int, Channel] | None:
        """The next follower and its index; None if none comes within `timeout_s`."""
        try:
            return self._came.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

    def close(self, let_go: Callable[[Channel], None]) -> None:
        """Stops accepting. Connections that `next` has not returned are let go."""
        with self._lock:
            self._over, silent = True, list(self._silent)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._thread.join()
        while (late := self.next(0.0)) is not None:
            silent.append(late[1])
        for channel in silent:
            let_go(channel)

    def _accept(self) -> None:
        while not self._over:
            try:
                connection, address = self._listener.accept()
                channel = Channel(connection, PATIENCE_S)
            except TimeoutError:
                continue
            except OSError:  # it has closed already, or files have run out
                if not self._over:
                    time.sleep(_LOOK_S)
                continue
            self._take_in(channel)
            heard = (channel, str(address[0]))
            threading.Thread(target=self._listen, args=heard, daemon=True).start()

    def _take_in(self, channel: Channel) -> None:
        with self._lock:
            self._silent[channel] = None
            if len(self._silent) <= MOST:
                return
            first = next(iter(self._silent))
            del self._silent[first]
        first.close()

    def _listen(self, channel: Channel, address: str) -> None:
        index = self._hear(channel, address)
        with self._lock:
            self._silent.pop(channel, None)
            if index is not None and not self._over:
                self._came.put((index, channel))
                return
        channel.close()
