"""The value of serving a request now: Apt-Serve's quantification model (section 4.2)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.parallel_arrays import ParallelArrays
from jaxserve.sched.policy import View

NEAR_ZERO = 1e-6  # share of its value that a late request keeps
STEPS_AHEAD = 64  # of a request, if too few outputs have ended
ENOUGH = 32  # ended outputs


class Penalty(enum.Enum):
    """For how many steps a hidden cache is charged the delay that it causes, n rho t."""

    STEP = "one, as Eq. 5 has it for kinds of cache that are decided on anew in every step"
    REDECIDE = "one, and kinds are decided on anew: who changes its own computes its cache again"
    REMAINING = "those that the request is expected to take yet, for which it keeps its kind"
    AUTO = "REMAINING where reads project, STEP where they absorb"

    def lasts(self, view: View) -> bool:
        """Whether a hidden cache is charged for all steps ahead."""
        return self is Penalty.REMAINING or (self is Penalty.AUTO and view.projects)


@dataclass(frozen=True)
class Value(ParallelArrays):
    """The value of serving rows now: arrays [n].

    Attributes:
        pending: Seconds without a token.
        value: As in `Offers`.
        penalty: As in `Offers`.
        late: bool, whether the row has missed its target.
        tokens: Cached tokens after the row's next step.
    """

    pending: np.ndarray
    value: np.ndarray
    penalty: np.ndarray | None
    late: np.ndarray
    tokens: np.ndarray


class Weighed:
    """Rows whose values are computed on demand: in most steps all running requests fit, or no
    waiting one does, and values are not needed.

    Args:
        rows: Table rows [n].
        tokens: int64 [n], as in `Value`.
        weigh: Computes the values of rows.
    """

    def __init__(
        self, rows: np.ndarray, tokens: np.ndarray, weigh: Callable[[np.ndarray], Value]
    ) -> None:
        self.rows, self.tokens, self._weigh = rows, tokens, weigh

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def values(self) -> Value:
        """See `weigh`."""
        return self._weigh(self.rows)

    def of_chosen(self, chosen: np.ndarray | slice) -> Weighed:
        """The rows selected by a mask, indices or a slice."""
        return Weighed(self.rows[chosen], self.tokens[chosen], self._weigh)


def steps_ahead(view: View, rows: np.ndarray) -> np.ndarray:
    """Steps that each request is expected to take, float64 [n]: as many as earlier outputs of its
    length took, or STEPS_AHEAD if too few have ended."""
    table, lengths = view.table, view.table.output_lengths
    generated = table.generated[rows]
    ahead = np.full(len(rows), float(STEPS_AHEAD))
    if lengths.count >= ENOUGH:
        known = lengths.expected(generated) - generated
        ahead = np.where(known > 1, known, ahead)
    return np.minimum(ahead, table.max_tokens[rows] - generated)


def weigh(
    view: View,
    rows: np.ndarray,
    *,
    clock: float,
    step: float,
    delay: float | None,
    decay: float,
    lasting: bool = False,
) -> Value:
    """The value of serving each row now: Eq. 5 and 6, with the fallback for late requests.

    A request is late if it has waited for its next token for longer than its target. Earlier late
    tokens are not in the table, so a request that has caught up counts as in time again.
    Best-effort requests without targets count as late beside others; the paper has no such
    requests.

    Args:
        view: What the policy sees.
        rows: Table rows [n].
        clock: Seconds, when the planned step starts.
        step: The least value of a request, see `decode_time`.
        delay: Seconds by which one token in a hidden cache delays all requests together, n rho;
        None without hidden caches.
        decay: Share of its value that a late request keeps; 0 stands for next to nothing.
        lasting: Whether a hidden cache is charged for all expected steps of its request, instead of
        one.
    """
    table = view.table
    pending = pending_time(view, rows, clock)
    late = np.zeros(len(rows), bool)
    if table.num_timed:
        first = table.received[rows] == 0
        late = pending > np.where(first, table.ttft[rows], table.tbt[rows])
    bare = table.bare(rows)
    if not bare.all():
        late |= bare
    tokens = known(view, rows)
    value, penalty = np.maximum(pending, step), None
    if delay is not None:
        penalty = delay * tokens
        if lasting:
            ahead = steps_ahead(view, rows)
            penalty = delay * ahead * (tokens + ahead / 2)
    if np.count_nonzero(late):
        value[late] *= decay or NEAR_ZERO
        if penalty is not None:
            # Next to nothing does not outweigh the delay of others; with a decay, both shrink.
            shrinks = late if decay else late & (penalty < 0)
            penalty = np.where(shrinks, penalty * (decay or NEAR_ZERO), penalty)
    return Value(pending, value, penalty, late, tokens)


def known(view: View, rows: np.ndarray) -> np.ndarray:
    """Tokens of each request, all of which are cached after its next step, int64 [n]."""
    return np.asarray(view.table.prompt_len[rows] + view.table.generated[rows])


def pending_time(view: View, rows: np.ndarray, clock: float) -> np.ndarray:
    """Seconds that each request will have been without a token at `clock`, float64 [n]. Before the
    first token they count from the arrival. A token in flight counts as received."""
    table = view.table
    pending = np.maximum(clock - table.last_token[rows], 0.0)
    pending[table.generated[rows] > table.received[rows]] = 0.0
    return pending


def decode_time(view: View, running: np.ndarray) -> float:
    """Seconds of a step in which all running requests decode, or of one with an empty cache if none
    runs. It is the least value of a request: even one that has just received a token waits that
    long for the next."""
    contexts = view.table.computed[running] if len(running) else np.zeros(1, np.int64)
    ones = np.ones_like(contexts)
    batch = BatchFeatures.from_rows(ones, contexts, ones > 0, padding=view.padding)
    return float(view.step_time(batch))


def in_flight(view: View, running: np.ndarray) -> float:
    """Seconds of the step on the device if it is one of prefills that other requests wait for; else
    0. Token times in the table do not include it yet."""
    table = view.table
    flying = running[table.generated[running] > table.received[running]]
    if len(flying) == len(running):
        return 0.0
    if not np.count_nonzero(table.generated[flying] == 1):
        return 0.0
    counts = table.computed[flying]
    nothing = np.zeros_like(counts)
    features = BatchFeatures.from_rows(counts, nothing, nothing > 0)
    return float(view.step_time(features))


class Moment:
    """What the values of one plan are based on, computed on demand.

    Args:
        view: What the policy sees.
        now: Seconds.
        running: Running rows.
        looks_ahead: Whether to count the step on the device, see `in_flight`.
        delay: See `weigh`.
        decay: Share of its value that a late request keeps.
        lasting: Whether hidden caches are charged for all steps ahead.
    """

    def __init__(
        self,
        view: View,
        now: float,
        running: np.ndarray,
        *,
        looks_ahead: bool,
        delay: float | None,
        decay: float,
        lasting: bool,
    ) -> None:
        self._view, self._now, self._running = view, now, running
        self._looks_ahead = looks_ahead
        self._delay, self._decay, self._lasting = delay, decay, lasting

    @cached_property
    def clock(self) -> float:
        """When the planned step starts, seconds."""
        ahead = in_flight(self._view, self._running) if self._looks_ahead else 0.0
        return self._now + ahead

    @cached_property
    def step(self) -> float:
        """See `decode_time`."""
        return decode_time(self._view, self._running)

    def pending(self, rows: np.ndarray) -> np.ndarray:
        """See `pending_time`."""
        return pending_time(self._view, rows, self.clock)

    def weigh(self, rows: np.ndarray) -> Value:
        """See `weigh`."""
        return weigh(
            self._view,
            rows,
            clock=self.clock,
            step=self.step,
            delay=self._delay,
            decay=self._decay,
            lasting=self._lasting,
        )
