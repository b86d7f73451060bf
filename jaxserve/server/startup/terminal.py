"""What a server says to the terminal that it was started in."""

from __future__ import annotations

import logging
import os
import sys

from jaxserve.config import JSON

log = logging.getLogger(__name__)


def announce(text: str, form: str) -> None:
    """Prints it, or logs it where the log is JSON: there may be one stream for both. A server goes
    on serving where nobody reads that."""
    if form == JSON:
        log.info("%s", text)
        return
    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (else it is flushed again at the end)
        log.warning("stdout: %s; %s", error.strerror, text.splitlines()[0])


def complain(text: str, form: str) -> None:
    """Says why the server does not start, likewise."""
    if form == JSON:
        log.critical("%s", text)
    else:
        print(text, file=sys.stderr)
