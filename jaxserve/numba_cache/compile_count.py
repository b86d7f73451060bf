"""How many functions numba has compiled, while it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from numba.core import event


class _Counter(event.Listener):
    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell, self._count = tell, 0

    def on_start(self, event: event.Event) -> None:
        pass

    def on_end(self, event: event.Event) -> None:
        self._count += 1  # numba compiles one at a time
        self._tell(self._count)


@contextlib.contextmanager
def counted(tell: Callable[[int], object]) -> Iterator[None]:
    """Tells with each function that numba compiles in this context, on any thread, how many it has
    been. What it finds on disk is none."""
    with event.install_listener("numba:compile", _Counter(tell)):
        yield
