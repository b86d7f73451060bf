"""A server whose engine can be broken, for `bench abuse` and `bench soak`; flags as for serve.py.

Prints its gRPC and HTTP addresses once it takes calls. SIGUSR1 stops the engine's thread after its
next step, or lets it continue; SIGUSR2 makes the device fail at the next step.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve.bench.command import read_config
from jaxserve.engine.stats import Observer, StepStats
from jaxserve.server.access.options import access_settings
from jaxserve.server.batches.options import open_batches
from jaxserve.server.http.options import http_settings
from jaxserve.server.requests.options import server_options
from jaxserve.server.server import Server
from jaxserve.server.startup.process import run_server

if TYPE_CHECKING:
    from jaxserve.engine.device.executor import Executor


class Saboteur(Observer):
    """Stops the engine after a step, or makes its device fail."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._go_on = threading.Event()
        self._go_on.set()

    def hold(self) -> None:
        """Stops the engine after its next step, or lets it continue."""
        if self._go_on.is_set():
            self._go_on.clear()
        else:
            self._go_on.set()

    def fail(self) -> None:
        """Fails the device at its next step."""
        import jax

        def broken(*_: Any, **__: Any) -> NoReturn:
            raise jax.errors.JaxRuntimeError("sabotage")

        vars(self._executor).update(submit=broken, compute=broken)

    def on_step(self, stats: StepStats) -> None:
        """Runs on the engine's thread."""
        self._go_on.wait()


def main() -> int:
    """Runs the server; returns its exit code."""
    read = read_config(sys.argv[1:])
    config = read.with_fields(server__port=0, server__http_port=0, server__metrics_port=-1)
    http = http_settings(config)
    with open_batches(config.server, config.scheduler) as batches:
        # Imported late: jax takes seconds.
        from jaxserve.engine.startup.build import build_engine

        engine = build_engine(config, progress=False)
        saboteur = Saboteur(engine.executor)
        engine.add_observer(saboteur)
        engine.start()
        signal.signal(signal.SIGUSR1, lambda *_: saboteur.hold())
        signal.signal(signal.SIGUSR2, lambda *_: saboteur.fail())
        access = access_settings(config.server)
        options = server_options(config)
        return run_server(engine, config, options, _announce, batches, http, access=access)


def _announce(server: Server) -> None:
    print(server.address, server.http_address, flush=True)


if __name__ == "__main__":
    sys.exit(main())
