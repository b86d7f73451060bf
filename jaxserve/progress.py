"""How far long work is: a bar on a terminal, elsewhere a line in the log every ten seconds, or on
stderr where nobody has set up a log, as in a notebook."""

from __future__ import annotations

import enum
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from tqdm import tqdm

EVERY_S = 10.0  # between two lines

log = logging.getLogger(__name__)


class Show(enum.Enum):
    """Where it is shown how far the work is."""

    NOTHING, BAR, LINES = range(3)

    @classmethod
    def where_wanted(cls, wanted: bool, *, lines: bool = False) -> Show:
        """BAR where stderr is a terminal and no lines are asked for."""
        if not wanted:
            return cls.NOTHING
        terminal = sys.stderr is not None and sys.stderr.isatty()
        return cls.BAR if terminal and not lines else cls.LINES


class Shown(Protocol):
    """What is done so far: of tqdm, or of `Lines`."""

    def update(self, n: int, /) -> Any:
        """So much more is done."""
        ...

    def __iter__(self) -> Iterator[Any]: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


def shown(
    show: Show, desc: str, unit: str, *, work: Iterable[Any] | None = None, total: int | None = None
) -> Shown:
    """Work under a bar, or with lines.

    Args:
        show: how.
        desc: what is being done.
        unit: of the work, in the singular; B for bytes.
        work: what is done piece by piece: iterate over the result.
        total: units there are, where there is no work to iterate over: a context, to `update`.
    """
    if show is Show.LINES:
        return Lines(desc, unit, list(work or ()), total)
    quiet = show is Show.NOTHING
    return tqdm(work, desc=desc, total=total, unit=unit, unit_scale=unit == "B", disable=quiet)


class Lines:
    """As tqdm, but it logs, from a thread of its own: one piece may take longer than EVERY_S."""

    def __init__(self, desc: str, unit: str, work: list[Any], total: int | None) -> None:
        self._desc, self._unit, self._work = desc, unit, work
        self._total = len(work) if total is None else total
        self._done, self._began = 0, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="jaxserve-progress", daemon=True)

    def update(self, n: int) -> None:
        """So much more is done."""
        self._done += n

    def __iter__(self) -> Iterator[Any]:
        with self:
            for piece in self._work:
                yield piece
                self.update(1)

    def __enter__(self) -> Lines:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._over.wait(EVERY_S):
            seconds = time.monotonic() - self._began
            text = f"{self._desc}: {self._amount()} after {seconds:.0f} s"
            if log.isEnabledFor(logging.INFO):
                log.info("%s", text)
            elif sys.stderr is not None:
                print(text, file=sys.stderr, flush=True)

    def _amount(self) -> str:
        if self._unit == "B":
            return f"{self._done / 2**20:,.0f} of {self._total / 2**20:,.0f} MiB"
        return f"{self._done:,} of {self._total:,} {self._unit}s"
