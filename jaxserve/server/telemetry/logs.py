"""The server's log on stderr: text, or JSON with one object per line."""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import sys
import threading
from logging.handlers import QueueHandler
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from jaxserve.config import JSON, TEXT

_WAITING, _WAITING_CHARS = 10_000, 1 << 25  # most waiting lines, and characters in them
_FLUSH_S = 2.0
_OURS = "jaxserve"


def log_to_stderr(form: str = TEXT) -> None:
    """Logs warnings, and INFO of this package only, since JAX and Orbax are verbose. form: TEXT or
    JSON; JSON includes uncaught errors and Python's warnings. Another call changes the form."""
    root = logging.getLogger()
    handler = next((known for known in root.handlers if isinstance(known, BackgroundHandler)), None)
    if handler is None:
        handler = BackgroundHandler(logging.StreamHandler(sys.stderr))
        root.addHandler(handler)
        root.setLevel(logging.WARNING)
        logging.getLogger(_OURS).setLevel(logging.INFO)
    names = {"levelname": "level", "name": "logger", "exc_info": "exception"}
    handler.target.setFormatter(
        JsonFormatter(("levelname", "name", "message"), rename_fields=names, timestamp="time")
        if form == JSON
        else logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s")
    )
    logging.captureWarnings(form == JSON)
    sys.excepthook = _uncaught if form == JSON else sys.__excepthook__
    threading.excepthook = _uncaught_in_thread if form == JSON else threading.__excepthook__


class BackgroundHandler(QueueHandler):
    """Writes records for another handler on its own thread, so that a slow reader of the log holds
    up neither the event loop nor the engine. Records beyond the limits are dropped, and their
    number is logged. `close` waits a moment for the remaining records; `logging.shutdown` calls it.

    Args:
        target: the handler that writes.
        waiting: most waiting records.
        chars: most characters in them; one record may wait whatever its length.
    """

    def __init__(
        self, target: logging.Handler, waiting: int = _WAITING, chars: int = _WAITING_CHARS
    ) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(waiting)
        super().__init__(self._lines)
        self.target = target
        self._counting = threading.Lock()
        self._lost, self._chars, self._most = 0, 0, chars
        self._thread = threading.Thread(target=self._write, name="jaxserve-log", daemon=True)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Formats the message and the traceback, which may change until they are written."""
        record = copy.copy(record)
        if not isinstance(record.msg, dict):
            record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queues a record without waiting."""
        length = _length(record.msg)
        with self._counting:
            try:
                if self._chars and self._chars + length > self._most:
                    raise queue.Full
                self._lines.put_nowait(record)
            except queue.Full:
                self._lost += 1
            else:
                self._chars += length

    def close(self) -> None:
        """Writes the waiting records, if possible."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):  # nobody reads
                self._lines.put(None, timeout=_FLUSH_S)
                self._thread.join(_FLUSH_S)
        super().close()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            with self._counting:
                self._chars -= _length(record.msg)
            self.target.handle(record)
            with self._counting:
                lost, self._lost = self._lost, 0
            if lost:
                text = f"{lost} lines came faster than they are read, and are lost"
                level = logging.WARNING
                self.target.handle(logging.LogRecord(__name__, level, "", 0, text, None, None))


def _length(said: Any) -> int:
    """Approximate characters of a message or its arguments."""
    if isinstance(said, (dict, list)):
        return sum(map(_length, said.values() if isinstance(said, dict) else said))
    return len(said) if isinstance(said, (str, tuple)) else 8


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(_OURS).critical("%s", error, exc_info=(kind, error, trace))


def _uncaught_in_thread(uncaught: Any) -> None:
    name = uncaught.thread.name if uncaught.thread is not None else "?"
    if uncaught.exc_type is not SystemExit:
        error = (uncaught.exc_type, uncaught.exc_value, uncaught.exc_traceback)
        logging.getLogger(_OURS).error("the thread %s failed", name, exc_info=error)
