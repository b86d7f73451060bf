"""What a server says to the terminal that it was started in."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)


def log_to_stderr() -> None:
    """Warnings, and of this package what is worth a line. What JAX and Orbax say of what they find
    and do (of each platform that is not there, too) is nobody's news."""
    form = "%(levelname)s %(asctime)s %(name)s: %(message)s"
    logging.basicConfig(format=form, level=logging.WARNING)
    logging.getLogger("jaxserve").setLevel(logging.INFO)


def announce(text: str) -> None:
    """Prints it. A server goes on serving where nobody reads that."""
    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (else it is flushed again at the end)
        log.warning("stdout: %s; %s", error.strerror, text.splitlines()[0])
