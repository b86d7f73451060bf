"""Runs a server as the process's main task: signals, the exit code, and messages to the
terminal."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from jaxserve.config import JSON, Config
from jaxserve.hosts.process_exit import end_process
from jaxserve.server.access.options import Access
from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.http.options import HttpSettings
from jaxserve.server.open_files import raise_limit
from jaxserve.server.requests.addresses import reached
from jaxserve.server.requests.call_outcome import Sink
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.slo_classes import slo_classes
from jaxserve.server.server import Server

URL_FILE = "JAXSERVE_URL_FILE"
"""Environment variable: a file to which the HTTP address is written once the server takes calls,
for probes."""

log = logging.getLogger(__name__)


def run_server(
    engine: EngineClient,
    config: Config,
    options: ServerOptions,
    on_ready: Callable[[Server], None] | None = None,
    batches: BatchSettings | None = None,
    http: HttpSettings | None = None,
    access: Access | None = None,
    traces: Sink | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP, or until the engine fails if the config says so. A
    second SIGTERM or SIGINT cuts the grace period short. Must run in the main thread. If the engine
    hangs, its threads would block the exit, so the process ends here with exit code 1.

    Args:
        engine: the engine, already started.
        config: the server's settings.
        options: how calls are treated.
        on_ready: called once the server takes calls.
        batches: the batch journal; None takes no batches.
        http: the HTTP frontend; None is off.
        access: who may call; None lets everybody in.
        traces: called with each finished call.

    Returns:
        The exit code: 0, or 1 if the engine has failed.
    """
    raise_limit()
    names = ("host", "port", "metrics_port", "grace_s")
    server = Server(
        engine,
        **{name: getattr(config.server, name) for name in names},
        batches=batches,
        slo_classes=slo_classes(config.server.slo_classes),
        http=http,
        options=options,
        access=access,
        traces=traces,
    )
    say = log.info if config.telemetry.log_format == JSON else _say
    signals = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            server.request_stop(say)
        elif number != signal.SIGHUP:  # a closing terminal may send two
            server.cancel_running()

    server.start()
    # Objects of the start live on for good. Unless frozen, bodies with many fields would make the
    # collector go through all of them again and again, and nothing else runs in those 0.2 s.
    gc.collect()
    gc.freeze()
    gc.enable()  # off during the start
    taken = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
        taken.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in taken}
    try:
        _note_url(server)
        if on_ready is not None:
            on_ready(server)
        server.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if server.hung:
        end_process(1)
    return 1 if server.failed else 0


def _note_url(server: Server) -> None:
    path, address = os.environ.get(URL_FILE), server.http_address
    if not path or address is None:
        return
    try:
        Path(path).write_text(f"{server.access.scheme}://{reached(address)}\n", encoding="utf-8")
    except OSError as error:
        log.warning("%s: %s: %s", URL_FILE, path, error.strerror)


def announce(text: str, form: str) -> None:
    """Prints a text, or logs it if the log is JSON, since both may share a stream. A closed stdout
    is no error."""
    if form == JSON:
        log.info("%s", text)
        return
    try:
        print(text, flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (else it is flushed again at the end)
        log.warning("stdout: %s; %s", error.strerror, text.splitlines()[0])


def complain(text: str, form: str) -> None:
    """Prints or logs, as `announce`, why the server does not start."""
    if form == JSON:
        log.critical("%s", text)
    else:
        print(text, file=sys.stderr)


def _say(text: str) -> None:
    """Prints to the terminal where Ctrl-C was pressed, if it is still open."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
