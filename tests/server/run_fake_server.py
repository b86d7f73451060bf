"""A server process over the fake engine, which fails at SIGUSR1.

argv: the grace period in seconds, and fields of the config, SECTION.NAME=VALUE. Prints its address
once it takes calls, and that for HTTP where there is one.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from jaxserve.config import Config
from jaxserve.config.tree import DEFAULTS
from jaxserve.server.access.options import access_settings
from jaxserve.server.http.options import http_settings
from jaxserve.server.requests.options import server_options
from jaxserve.server.server import Server
from jaxserve.server.startup.process import run_server
from jaxserve.server.telemetry.logs import log_to_stderr
from tests.server.fake_engine import FakeEngine


def main() -> int:
    engine = FakeEngine()
    fields: dict[str, Any] = {
        "server__port": 0,
        "server__http_port": -1,
        "server__metrics_port": -1,
        "server__grace_s": float(sys.argv[1]),
        "server__exit_on_failure": "off",
    }
    for field in sys.argv[2:]:
        path, _, value = field.partition("=")
        fields[path.replace(".", "__")] = type(DEFAULTS[path])(value)
    config = Config().with_fields(**fields)

    signal.signal(signal.SIGUSR1, lambda *_: engine.fail(RuntimeError("told to")))
    log_to_stderr(config.telemetry.log_format)
    http, access = http_settings(config), access_settings(config.server)

    def on_ready(ready: Server) -> None:
        print(ready.address, *filter(None, [ready.http_address]), sep="\n", flush=True)

    return run_server(engine, config, server_options(config), on_ready, http=http, access=access)


if __name__ == "__main__":
    sys.exit(main())
