"""Runs in parallel, under one progress bar."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tqdm import tqdm

from jaxserve.simulator.dispatch import COMPILING
from jaxserve.simulator.simulate.runs import Outcome, Run

_FEW = 500  # requests; starting a process takes longer
REFRESH_S = 0.2  # interval at which progress is shown
BAR = "{percentage:3.0f}%|{bar}| {n:.1f}/{total:.0f} runs [{elapsed}<{remaining}]"

T = TypeVar("T")
Work = Callable[[Run, Callable[[float], None] | None, Callable[[], None] | None], T]
"""The work on a run; the other arguments are those of `Run.outcome`."""


class WorkerDied(OSError):
    """A process has died; its run may need more memory than the machine has."""


class Workers:
    """Runs simulations on up to `jobs` processes, or in this one if there is too little work to
    share.

    Use it in a `with`: leaving it ends the processes, even those still working.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._others = set(multiprocessing.active_children())
        self._context = multiprocessing.get_context("spawn")
        self._done = self._context.Value("d", 0.0)  # runs, summed over all processes
        self._compiling = self._context.Event()  # set by one of them; cleared once shown
        self._bar: tqdm | None = None

    def outcomes(self, runs: Sequence[Run]) -> list[Outcome]:
        """The outcomes of the runs, in order. Stops at the first run that raises one of
        `runs.REFUSED`."""
        return self.each(_outcome, runs)

    def each(self, work: Work[T], runs: Sequence[Run]) -> list[T]:
        """The result of the work on each run, in order. Stops if the work raises. work: must be
        picklable."""
        bar = self._longer_bar(len(runs))
        alone = self._jobs == 1 or len(runs) < 2 or sum(run.requests for run in runs) <= _FEW
        if self._pool is None and alone:
            return [work(run, lambda share: _show(bar, bar.n + share), _say) for run in runs]
        if self._pool is None:
            shared = (self._done, self._compiling)
            self._pool = ProcessPoolExecutor(self._jobs, self._context, _begin, shared)
        try:
            futures: list[Future[T]] = [self._pool.submit(_in_process, work, run) for run in runs]
            left: set[Future[T]] = set(futures)
            before = bar.n - self._done.value
            while left:
                done, left = wait(left, REFRESH_S, FIRST_EXCEPTION)
                if self._compiling.is_set():
                    self._compiling.clear()
                    _say()
                for future in done:
                    future.result()
                _show(bar, before + self._done.value)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise WorkerDied("a process of --jobs died; is there memory enough?") from error

    def _longer_bar(self, more: int) -> tqdm:
        if self._bar is None:
            quiet = not sys.stderr.isatty()
            self._bar = tqdm(total=more, bar_format=BAR, disable=quiet, leave=False)
        else:
            self._bar.total += more
        return self._bar

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._pool is None:
            return
        self._pool.shutdown(wait=error is None, cancel_futures=True)
        if error is not None:
            for child in set(multiprocessing.active_children()) - self._others:
                child.terminate()


def _show(bar: tqdm, done: float) -> None:
    """done: number of runs; rounding may make it slightly too large."""
    bar.update(min(done, bar.total) - bar.n)


def _say() -> None:
    tqdm.write(COMPILING, file=sys.stderr)


_progress: Callable[[float], None] | None = None
_compiling: Callable[[], None] | None = None


def _begin(done: Any, compiling: Any) -> None:
    """Sets a new process up. done: a shared number of runs; compiling: a shared event."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is handled by the waiting process

    def progress(share: float) -> None:
        with done.get_lock():
            done.value += share

    global _progress, _compiling
    _progress, _compiling = progress, compiling.set


def _in_process(work: Work[T], run: Run) -> T:
    return work(run, _progress, _compiling)


def _outcome(
    run: Run, progress: Callable[[float], None] | None, compiling: Callable[[], None] | None
) -> Outcome:
    return run.outcome(progress, compiling)
