"""Work done by several processes beside each other."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

C = TypeVar("C")
N = TypeVar("N")


def worked(todo: Iterable[C], jobs: int, work: Callable[[C], N]) -> Iterator[tuple[C, N]]:
    """Does the work on several processes, and yields each case with its result as they end; in this
    process if jobs is 1.

    When it is left early, by ^C or an error in a case, the processes end at once. ValueError if one
    dies.
    """
    if jobs == 1:
        yield from ((case, work(case)) for case in todo)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, initializer=_begin)
    try:
        futures = {pool.submit(work, case): case for case in todo}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise ValueError("a process of --jobs died; is there memory enough?") from error
    except BaseException:  # GeneratorExit, too
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    pool.shutdown()


def _begin() -> None:
    """Runs first in each process: ^C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
