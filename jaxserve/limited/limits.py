"""What a `LimitedProcess` does at its own end: its limits, and how it is talked to.

Both sides send frames: the length in bytes, then JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!Q")
MAX_ANSWER = 32 << 20
"""Bytes of an answer, which the server reads in one go: nothing else runs meanwhile."""


def read_question(connection: socket.socket) -> Any:
    """None at the end. Nothing is read beyond it."""
    head = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if not head:
        return None
    (length,) = LENGTH.unpack(head)
    question = bytearray()
    while len(question) < length:
        piece = connection.recv(length - len(question), socket.MSG_WAITALL)
        if not piece:
            return None
        question += piece
    return json.loads(question)


def frame(answer: Mapping[str, Any]) -> bytes:
    """An answer as it is sent."""
    written = json.dumps(answer, ensure_ascii=False).encode()
    return LENGTH.pack(len(written)) + written


def limit_memory(most: int) -> None:
    """Bytes of address space of this process from now on, for good. It writes no files either, and
    starts no other process."""
    for kind, wanted in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (limit, limit))


def limit_time(cpu_s: float) -> None:
    """Seconds of a processor from now on, beyond which the kernel ends this process with SIGPROF; 0
    takes the limit away."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def memory_pages() -> tuple[int, int]:
    """Bytes of memory that this process has now: of its address space, and resident; 0 where the
    system does not say."""
    try:
        space, resident = Path("/proc/self/statm").read_text().split()[:2]
    except OSError:
        return 0, 0
    return int(space) * resource.getpagesize(), int(resident) * resource.getpagesize()
