"""Ending the process where its threads cannot be ended: they wait for hosts that are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn

_WRITE_S = 5.0  # for what is still to be written, should somebody read it


def end_process(code: int) -> NoReturn:
    """Here and now; what was logged and printed is written first, where that is read."""
    last = threading.Thread(target=_write_out, name="jaxserve-last-words", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter ends already, and starts none
        last.start()
        last.join(_WRITE_S)
    os._exit(code)


def _write_out() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
