"""The other end of `template_worker.py`: starts it, asks it, starts another when it has died."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.requests.template_limits import CPU_S, LENGTH, MAX_TEXT, WALL_S

_MODULE = "jaxserve.server.requests.template_worker"
# What Python and strftime need. The server's keys and tokens are not for a template.
_VARIABLES = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "TZ")
_STOPPING = "the server is stopping"


class TemplateFailed(Exception):
    """The template was not compiled, or not rendered; one line says why."""


class TemplateProcess:
    """A process for one template, and the thread that asks it, one question after the other."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxserve-template")
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closing = threading.Lock()
        self._closed = False

    def compile(self) -> frozenset[str]:
        """The variables that the template looks up. Raises TemplateFailed."""
        return self._thread.submit(self._start).result()

    def render(self, variables: Mapping[str, Any]) -> Future[str]:
        """The text to come; who cancels it before its turn takes nobody's time. It raises
        InvalidRequest where the template fails, QueueFull where its turn has not come in WALL_S
        seconds, and EngineStopped once it is closed."""
        try:
            return self._thread.submit(self._render, variables, time.monotonic() + WALL_S)
        except RuntimeError:
            raise EngineStopped(_STOPPING) from None

    def close(self) -> None:
        """Ends the process, whatever it does. Idempotent."""
        with self._closing:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # On the thread.

    def _render(self, variables: Mapping[str, Any], latest: float) -> str:
        if time.monotonic() > latest:
            raise QueueFull(f"other chats took the chat template more than {WALL_S:g} s")
        try:
            if self._process is None:
                self._start()
            text: str = self._ask(variables)["text"]
        except TemplateFailed as error:
            if self._closed:
                raise EngineStopped(_STOPPING) from None
            raise InvalidRequest("messages", f"the model's chat template: {error}") from None
        return text

    def _start(self) -> frozenset[str]:
        ours, theirs = socket.socketpair()
        with theirs, self._closing:
            if self._closed:
                ours.close()
                raise TemplateFailed(_STOPPING)
            self._connection = ours
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the server
            )
        return frozenset(self._ask({"source": self._source})["reads"])

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises TemplateFailed; where none has come, the process is gone."""
        assert self._connection is not None and self._process is not None
        asked = json.dumps(question).encode()
        try:
            answer = _exchange(self._connection, asked, time.monotonic() + WALL_S)
        except TimeoutError:
            self._process.kill()
            self._end()
            raise TemplateFailed(f"has not ended after {WALL_S:g} s") from None
        except (OSError, EOFError):
            code = self._end()
            if code == -signal.SIGPROF:
                problem = f"takes more than {CPU_S:g} s of a processor"
            else:
                problem = f"its process has ended with {code}"
            raise TemplateFailed(problem) from None
        if answer["last"]:
            self._end()
        if "problem" in answer:
            raise TemplateFailed(answer["problem"])
        return answer

    def _end(self) -> int:
        """The exit code of a process that has ended, or is about to."""
        assert self._connection is not None and self._process is not None
        self._connection.close()
        try:
            code = self._process.wait(CPU_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._process = self._connection = None
        return code


def _exchange(connection: socket.socket, question: bytes, deadline: float) -> dict[str, Any]:
    """Raises TimeoutError, EOFError and OSError."""
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    connection.sendall(LENGTH.pack(len(question)) + question)
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size, deadline))
    if length > MAX_TEXT:
        raise EOFError
    answer: dict[str, Any] = json.loads(_receive(connection, length, deadline))
    return answer


def _receive(connection: socket.socket, size: int, deadline: float) -> bytearray:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError
        received += piece
    return received


def _environment() -> dict[str, str]:
    own = str(Path(jaxserve.__file__).resolve().parents[1])
    paths = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}
