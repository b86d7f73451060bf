"""Counts compilations, so that none after the warm-up goes unnoticed."""

from __future__ import annotations

import threading
from collections import Counter

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_by_thread: Counter[int] = Counter()
_listening = threading.Lock()


class CompiledAfterWarmup(RuntimeError):
    """A step compiled while serving, in forbid-compile mode: some shape escaped the warm-up."""


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _EVENT:
        _by_thread[threading.get_ident()] += 1


class CompileCounter:
    """Counts compilations on the calling thread since `start`. JAX compiles on the thread that
    calls, so engines in one process do not count each other's."""

    def __init__(self) -> None:
        # Listeners cannot be removed one by one, so there is one for the process.
        if _listening.acquire(blocking=False):
            jax.monitoring.register_event_duration_secs_listener(_on_event)
        self._thread: int | None = None
        self._base = 0

    def start(self) -> None:
        """Starts counting, on this thread."""
        self._thread = threading.get_ident()
        self._base = _by_thread[self._thread]

    @property
    def count(self) -> int:
        """Compilations on the thread that called `start`, since then; 0 before."""
        return 0 if self._thread is None else _by_thread[self._thread] - self._base
