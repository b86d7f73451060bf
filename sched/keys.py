"""What a key, by which a unified policy orders requests, may know of them.

A key is a function of one argument whose attributes are columns, `Columns` here. It uses
operators, NumPy's functions and `where` on them, no `if` and no indices, so that where numba is the
compiled simulation runs the very same function on the numbers of one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.table import WAITING

# Columns, of some requests or of one, to a number each: the smallest is the most urgent.
Key = Callable[[Any], Any]


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """`numpy.where`, for keys."""
    return np.where(condition, then, otherwise)


@dataclass(frozen=True)
class Form:
    """What a unified policy does beside what its fields say, for a simulation that has the
    algorithm compiled.

    key: instead of the policy's own. expects: starts find room for all that they are expected to
    end with, once `enough` outputs have ended. promises: and for what those that run are expected
    to take yet.
    """

    key: Key | None
    expects: bool = False
    promises: bool = False
    enough: int = 0


# As they are in the table, by name.
FLOATS = ("arrival", "last_token", "ttft", "tbt", "jct")
INTEGERS = ("seq", "prompt_len", "generated", "computed", "tier")


class Columns:
    """Of the requests in `rows` [n], arrays [n].

    Of `RequestTable`: arrival, last_token, ttft, tbt, jct, seconds; seq, the order of arrival;
    prompt_len, generated, computed, tokens; tier. most_output: tokens that it may write at most,
    see `View.most_output`. waiting, decoding: bool, its phase; neither is a prefill. seed: the
    view's, the same for all.
    """

    def __init__(self, view: View, rows: np.ndarray) -> None:
        self._view, self._rows = view, rows

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in FLOATS and name not in INTEGERS:
            raise AttributeError(f"a key knows no column {name!r} of requests")
        column = getattr(self._view.table, name)[self._rows]
        setattr(self, name, column)
        return np.asarray(column)

    @property
    def seed(self) -> int:
        """Of the run."""
        return self._view.seed

    @cached_property
    def most_output(self) -> np.ndarray:
        """int64 [n]."""
        return self._view.most_output(self._rows)

    @cached_property
    def waiting(self) -> np.ndarray:
        """bool [n]."""
        return np.asarray(self._view.table.state[self._rows] == WAITING)

    @cached_property
    def decoding(self) -> np.ndarray:
        """bool [n]."""
        return self._view.table.decoding(self._rows)


def knows_the_seed(key: Key) -> bool:
    """Whether the key looks at the seed."""
    asked = _Asked()
    key(asked)
    return "seed" in asked.names


class _Asked:
    """Notes which columns a key looks at."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return 1 if name == "seed" else np.ones(1, np.int64)


def evaluate(key: Key, view: View, rows: np.ndarray) -> np.ndarray:
    """The key of each row, float64 [n]."""
    return np.broadcast_to(np.asarray(key(Columns(view, rows)), np.float64), rows.shape)
