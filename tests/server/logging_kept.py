"""Python's logging as it was before a test that sets it up."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from unittest.mock import patch


@contextlib.contextmanager
def logging_kept() -> Iterator[None]:
    """All that `log_to_stderr` changes is put back."""
    root, ours = logging.getLogger(), logging.getLogger("jaxserve")
    before, levels = list(root.handlers), (root.level, ours.level)
    with (
        patch.object(sys, "excepthook", sys.excepthook),
        patch.object(threading, "excepthook", threading.excepthook),
    ):
        yield
    for handler in [each for each in root.handlers if each not in before]:
        root.removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
