"""Serves a model over gRPC and HTTP: flags -> config -> engine -> server.

    python serve.py --config=configs/tiny_cpu.py
    python serve.py --model=/path/to/checkpoint --config.scheduler.max_rows=16

Presets are in configs/; configs/base.py says what every field means.
"""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends it at once while it imports, loads and compiles
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from absl import app

from jaxserve.engine.errors import ConfigError
from jaxserve.server import launch
from jaxserve.server.batch_options import open_batches
from jaxserve.server.http.door import http_settings
from jaxserve.server.process import run_server

_STARTED = time.monotonic()
_DEFAULT = Path(__file__).resolve().parent / "configs" / "tiny_cpu.py"


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return launch.parse_flags(argv, str(_DEFAULT))
    except launch.UsageError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 after SIGTERM or Ctrl-C, 1 for a config that cannot be served or an engine that
    has failed, 2 for a wrong flag."""
    del argv
    try:
        config = launch.read_config()
        launch.check_ports(config)
        http = http_settings(config)
        with open_batches(config) as batches:
            # Imported late: jax takes seconds, and everything above should answer at once.
            from jaxserve.engine.build import build_engine

            engine = build_engine(config)
            engine.start()

            def on_ready(server: launch.Server) -> None:
                seconds = time.monotonic() - _STARTED
                print(launch.ready_text(engine.info(), server, seconds), flush=True)

            return run_server(engine, config, on_ready, batches, http)
    except ConfigError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
