"""Runs work that may hang on a daemon thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError


def in_daemon_thread(function: Callable[[], bool]) -> Future[bool]:
    """Unlike a thread of asyncio.to_thread, it holds up neither the loop nor the exit of the
    process."""
    future: Future[bool] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):  # cancelled: nobody waits any more
                future.set_result(result)

    threading.Thread(target=run, name="jaxserve-drain", daemon=True).start()
    return future
