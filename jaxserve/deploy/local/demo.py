"""Two replicas of the model in the box on a Ray cluster of this machine alone, until Ctrl-C.

python -m jaxserve.deploy.local.demo
python -m jaxserve.deploy.local.demo --replicas=4 --routing=two_choices
python -m jaxserve.deploy.local.demo --flags="--model=/path/to/checkpoint" --num_cpus=4
python -m jaxserve.deploy.local.demo --hosts=2 --flags="--config.mesh.tensor=2"
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Sequence

from pydantic import ValidationError

from jaxserve.command_line import Parser, run
from jaxserve.config import ConfigError
from jaxserve.deploy.flags import replica_config
from jaxserve.deploy.local.cluster import Cluster, NotReady, local_cluster
from jaxserve.deploy.settings import Settings
from jaxserve.server.startup.launch import jaxserve_command

_MISSING = "Ray is not installed: pip install 'ray[serve]>=2.56'"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 after Ctrl-C or SIGTERM, 1 if the deployment does not run, 2 for a wrong
    flag."""
    parser = Parser(prog="python -m jaxserve.deploy.local.demo", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the engine (2)")
    parser.add_argument("--hosts", type=int, default=1, help="processes of each replica (1)")
    parser.add_argument("--routing", default="slo", help="how a replica is chosen (slo)")
    parser.add_argument("--flags", default="", help="flags of serve.py for every replica")
    parser.add_argument(
        "--num_cpus", type=float, default=1.0, help="CPUs that Ray gives to each host (1)"
    )
    parser.add_argument("--http_port", type=_port, default=0, help="0: any free one (0)")
    parser.add_argument("--grpc_port", type=_port, default=0, help="0: any free one (0)")
    args = parser.parse_args(argv)
    named = ("replicas", "hosts", "routing", "flags", "num_cpus")
    try:
        settings = Settings(**{name: getattr(args, name) for name in named})
        replica_config(settings.flags, settings.hosts)
    except ValidationError as error:
        first = error.errors()[0]
        where, text = first["loc"], first["msg"].removeprefix("Value error, ")
        parser.error(f"--{where[0]}: {text}" if where else f"--{text}")  # or the text names them
    except ConfigError as error:
        parser.error(f"--{error}")
    if importlib.util.find_spec("ray") is None:
        print(_MISSING, file=sys.stderr)
        return 1
    try:
        return _serve(settings, args.http_port, args.grpc_port)
    except NotReady as error:
        print(f"jaxserve.deploy.local.demo: {error}", file=sys.stderr)
        return 1


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:6]) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, got {text!r:.40}")
    return int(text)


def _serve(settings: Settings, http_port: int, grpc_port: int) -> int:
    began = time.monotonic()
    cpus = max(1, round(settings.num_cpus * settings.hosts * settings.replicas))
    with local_cluster(cpus=cpus, http_port=http_port, grpc_port=grpc_port) as cluster:
        over = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: over.set())
        cluster.deploy(settings)
        print(ready_text(cluster, settings, time.monotonic() - began), flush=True)
        while not over.wait(0.5):
            pass  # signals caught by other threads are handled in the next iteration
        print("stopping", file=sys.stderr)
    return 0


def ready_text(cluster: Cluster, settings: Settings, seconds: float) -> str:
    """The text to print once the deployment takes calls."""
    hosts = f" of {settings.hosts} hosts" if settings.hosts > 1 else ""
    prompt = '{"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}'
    return "\n".join(
        (
            f"jaxserve is ready after {seconds:.1f} s",
            f"  replicas {settings.replicas}{hosts}, chosen by {settings.routing}",
            f"  address  {cluster.grpc}",
            f"  http     {cluster.http}",
            "Try it in a second terminal:",
            f'  {jaxserve_command()} complete --address={cluster.grpc} "Once upon a time"',
            f"  curl {cluster.http}/completions -H 'Content-Type: application/json' -d '{prompt}'",
        )
    )


if __name__ == "__main__":
    run(main)
