"""Cuts the network between two nodes under streams, which go on at the node that is left.

    sudo env "PATH=$PATH" python -m jaxserve_lab.experiments.scale_live.cut

Two Ray nodes on this machine, one of them in a network namespace (which needs root and `ip`), with
a replica each. A second after the first piece the namespace's only link goes down.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxserve.command_line import Parser, run
from jaxserve.deploy.local.cluster import SLOW, Cluster, environment, free_port, local_cluster
from jaxserve_lab.experiments.scale_live.live import settings
from jaxserve_lab.experiments.scale_live.streams import LONG_PROMPT, mixed

STREAMS, TOKENS, AFTER_S = 60, 192, 1.0
_HERE, _THERE, _SPACE, _LINK = "10.99.0.1", "10.99.0.2", "jaxserve-cut", "jaxserve0"
_INSIDE = ("ip", "netns", "exec", _SPACE)
_NODE = ("--num-cpus=1", "--object-store-memory=104857600")
_RAY = str(Path(sys.executable).with_name("ray"))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def _namespace() -> Iterator[None]:
    """A network namespace with one link to here."""
    _run("ip", "netns", "add", _SPACE)
    try:
        _run("ip", "link", "add", _LINK, "type", "veth", "peer", "name", "eth0", "netns", _SPACE)
        _run("ip", "addr", "add", f"{_HERE}/24", "dev", _LINK)
        _run(*_INSIDE, "ip", "addr", "add", f"{_THERE}/24", "dev", "eth0")
        _run("ip", "link", "set", _LINK, "up")
        for each in ("eth0", "lo"):
            _run(*_INSIDE, "ip", "link", "set", each, "up")
        yield
    finally:
        _run("ip", "netns", "delete", _SPACE)


@contextlib.contextmanager
def _two_nodes() -> Iterator[Cluster]:
    """One replica on each of two nodes, and the ingress on the one that is here."""
    port = free_port()
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with environment({**SLOW, **quiet}), _namespace():
        try:
            here = (f"--node-ip-address={_HERE}", f"--port={port}", "--include-dashboard=false")
            _run(_RAY, "start", "--head", *here, *_NODE)
            with local_cluster(address=f"{_HERE}:{port}") as cluster:
                one = settings(1, 0)
                cluster.deploy(one.model_copy(update={"num_cpus": 0.6}))
                there = (f"--node-ip-address={_THERE}", f"--address={_HERE}:{port}")
                _run(*_INSIDE, _RAY, "start", *there, *_NODE)
                cluster.scale(2)
                cluster.wait(lambda: cluster.replicas() == 2, "a replica on each node")
                yield cluster
                _run("ip", "link", "set", _LINK, "up")
        finally:
            _run(_RAY, "stop", "--force")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    name = "python -m jaxserve_lab.experiments.scale_live.cut"
    Parser(prog=name, description=__doc__).parse_args(argv)
    with _two_nodes() as cluster:

        async def ask(cut: threading.Timer | None = None) -> list[str]:
            then = (lambda: None) if cut is None else cut.start
            found = await mixed(
                cluster, STREAMS, TOKENS, int(cut is not None), then, prompt=LONG_PROMPT
            )
            if cut is not None:
                gap = max(each.gap for each in found)
                print(
                    f"{STREAMS} streams: {sum(not each.error for each in found)} whole, "
                    f"{sum(each.moved > 0 for each in found)} went on at the other node; "
                    f"gaps of at most {gap:.1f} s, first pieces after at most "
                    f"{max(each.ttft or 0.0 for each in found):.1f} s"
                )
            return [each.text for each in found]

        expected = asyncio.run(ask())
        down = threading.Timer(AFTER_S, _run, ("ip", "link", "set", _LINK, "down"))
        wrong = sum(
            one != other for one, other in zip(asyncio.run(ask(down)), expected, strict=True)
        )
        print(f"{wrong} with a text that is not the one")
    return int(wrong > 0)


if __name__ == "__main__":
    run(main)
