"""A server process over the fake engine, which does what it is told on stdin: step, fail.

argv: the grace period in seconds. Prints its address once it takes calls.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

from jaxserve.server.runner import run_server
from tests.server.fake_engine import FakeEngine


def main() -> int:
    engine = FakeEngine()
    server = SimpleNamespace(
        host="localhost",
        port=0,
        http_port=-1,
        metrics_port=-1,
        slo_classes={},
        grace_s=float(sys.argv[1]),
    )

    def obey() -> None:
        for line in sys.stdin:
            if line == "step\n":
                engine.wait(lambda: engine.live)
                engine.step()
            elif line == "fail\n":
                engine.fail(RuntimeError("told to"))

    threading.Thread(target=obey, daemon=True).start()
    return run_server(
        engine, SimpleNamespace(server=server), lambda ready: print(ready.address, flush=True)
    )


if __name__ == "__main__":
    sys.exit(main())
