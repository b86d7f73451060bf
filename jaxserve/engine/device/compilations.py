"""Compilations: counted on the engine's thread, where each stalls all requests, and made on a
thread of their own while a server serves.

A server is ready once any batch fits into some compiled step. The other sizes come one after the
other, each as soon as all of its programs are compiled. Until then a larger step has its batches,
and the scheduler's predictions are those of that step.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import jax

from jaxserve.engine.device.buckets import Buckets

log = logging.getLogger(__name__)

_NICE = 10  # of the thread that compiles: serving goes first
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


class Compiles(Protocol):
    """The part of `JaxExecutor` that compiles; see there."""

    stages: list[Buckets]
    buckets: Buckets

    def compile(self, buckets: Buckets) -> Iterator[None]:
        """See `JaxExecutor`."""
        ...


class StepCompiler:
    """Compiles an executor's `stages` on a thread of its own, one program at a time.

    If one cannot be compiled, that is logged, and the engine goes on with what it has.

    Args:
        executor: what compiles.

    Attributes:
        left: sizes of steps that are not compiled.
    """

    def __init__(self, executor: Compiles) -> None:
        self._executor = executor
        self.left = len(executor.stages)
        self._then: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def then(self, do: Callable[[], None]) -> None:
        """Has this called once the thread has compiled what it could."""
        self._then = do

    def start(self, ready: Callable[[Buckets], None]) -> None:
        """Starts the thread. ready: called on it with each stage, once that is compiled."""
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="jaxserve-compile", daemon=True
        )
        self._thread.start()

    def use(self, stage: Buckets) -> None:
        """Has the executor use a stage that is ready. On the thread that uses the executor."""
        self._executor.buckets = stage

    def stop(self) -> None:
        """Compiles nothing more, and waits for the program that is being compiled: XLA cannot be
        interrupted, nor survive the end of Python. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, ready: Callable[[Buckets], None]) -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        begin = time.monotonic()
        try:
            for stage in self._executor.stages:
                for _ in self._executor.compile(stage):
                    if self._stopped.is_set():
                        return
                self.left -= 1
                ready(stage)
            log.info("all sizes of steps are compiled, %.1f s later", time.monotonic() - begin)
        except Exception:
            log.exception(
                "steps of %d sizes cannot be compiled: larger ones serve their batches", self.left
            )
        finally:
            self._then()
