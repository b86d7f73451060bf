"""A network between client and server that a test can cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class Relay:
    """Passes on what comes to `address` to `target`, "host:port", or to nobody."""

    def __init__(self) -> None:
        self.target: str | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections; new ones are dropped until there is a target again."""
        with self._lock:
            self.target = None
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._open.clear()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._join(near)

    def _join(self, near: socket.socket) -> None:
        with self._lock:
            try:
                if self.target is None:
                    raise OSError
                host, _, port = self.target.rpartition(":")
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                return
            self._open |= {near, far}
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
