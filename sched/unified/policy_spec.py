"""Keys, by which unified policies order requests, and the columns that keys may use.

A key is a function of one argument whose attributes are columns, `Columns` here. It applies
operators, NumPy's functions and `where` to them, without `if` and indices, so that the compiled
simulation can run the same function with numba on the numbers of one request. nan (0 / 0, inf -
inf) counts as inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.state.request_table import RUNNING

# From columns, of several requests or of one, to numbers: the smallest is the most urgent.
Key = Callable[[Any], Any]


def where(condition: Any, then: Any, otherwise: Any) -> Any:
    """`numpy.where`, for keys."""
    return np.where(condition, then, otherwise)


@dataclass(frozen=True)
class Lapse:
    """When a key expires. The key is the time at which something is due; once that cannot be met,
    the request is ranked by a later time: a lapse only moves a request back. Both fields are
    functions of the columns that a key may use, and must not depend on the clock.

    Attributes:
        lead: Least seconds that the request needs. The key expires this long before the due time.
        later: The time that replaces an expired key, if it is later than the key.
    """

    lead: Key
    later: Key


@dataclass(frozen=True)
class CompiledSpec:
    """Properties of a unified policy beyond its fields, for compiled simulations.

    Attributes:
        key: Replaces the policy's key.
        given: float64 by the requests' numbers in the workload, the column of that name; None for
        zeros.
        expects: Whether a request starts only if there is room for its expected peak, once `enough`
        outputs have ended.
        promises: Whether it also leaves room for the expected growth of running requests.
        lapse: Lapse of the key, if any.
    """

    key: Key | None
    given: np.ndarray | None = None
    expects: bool = False
    promises: bool = False
    enough: int = 0
    lapse: Lapse | None = None


# As in the table, by name.
FLOATS = ("arrival", "last_token", "ttft", "tbt", "jct", "alone")
INTEGERS = ("seq", "prompt_len", "generated", "computed", "tier")
# Also as in the table. A policy whose key uses these says how it is compiled (`compiled_spec`),
# where no request is of a program, or that it is not.
OF_PROGRAMS = ("program_start", "attained")
_COLUMNS = {
    **dict.fromkeys((*FLOATS, *OF_PROGRAMS), np.float64),
    **dict.fromkeys(INTEGERS, np.int64),
}


class Columns:
    """What a key may use of the requests in `rows`: arrays [n].

    Args:
        view: What the policy sees.
        rows: Table rows, int64 [n].
        given: See below.

    Attributes:
        arrival, last_token, ttft, tbt, jct, alone: From `RequestTable`, in seconds. alone is the
        time to the first token on an idle engine, and each target is at least that reachable.
        program_start, attained: From `RequestTable`, of the request's program.
        seq: The order of arrival.
        prompt_len, generated, computed: Tokens.
        tier: A `Tier`.
        most_output: Most tokens that it may write, see `View.most_output`.
        waiting, decoding: bool, its phase; if neither, it is in the middle of a prefill.
        given: Numbers for a policy that knows the workload, float64 [n]; else 0.
        seed: The view's, the same for all.
    """

    def __init__(self, view: View, rows: np.ndarray, given: np.ndarray | float) -> None:
        self._view, self._rows, self.given = view, rows, given

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in _COLUMNS:
            raise AttributeError(_unknown(name))
        column = getattr(self._view.table, name)[self._rows]
        # A tier has a small type in the table, where it is not used in arithmetic.
        column = np.asarray(column, _COLUMNS[name])
        setattr(self, name, column)
        return column

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self._view.policy_seed()

    @cached_property
    def most_output(self) -> np.ndarray:
        """int64 [n]."""
        return self._view.most_output(self._rows)

    @cached_property
    def outlook(self) -> np.ndarray:
        """int64 [n], `Outlook`. For `Policy.queue_priority`; keys that order plans have no such
        column."""
        return np.asarray(self._view.table.outlook[self._rows], np.int64)

    @cached_property
    def bare(self) -> np.ndarray:
        """bool [n], `RequestTable.bare`. For `Policy.makes_room` only, like `outlook`."""
        return self._view.table.bare(self._rows)

    @cached_property
    def waiting(self) -> np.ndarray:
        """bool [n]."""
        return np.asarray(self._view.table.state[self._rows] != RUNNING)  # or held back

    @cached_property
    def decoding(self) -> np.ndarray:
        """bool [n]."""
        return self._view.table.decoding(self._rows)


def knows_the_seed(key: Key) -> bool:
    """Whether the key reads the seed. Mistakes in a key, such as `if` or an unknown column, raise
    here like at its evaluation, even if numba would accept them."""
    asked = _Asked()
    with np.errstate(all="ignore"):
        key(asked)
    return asked.seed_read


class _Asked:
    """Columns of two imaginary requests."""

    seed_read = False
    most_output = np.ones(2, np.int64)
    given = np.ones(2)
    waiting = decoding = np.ones(2, bool)

    @property
    def seed(self) -> int:
        """See `Columns`; the access is noted."""
        self.seed_read = True
        return 1

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in FLOATS and name not in INTEGERS:
            raise AttributeError(_unknown(name))
        return np.ones(2, np.float64 if name in FLOATS else np.int64)


def _unknown(name: str) -> str:
    return f"a key knows no column {name!r} of requests"


def evaluate(key: Key, view: View, rows: np.ndarray, given: np.ndarray | float = 0.0) -> np.ndarray:
    """Evaluates a key.

    Args:
        key: The key.
        view: What the policy sees.
        rows: Table rows, int64 [n].
        given: See `Columns`.

    Returns:
        float64 [n]; inf in place of nan.
    """
    return np.broadcast_to(_number(key, Columns(view, rows, given)), rows.shape)


def current(key: Key, lapse: Lapse | None, requests: Any, now: float) -> Any:
    """The value of a key that may have lapsed.

    Args:
        key: The key.
        lapse: When the key expires; None for never.
        requests: `Columns`, or another object with its attributes.
        now: Seconds.

    Returns:
        float64 [n], or a number for one request.
    """
    due = _number(key, requests)
    if lapse is None:
        return due
    lapsed = now > due - _number(lapse.lead, requests)
    return np.where(lapsed, np.maximum(due, _number(lapse.later, requests)), due)


def _number(key: Key, requests: Any) -> np.ndarray:
    return np.asarray(np.fmin(np.asarray(key(requests), np.float64), np.inf))  # nan: inf
