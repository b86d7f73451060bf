"""Groups of real processes, one a host, each with virtual devices of its own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxserve.client import Client
from jaxserve.deploy.local.cluster import free_port
from tests.compiling import virtual_devices
from tests.server.processes import ROOT, serve_command

PATIENCE = 240  # seconds until a test gives up on a process
SIZES = (
    "--config.cache.block_size=4",
    "--config.scheduler.max_rows=8",
    "--config.scheduler.max_batch_tokens=64",
    "--config.scheduler.max_prefill_tokens=64",
    "--config.engine.max_model_len=64",
    "--config.engine.row_buckets=(8,)",
    "--config.engine.token_buckets=(64,)",
    "--config.engine.compilation_cache_dir=",
    "--config.engine.forbid_compile=true",
)


@dataclass(frozen=True)
class Hosts:
    """The processes by index, the leader first; where it listens; what each has logged."""

    processes: list[subprocess.Popen[str]]
    address: str
    metrics: str
    logs: list[Path]

    @property
    def leader(self) -> subprocess.Popen[str]:
        return self.processes[0]

    def client(self) -> Client:
        return Client(self.address)

    def codes(self) -> list[int]:
        """How each of them has ended, or will."""
        return [process.wait(PATIENCE) for process in self.processes]

    def logged(self, index: int) -> str:
        return self.logs[index].read_text()


def host_command(count: int, port: int, index: int, *flags: str) -> list[str]:
    return serve_command(
        *SIZES,
        f"--config.mesh.hosts={count}",
        f"--config.mesh.coordinator=localhost:{port}",
        f"--config.mesh.host_index={index}",
        f"--config.mesh.hosts_wait_s={PATIENCE}",
        *flags,
    )


@contextmanager
def hosts(folder: Path, count: int, devices: int, *flags: str) -> Iterator[Hosts]:
    """A group that is ready. Killed at the end."""
    port, logs = free_port(), [folder / f"host{index}.log" for index in range(count)]
    environment = {
        **os.environ,
        "XLA_FLAGS": virtual_devices(devices),
    }
    processes = []
    try:
        for index, log in enumerate(logs):
            command = host_command(
                count, port, index, f"--config.mesh.tensor={count * devices}", *flags
            )
            with log.open("w") as stderr:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdout=stderr if index else subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                    )
                )
        printed = _until_ready(processes[0], logs)
        address, metrics = (
            re.search(pattern, printed) for pattern in (r"address +(\S+)", r"metrics +(\S+)")
        )
        assert address is not None and metrics is not None, printed
        yield Hosts(processes, address[1], metrics[1], logs)
    finally:
        for process in processes:
            process.kill()
            process.wait(PATIENCE)


def _until_ready(leader: subprocess.Popen[str], logs: list[Path]) -> str:
    assert leader.stdout is not None
    printed = ""
    while " complete " not in printed:
        line = leader.stdout.readline()
        assert line, "\n".join(log.read_text()[-3000:] for log in logs)
        printed += line
    return printed
