"""A separate server process for badly behaved clients; flags as for serve.py."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.bench.load_target import BenchError
from jaxserve.server.access.options import KEYS_VARIABLE

WRITE_TIMEOUT_S = 3.0  # so that slow readers are ended soon


@dataclass(frozen=True)
class Victim:
    """A running server process.

    Attributes:
        process: Its handle.
        address: Address of gRPC.
        http_address: Address of HTTP.
        log: File with its stderr.
        key: One of its API keys, or None.
    """

    process: subprocess.Popen[str]
    address: str
    http_address: str
    log: Path
    key: str | None = None

    def memory_mib(self) -> float:
        """Resident memory, MiB."""
        pages = int((self._proc / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def threads(self) -> int:
        """Number of its threads."""
        return len(os.listdir(self._proc / "task"))

    def handles(self) -> list[str]:
        """Its open files: paths, and sockets and pipes by kind, sorted."""
        names = []
        for entry in (self._proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                names.append(os.readlink(entry).partition(":[")[0])
        return sorted(names)

    def lines(self) -> int:
        """Number of lines logged so far."""
        return len(self.log.read_text(encoding="utf-8").splitlines())

    @property
    def _proc(self) -> Path:
        return Path(f"/proc/{self.process.pid}")


@contextlib.contextmanager
def victim(
    *flags: str,
    batches: bool = False,
    keys: str = "",
    key: str | None = None,
    open_files: int = 0,
) -> Iterator[Victim]:
    """Starts a server, waits until it is ready, and kills it at the end.

    Args:
        flags: Flags of serve.py.
        batches: Whether it takes batches.
        keys: Its API keys, as in the environment variable.
        key: One of them, for the clients.
        open_files: Its limit on open files; 0 for this process's.

    Raises:
        BenchError: It does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        fields = (
            f"server.write_timeout_s={WRITE_TIMEOUT_S}",
            f"server.batch_dir={Path(folder) / 'batches' if batches else ''}",
        )
        command = [sys.executable, "-m", "jaxserve_lab.bench.stress.faulty_server"]
        command += [*flags, *(f"--config.{field}" for field in fields)]  # behind --config
        with (
            log.open("w") as stderr,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, KEYS_VARIABLE: keys},
            ) as process,
        ):
            try:
                if open_files:  # the server reads the limit after building its engine
                    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_files, open_files))
                assert process.stdout is not None
                addresses = process.stdout.readline().split()
                if not addresses:
                    last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
                    raise BenchError(f"the server did not start: {' '.join(last)}")
                address, http_address = addresses
                yield Victim(process, address, http_address, log, key)
            finally:
                process.kill()
