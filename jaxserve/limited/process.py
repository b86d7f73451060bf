"""A process for work that may take too much. It answers questions, JSON, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.hosts.channel import receive_exactly
from jaxserve.limited.limits import LENGTH, MAX_ANSWER

_END_S = 2.0
# What Python and strftime need. The server's keys and tokens are not for what others have written.
_VARIABLES = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "TZ")


class ProcessEnded(Exception):
    """The process has ended without an answer.

    Attributes:
        code: its exit code; negative for a signal.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"its process has ended with {code}")
        self.code = code


class LimitedProcess:
    """Starts the process. It reads questions from its standard input, a socket that it answers on,
    and sets its own limits (`limits.py`). One thread asks; any may `kill`.

    Args:
        module: what it runs.

    Attributes:
        process: it.

    Raises:
        OSError: there can be no process.
    """

    def __init__(self, module: str) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C is for the server
                )
            except BaseException:
                self._connection.close()
                raise

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self.process.poll() is not None

    def ask(self, question: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
        """The answer.

        Args:
            question: as the process understands it.
            wall_s: seconds for it, whatever else runs on the machine.

        Raises:
            TimeoutError: there was none in time. The process is gone.
            ProcessEnded: it is gone for another reason.
        """
        asked = json.dumps(question, ensure_ascii=False).encode()
        try:
            return self._exchange(asked, time.monotonic() + wall_s)
        except TimeoutError:
            self.kill()
            self.end()
            raise
        except (OSError, EOFError):
            raise ProcessEnded(self.end()) from None

    def kill(self) -> None:
        """Ends it and its children, whatever they do. Idempotent."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """The exit code of a process that has ended, or ends when nobody asks any more."""
        self._connection.close()
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def _exchange(self, question: bytes, deadline: float) -> dict[str, Any]:
        connection = self._connection
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.sendall(LENGTH.pack(len(question)) + question)
        (length,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size, deadline))
        if length > MAX_ANSWER:
            raise EOFError
        answer: dict[str, Any] = json.loads(receive_exactly(connection, length, deadline))
        return answer


def _environment() -> dict[str, str]:
    own = str(Path(jaxserve.__file__).resolve().parents[1])
    paths = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}
