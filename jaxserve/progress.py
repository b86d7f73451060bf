"""Progress of long work: a bar on a terminal; elsewhere a line every ten seconds, in the log or,
where no log is set up, as in a notebook, on stderr."""

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
    """How progress is shown."""

    NOTHING, BAR, LINES = range(3)

    @classmethod
    def where_wanted(cls, wanted: bool, *, lines: bool = False) -> Show:
        """NOTHING if it is not wanted; BAR if stderr is a terminal, unless `lines` is set; else
        LINES."""
        if not wanted:
            return cls.NOTHING
        terminal = sys.stderr is not None and sys.stderr.isatty()
        return cls.BAR if terminal and not lines else cls.LINES


class Shown(Protocol):
    """Progress that is being shown, by tqdm or by `Lines`."""

    def update(self, n: int, /) -> Any:
        """Adds n units of finished work."""

    def set_postfix_str(self, s: str, /) -> Any:
        """Says what else is done, of which nobody knows how much there is."""

    def __iter__(self) -> Iterator[Any]: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


def shown(
    show: Show, desc: str, unit: str, *, work: Iterable[Any] | None = None, total: int | None = None
) -> Shown:
    """Shows the progress of work.

    Args:
        show: how.
        desc: what is being done.
        unit: of the work, in the singular; B for bytes.
        work: pieces of work; iterate over the result.
        total: number of units, if there are no pieces to iterate over; use the result as a context
            and `update` it.
    """
    if show is Show.LINES:
        return Lines(desc, unit, list(work or ()), total)
    quiet = show is Show.NOTHING
    return tqdm(work, desc=desc, total=total, unit=unit, unit_scale=unit == "B", disable=quiet)


class Lines:
    """Shows progress as tqdm does, but as lines, from a thread of its own: a single piece of work
    may take longer than EVERY_S.

    Args:
        desc: what is being done.
        unit: of the work, in the singular; B for bytes.
        work: pieces of work to iterate over.
        total: number of units; None for the number of pieces.
    """

    def __init__(self, desc: str, unit: str, work: list[Any], total: int | None) -> None:
        self._desc, self._unit, self._work = desc, unit, work
        self._total = len(work) if total is None else total
        self._done, self._began, self._beside = 0, 0.0, ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="jaxserve-progress", daemon=True)

    def update(self, n: int) -> None:
        """Adds n units of finished work."""
        self._done += n

    def set_postfix_str(self, text: str) -> None:
        """Says what else is done, behind the amount."""
        self._beside = f", {text}"

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
            text = f"{self._desc}: {self._amount()}{self._beside} after {seconds:.0f} s"
            if log.isEnabledFor(logging.INFO):
                log.info("%s", text)
            elif sys.stderr is not None:
                print(text, file=sys.stderr, flush=True)

    def _amount(self) -> str:
        if self._unit == "B":
            return f"{self._done / 2**20:,.0f} of {self._total / 2**20:,.0f} MiB"
        return f"{self._done:,} of {self._total:,} {self._unit}s"
