"""A client process for `bench fronts`, which takes orders as lines of JSON.

Arguments: the frontend, its address, and the engine's description. Each line on stdin is
"throughput" or "latency", and the arguments of that function of `runs`; the line on stdout is the
result.
"""

from __future__ import annotations

import json
import sys

from jaxserve.bench import runs
from jaxserve.bench.http_target import Address, HttpTarget
from jaxserve.bench.load_target import ServerTarget, Target
from jaxserve.client import Client


def main() -> None:
    """Measures for the parent process until stdin ends."""
    door, address, served = sys.argv[1:]
    target: Target = ServerTarget(Client(address))
    if door == "HTTP":
        target = HttpTarget(Address.parse(address), json.loads(served))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        measure = runs.throughput if name == "throughput" else runs.latency
        print(json.dumps(measure(target, **arguments)), flush=True)


if __name__ == "__main__":
    main()
