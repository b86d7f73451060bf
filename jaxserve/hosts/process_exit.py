"""Ends the process when its threads cannot be ended because they wait for hosts that are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn

_WRITE_S = 5.0  # for pending output, if anybody reads it


def end_process(code: int) -> NoReturn:
    """Ends the process at once, after writing pending logs and output if anybody reads them."""
    last = threading.Thread(target=_write_out, name="jaxserve-last-words", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending already
        last.start()
        last.join(_WRITE_S)
    os._exit(code)


def _write_out() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
