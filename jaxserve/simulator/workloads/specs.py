"""Workloads described by a few words, as in the commands."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from jaxserve.sched.request import NO_CLASS, SLO
from jaxserve.sched.slo.classes import NO_SLO, SloClass, draw_terms, with_targets
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns
from jaxserve.simulator.workloads import lengths
from jaxserve.simulator.workloads.closed_loop import ClosedLoop
from jaxserve.simulator.workloads.closed_sessions import CLOSED_SESSIONS, sample
from jaxserve.simulator.workloads.columns import NO_LIMIT
from jaxserve.simulator.workloads.guessable import KINDS, Chances, Guessable
from jaxserve.simulator.workloads.memory import check_memory
from jaxserve.simulator.workloads.prefixes import Prefixes
from jaxserve.simulator.workloads.programs import Programs
from jaxserve.simulator.workloads.sessions import SESSIONS, Starts
from jaxserve.simulator.workloads.traces import Trace, read_trace
from jaxserve.simulator.workloads.workload import (
    Lengths,
    Workload,
    WorkloadError,
    all_at_once,
    fixed_lengths,
    gamma_arrivals,
    on_off_arrivals,
    open_limit,
    poisson_arrivals,
)

ARRIVALS = ("all", "replay", "poisson", "gamma", "on_off")
DEFAULT_COUNT = 1000
MOST_PROGRAMS = 1 << 16  # in progress at a time
MaxTokens = int | Literal["length"] | None


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload as the commands describe it.

    Attributes:
        lengths: `fixed:IxOxB` (prompt tokens, output tokens, requests), a mix or data set of
            `lengths.names()`, one of SESSIONS or CLOSED_SESSIONS, or the path of a trace.
        num_requests: Number of requests, or of the first ones of a trace. None: 1,000, or the whole
            trace; with a rate and a duration a sampler draws as many as arrive within it. Closed
            sessions are drawn whole, so that there may be a few more.
        arrivals: `all` at once, `replay` as in the trace, `poisson`, `gamma` or `on_off`. None: the
            trace's own if it has any, else `poisson` with a rate and `all` without. For sessions,
            open or closed, `poisson`, `gamma` and `on_off` describe their starts.
        rate: Requests/s; replayed arrivals are stretched to it.
        cv: For `gamma`, see `gamma_arrivals`.
        on_s, off_s: For `on_off`, mean lengths of the periods in seconds.
        classes: SLO classes, drawn by their shares. Only for workloads without their own tiers,
        targets or classes.
        slo: Targets of requests without their own.
        max_tokens: Limit of requests without their own: a number; `length` for exactly the output
        length, as in load tests that ignore the end of sequence; None for `open_limit`.
        guessable: How well a drafter guesses the texts; None for the known value of `lengths`
        (`guessable.KINDS`), or no guesses.
        adapters: Share of the requests that have an adapter, and number of adapters; None for none.
        duration: Seconds; requests that arrive later are left out.
        best_effort: A closed loop beside these requests, for the duration; `make_workload` does not
            include it.
        programs: Programs in progress at a time, instead of a rate: another one begins when one has
            ended. For CLOSED_SESSIONS, and traces with programs.
        program_deadline: Seconds from the first arrival of each program without a deadline of its
            own to the end of its last call.

    Raises:
        WorkloadError: The fields do not fit together.
    """

    lengths: str
    num_requests: int | None = None
    arrivals: str | None = None
    rate: float | None = None
    cv: float | None = None
    on_s: float | None = None
    off_s: float | None = None
    classes: tuple[SloClass, ...] = ()
    slo: SLO = NO_SLO
    max_tokens: MaxTokens = None
    guessable: Chances | None = None
    adapters: tuple[float, int] | None = None
    duration: float | None = None
    best_effort: ClosedLoop | None = None
    programs: int | None = None
    program_deadline: float | None = None

    def __post_init__(self) -> None:
        kind, needs = self.arrivals, {"gamma": ("cv",), "on_off": ("on_s", "off_s")}
        if kind is not None and kind not in ARRIVALS:
            raise WorkloadError(f"arrivals must be one of {', '.join(ARRIVALS)}, got {kind!r}")
        for owner, names in needs.items():
            for name in names:
                given = getattr(self, name) is not None
                if given != (kind == owner):
                    raise WorkloadError(f"arrivals={owner} needs {name}, and only that does")
        if kind in ("poisson", "gamma", "on_off") and self.rate is None:
            raise WorkloadError(f"arrivals={kind} needs a rate")
        if kind == "all" and self.rate is not None:
            raise WorkloadError("arrivals=all has no rate")
        if isinstance(self.max_tokens, int) and self.max_tokens < 1:
            raise WorkloadError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise WorkloadError(f"duration must be a positive time, got {self.duration}")
        if self.best_effort is not None and self.duration is None:
            raise WorkloadError("best_effort requests come again and again: duration is needed")
        if self.programs is not None:
            if not 1 <= self.programs <= MOST_PROGRAMS:
                raise WorkloadError(f"programs must be 1 to {MOST_PROGRAMS}, got {self.programs}")
            if self.rate is not None or kind is not None:
                raise WorkloadError("programs begin as others end: they need no rate or arrivals")
        if self.program_deadline is not None and not 0 < self.program_deadline < math.inf:
            limits = "program_deadline must be a positive time"
            raise WorkloadError(f"{limits}, got {self.program_deadline}")

    @property
    def count(self) -> float:
        """Number of requests; infinity if it is known only once they are made."""
        return math.inf if self.num_requests is None else self.num_requests

    def make_workload(self, seed: int = 0) -> Workload:
        """Makes the workload; the same for the same seed. Classes change neither arrivals nor
        lengths. Raises WorkloadError if it cannot be made."""
        if self.duration is None:
            return self._make(*self._generators(seed))
        whole = replace(self, duration=None, best_effort=None)
        drawn = _is_sampled(self.lengths) or self.lengths.lower() in (*SESSIONS, *CLOSED_SESSIONS)
        lasts = self.rate is not None or self.programs is not None
        grows = drawn and self.num_requests is None and lasts
        if grows and self.rate is not None:
            whole = replace(whole, num_requests=int(self.rate * self.duration) + DEFAULT_COUNT)
        made = whole.make_workload(seed)
        while grows and made.arrival[~made.programs.waits][-1] < self.duration:
            made = replace(whole, num_requests=2 * len(made)).make_workload(seed)
        if self.programs is not None:
            return made  # when each begins is not known
        # Whoever waits for others may come earlier than in a trace.
        late = (made.arrival >= self.duration) & ~made.programs.waits
        kept = ~made.programs.cut_off(late)
        if not kept.any():
            raise WorkloadError(f"no request comes within {self.duration:g} s")
        return made.select(kept)

    def drawn(self) -> bool:
        """Whether the workload depends on the seed. Raises WorkloadError as `make_workload`
        does."""
        if self.best_effort is not None:
            return True
        generators = self._generators(0)
        before = [rng.bit_generator.state for rng in generators]
        self._make(*generators)
        return [rng.bit_generator.state for rng in generators] != before

    def _generators(self, seed: int) -> tuple[np.random.Generator, np.random.Generator]:
        """Generators for arrivals and lengths, and for classes."""
        return np.random.default_rng((seed, 2)), np.random.default_rng((seed, 5))

    def _make(self, rng: np.random.Generator, class_rng: np.random.Generator) -> Workload:
        found = self._find(rng)
        sessions = self.lengths.lower() in (*SESSIONS, *CLOSED_SESSIONS)
        whole = self.lengths.lower() in CLOSED_SESSIONS
        if self.num_requests not in (None, len(found.lengths)) and not whole:
            found = found.first(self.num_requests)
        check_memory(self.lengths, len(found.lengths), int(found.lengths.output_len.sum()))
        programs = self._programs(found.programs)
        terms = self._terms(found.terms, programs, class_rng)
        limit = self._limit(found)
        kind = self.arrivals
        if kind == "replay" and found.arrival is None:
            raise WorkloadError(f"{self.lengths} has no arrivals to replay")
        if sessions and found.arrival is not None:
            arrival, rate = found.arrival, None
        elif found.arrival is not None and kind in (None, "replay"):
            arrival, rate = found.arrival, self.rate
        else:
            arrival, rate = self._arrivals(len(found.lengths), rng), None
        chances = self.guessable or KINDS.get(self.lengths.lower())
        made = Workload.create(
            arrival,
            found.lengths,
            limit=limit,
            terms=terms,
            prefixes=found.prefixes,
            guessable=Guessable.same(len(found.lengths), chances),
            programs=programs,
        )
        if self.programs is not None:
            made = made.with_programs_at_once(self.programs)
        if self.adapters is not None:
            made = made.with_adapters(*self.adapters, class_rng)
        return made if rate is None else made.at_rate(rate)

    def _find(self, rng: np.random.Generator) -> Trace:
        if self.lengths.startswith("fixed:"):
            shape = re.fullmatch(r"fixed:(\d{1,9})x(\d{1,9})x(\d{1,9})", self.lengths)
            if not shape:
                raise WorkloadError(f"fixed workloads are fixed:IxOxB, got {self.lengths!r}")
            prompt, output, count = (int(n) for n in shape.groups())
            if self.num_requests is not None:
                raise WorkloadError("fixed:IxOxB gives the number of requests already")
            check_memory(self.lengths, count, count * output)
            return _without_terms(fixed_lengths(prompt, output, count))
        if _is_sampled(self.lengths):
            count = self.num_requests or DEFAULT_COUNT
            check_memory(self.lengths, count, count)
            return _without_terms(lengths.sampler(self.lengths)(count, rng))
        if self.lengths.lower() in SESSIONS:
            return self._sessions(rng)
        if self.lengths.lower() in CLOSED_SESSIONS:
            return self._closed_sessions(rng)
        if not Path(self.lengths).exists():
            known = ", ".join([*lengths.names(), *SESSIONS, *CLOSED_SESSIONS])
            raise WorkloadError(
                f"there is no workload or file {self.lengths!r}; known: fixed:IxOxB, {known}"
            )
        return read_trace(self.lengths, self.num_requests)

    def _sessions(self, rng: np.random.Generator) -> Trace:
        drawn, count = SESSIONS[self.lengths.lower()], self.num_requests or DEFAULT_COUNT
        rate = 1.0 if self.rate is None else self.rate  # all at once: only for their order
        if self.arrivals == "replay":
            raise WorkloadError(f"{self.lengths} has no arrivals to replay")
        check_memory(self.lengths, count + drawn.requests_before(rate), count)
        arrival, made, prefixes = drawn.sample(count, rate, self._starts, rng)
        timed = None if self.rate is None else arrival
        return replace(_without_terms(made), arrival=timed, prefixes=prefixes)

    def _closed_sessions(self, rng: np.random.Generator) -> Trace:
        family, count = CLOSED_SESSIONS[self.lengths.lower()], self.num_requests or DEFAULT_COUNT
        if self.arrivals == "replay":
            raise WorkloadError(f"{self.lengths} has no arrivals to replay")
        check_memory(self.lengths, count, count)
        starts: Starts = self._starts if self.rate is not None else _together
        rate = 1.0 if self.rate is None else self.rate
        arrival, made, prefixes, programs = sample(
            family, count, rng, rate=rate, starts=starts, at_once=self.programs or 0
        )
        found = _without_terms(made)
        return replace(found, arrival=arrival, prefixes=prefixes, programs=programs)

    def _programs(self, own: Programs) -> Programs:
        """The programs, with the deadline of those without their own."""
        if self.program_deadline is None:
            return own
        if not own.closed:
            raise WorkloadError(f"program_deadline: {self.lengths} has no programs")
        mine = (own.program >= 0) & (own.deadline == math.inf)
        return replace(own, deadline=np.where(mine, self.program_deadline, own.deadline))

    def _starts(self, rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
        """Starts of sessions at this rate."""
        kind = self.arrivals if self.rate is not None else None
        return replace(self, arrivals=kind, rate=rate)._arrivals(count, rng)

    def _terms(self, own: SloColumns, programs: Programs, rng: np.random.Generator) -> SloColumns:
        """The terms of requests; calls of a program are of one class."""
        if self.classes:
            targets = any(np.isfinite(getattr(own, name)).any() for name in ALL_TARGETS)
            said = own.tier.any() or not own.greedy.all() or (own.value != 1).any()
            if targets or said or own.classes != (NO_CLASS,):
                raise WorkloadError(
                    f"{self.lengths} has tiers, targets, classes, values or sampling of its own: "
                    "no classes are drawn"
                )
            own = draw_terms(self.classes, len(own), rng)
            if programs.closed:
                _, first, same = np.unique(programs.program, return_index=True, return_inverse=True)
                by_itself = programs.program < 0
                own = own.select(np.where(by_itself, np.arange(len(own)), first[same]))
        return with_targets(own, self.slo)

    def _limit(self, found: Trace) -> np.ndarray:
        unsaid: np.ndarray | int
        if self.max_tokens is None:
            unsaid = open_limit(found.lengths)
        else:
            given = self.max_tokens
            unsaid = found.lengths.output_len if given == "length" else given
        return np.where(found.limit == NO_LIMIT, unsaid, found.limit)

    def _arrivals(self, count: int, rng: np.random.Generator) -> np.ndarray:
        if self.arrivals == "all" or self.rate is None:
            return all_at_once(count)
        if self.arrivals == "gamma":
            assert self.cv is not None
            return gamma_arrivals(self.rate, self.cv, count, rng)
        if self.arrivals == "on_off":
            assert self.on_s is not None and self.off_s is not None
            return on_off_arrivals(self.rate, self.on_s, self.off_s, count, rng)
        return poisson_arrivals(self.rate, count, rng)


def _is_sampled(name: str) -> bool:
    lower = name.lower()
    return lower in lengths.names() or set(lower.split("+")) <= set(lengths.GROUPS)


def _together(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Starts of sessions without a rate."""
    return all_at_once(count)


def _without_terms(found: Lengths) -> Trace:
    count = len(found)
    limit = np.full(count, NO_LIMIT)
    terms, prefixes = SloColumns.none(count), Prefixes.none(count)
    return Trace(None, found, limit, terms, prefixes, Programs.none(count))
