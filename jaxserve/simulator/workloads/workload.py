"""Workloads: the arrivals, lengths and SLOs of requests.

Arrivals, lengths and terms are made separately, by small functions over a NumPy generator, and
combined in a `Workload`. The engine's bench and the simulator use the same ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.guessable import Guessable
from jaxserve.simulator.workloads.prefixes import NO_PREFIX, Prefixes
from jaxserve.simulator.workloads.programs import Programs

MAX_LENGTH = 2**31 - 1  # limit of the type in which lengths are stored


class WorkloadError(ValueError):
    """A workload that cannot be made; the message says which argument, or file and line."""


@dataclass(frozen=True)
class Lengths:
    """Prompt and output lengths of n requests.

    Attributes:
        prompt_len: int64 [n], tokens, each at least 1.
        output_len: int64 [n], tokens, each at least 1.

    Raises:
        WorkloadError: The lengths do not fit together, or any is below 1.
    """

    prompt_len: np.ndarray
    output_len: np.ndarray

    def __post_init__(self) -> None:
        if self.prompt_len.shape != self.output_len.shape or self.prompt_len.ndim != 1:
            raise WorkloadError("prompt_len and output_len must be vectors of the same length")
        for name in ("prompt_len", "output_len"):
            values = getattr(self, name)
            if (values < 1).any():
                raise WorkloadError(f"{name} must be at least 1, got {values.min()}")

    def __len__(self) -> int:
        return len(self.prompt_len)

    @property
    def total(self) -> np.ndarray:
        """Prompt and output together, int64 [n], tokens."""
        return np.asarray(self.prompt_len + self.output_len)

    def first(self, count: int) -> Lengths:
        """The first `count` lengths. Raises WorkloadError if there are fewer."""
        if not 1 <= count <= len(self):
            raise WorkloadError(f"{count} requests are asked for, of {len(self)} lengths")
        return Lengths(self.prompt_len[:count], self.output_len[:count])


@dataclass(frozen=True)
class Workload:
    """n requests in order of arrival, with their lengths, SLOs and options. `Workload.create` puts
    one together.

    Attributes:
        arrival: float64 [n], seconds from the start, ascending. A request that waits for others
            comes when they have ended, not at this time, which is only its place among the others.
        prompt_len: int64 [n], tokens.
        output_len: int64 [n], tokens that each request writes. Policies do not know it before the
            request has ended.
        limit: int64 [n], max_tokens, at least output_len. Policies know it.
        tier, ttft, tbt, jct, max_tbt, slo_class, greedy, classes, value: See `SloColumns`.
        prefix_of, prefix_len: See `Prefixes`.
        guess_share, guess_right: See `Guessable`.
        adapter: int64 [n], number of the adapter that each has, from 1; 0 for none.
        brought: int64 [n], tokens of each prompt, from the first on, whose cached blocks come along
            from another engine, and are in host memory if there is room.
        programs: Which requests are calls of programs, and which wait for others.

    Raises:
        WorkloadError: The columns do not fit together.
    """

    arrival: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray
    limit: np.ndarray
    tier: np.ndarray
    ttft: np.ndarray
    tbt: np.ndarray
    jct: np.ndarray
    max_tbt: np.ndarray
    slo_class: np.ndarray
    greedy: np.ndarray
    classes: tuple[str, ...]
    value: np.ndarray
    prefix_of: np.ndarray
    prefix_len: np.ndarray
    guess_share: np.ndarray
    guess_right: np.ndarray
    adapter: np.ndarray
    brought: np.ndarray
    programs: Programs

    def __post_init__(self) -> None:
        lengths, terms = self.lengths, self.terms
        if self.arrival.shape != self.prompt_len.shape:
            raise WorkloadError(f"{self.arrival.size} arrivals for {len(lengths)} lengths")
        if (np.diff(self.arrival, prepend=0.0) < 0).any() or not np.isfinite(self.arrival).all():
            raise WorkloadError("arrivals must be ascending times from 0")
        if self.limit.shape != self.arrival.shape or len(terms) != len(self):
            raise WorkloadError(
                f"{self.limit.size} limits and {len(terms)} terms for {len(self)} requests"
            )
        short = np.flatnonzero(self.limit < self.output_len)
        if len(short):
            worst = int(short[0])
            raise WorkloadError(
                f"request {worst + 1} has an output of {self.output_len[worst]} tokens, more than "
                f"its max_tokens of {self.limit[worst]}"
            )
        self._check_prefixes()
        if self.adapter.shape != self.arrival.shape or (self.adapter < 0).any():
            raise WorkloadError("adapter must be a number from 0 of each request")
        brought = self.brought
        if brought.shape != self.arrival.shape or not (brought >= 0).all():
            raise WorkloadError("brought must be a number of tokens of each request")
        if (brought > self.prompt_len).any():
            raise WorkloadError("brought must be no more tokens than the prompt has")
        for name in ("guess_share", "guess_right"):
            column = getattr(self, name)
            if column.shape != self.arrival.shape or not ((column >= 0) & (column <= 1)).all():
                raise WorkloadError(f"{name} must be a share from 0 to 1 of each request")
        if len(self.programs) != len(self):
            raise WorkloadError(f"programs of {len(self.programs)} requests for {len(self)}")
        if problem := self.programs.problem():
            raise WorkloadError(f"programs: {problem}")

    def _check_prefixes(self) -> None:
        source, shared = self.prefix_of, self.prefix_len
        if not source.shape == shared.shape == self.arrival.shape:
            raise WorkloadError(
                f"{source.size} prefix_of and {shared.size} prefix_len for {len(self)} requests"
            )
        late = np.flatnonzero((source < NO_PREFIX) | (source >= np.arange(len(self))))
        if len(late):
            raise WorkloadError(
                f"request {late[0] + 1}: prefix_of must be the index of an earlier request, or "
                f"{NO_PREFIX}, got {source[late[0]]}"
            )
        begins = source >= 0
        most = np.where(begins, np.minimum(self.prompt_len, self.lengths.total[source]), 0)
        wrong = np.flatnonzero((shared < begins) | (shared > most))
        if len(wrong):
            worst = int(wrong[0])
            raise WorkloadError(
                f"request {worst + 1}: prefix_len must be {int(begins[worst])} to {most[worst]}, "
                f"as many tokens as both have, got {shared[worst]}"
            )

    @classmethod
    def create(
        cls,
        arrival: np.ndarray,
        lengths: Lengths,
        *,
        limit: np.ndarray | None = None,
        terms: SloColumns | None = None,
        prefixes: Prefixes | None = None,
        guessable: Guessable | None = None,
        adapter: np.ndarray | None = None,
        brought: np.ndarray | None = None,
        programs: Programs | None = None,
    ) -> Workload:
        """Puts a workload together from its parts.

        Args:
            arrival: float64 [n], seconds from the start, ascending.
            lengths: Prompts and outputs.
            limit: int64 [n], max_tokens; by default `open_limit`.
            terms: SLOs and sampling; by default `SloColumns.none`.
            prefixes: Shared prefixes; by default none.
            guessable: How well the texts can be guessed; by default not at all.
            adapter: int64 [n], number of each request's adapter; by default none.
            brought: int64 [n], tokens that come with their cached blocks; by default none.
            programs: Which requests wait for which; by default none for any.

        Raises:
            WorkloadError: The parts do not fit together.
        """
        if limit is None:
            limit = open_limit(lengths)
        terms = terms or SloColumns.none(len(lengths))
        prefixes = prefixes or Prefixes.none(len(lengths))
        guessable = guessable or Guessable.same(len(lengths))
        nothing = np.zeros(len(lengths), np.int64)
        columns = vars(terms) | vars(prefixes) | vars(guessable)
        columns["adapter"] = nothing if adapter is None else adapter
        columns["brought"] = nothing if brought is None else brought
        columns["programs"] = Programs.none(len(lengths)) if programs is None else programs
        return cls(arrival, lengths.prompt_len, lengths.output_len, limit, **columns)

    @classmethod
    def merged(cls, parts: Sequence[Workload]) -> tuple[Workload, np.ndarray]:
        """Merges workloads into one, in order of arrival.

        Returns:
            The merged workload, and each request's index in the concatenated parts, int64 [n].

        Raises:
            WorkloadError: Only one part may have programs if their number in progress is fixed.
        """
        names = ("arrival", "prompt_len", "output_len", "limit")
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
        order = np.argsort(columns[0], kind="stable")
        arrival, prompt, output, limit = (column[order] for column in columns)
        terms = SloColumns.joined([part.terms for part in parts]).select(order)
        prefixes = Prefixes.joined([part.prefixes for part in parts]).select(order)
        lengths = Lengths(prompt, output)
        guessable = Guessable.joined([part.guessable for part in parts])[order]
        shared: dict[str, Any] = {"prefixes": prefixes, "guessable": guessable}
        for name in ("adapter", "brought"):
            shared[name] = np.concatenate([getattr(part, name) for part in parts])[order]
        try:
            shared["programs"] = Programs.joined([part.programs for part in parts]).select(order)
        except ValueError as error:
            raise WorkloadError(str(error)) from error
        return cls.create(arrival, lengths, limit=limit, terms=terms, **shared), order

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def lengths(self) -> Lengths:
        """Prompt and output lengths."""
        return Lengths(self.prompt_len, self.output_len)

    @property
    def terms(self) -> SloColumns:
        """Tiers, targets, classes and sampling of the requests."""
        columns = (getattr(self, field.name) for field in dataclasses.fields(SloColumns))
        return SloColumns(*columns)

    @property
    def prefixes(self) -> Prefixes:
        """The prefixes that prompts share with earlier requests."""
        return Prefixes(self.prefix_of, self.prefix_len)

    @property
    def guessable(self) -> Guessable:
        """How well the texts can be guessed."""
        return Guessable(self.guess_share, self.guess_right)

    def with_terms(self, terms: SloColumns) -> Workload:
        """The same requests with other SLOs and sampling."""
        return dataclasses.replace(self, **vars(terms))

    def select(self, which: np.ndarray) -> Workload:
        """Selected requests: ascending indices, or a mask. Their limits do not change. For those
        that go on with, or wait for, requests left out, see `Prefixes.select` and
        `Programs.select`."""
        return self._chosen(which, self.arrival[which], self.prefixes.select(which))

    def arrived(self, which: np.ndarray, arrival: np.ndarray) -> Workload:
        """Selected requests with new arrivals.

        Args:
            which: int64 [k], indices in order of the new arrivals, parents before their children.
            arrival: float64 [k], seconds.
        """
        if (np.diff(which) > 0).all():
            return self._chosen(which, arrival, self.prefixes.select(which))
        return self._chosen(which, arrival, self.prefixes.in_order(which, self.prompt_len))

    def _chosen(self, which: np.ndarray, arrival: np.ndarray, prefixes: Prefixes) -> Workload:
        return Workload.create(
            arrival,
            Lengths(self.prompt_len[which], self.output_len[which]),
            limit=self.limit[which],
            terms=self.terms.select(which),
            prefixes=prefixes,
            guessable=self.guessable[which],
            adapter=self.adapter[which],
            brought=self.brought[which],
            programs=self.programs.select(which),
        )

    def with_programs_at_once(self, count: int) -> Workload:
        """The same programs, in order of their first calls, with `count` in progress at a time.
        WorkloadError if there are none."""
        if not self.programs.closed:
            raise WorkloadError(f"{count} programs at a time: these requests are of no programs")
        return dataclasses.replace(self, programs=dataclasses.replace(self.programs, at_once=count))

    def with_adapters(self, share: float, count: int, rng: np.random.Generator) -> Workload:
        """The same requests, some with adapters. A request that shares an earlier one's prefix has
        that one's adapter.

        Args:
            share: Share of the other requests that have one.
            count: Number of adapters, all equally likely.
            rng: Random numbers.

        Raises:
            WorkloadError: There are no adapters, or the share is not from 0 to 1.
        """
        if not (0 <= share <= 1 and count >= 1):
            raise WorkloadError(f"adapters: a share of 0 to 1 of 1 or more, got {share}:{count}")
        drawn = rng.integers(1, count + 1, len(self)) * (rng.random(len(self)) < share)
        for own, source in enumerate(self.prefix_of.tolist()):
            if source >= 0:
                drawn[own] = drawn[source]
        return dataclasses.replace(self, adapter=drawn.astype(np.int64))

    def first(self, count: int) -> Workload:
        """The first `count` requests. Raises WorkloadError if there are fewer."""
        return self.select(np.arange(len(self.lengths.first(count))))

    def within(self, total: int) -> Workload:
        """The same requests, truncated to `total` tokens each: prompts first, then outputs and
        limits."""
        if total < 2:
            raise WorkloadError(f"a request has at least 2 tokens, got a limit of {total}")
        prompt = np.minimum(self.prompt_len, total - 1)
        room = total - prompt
        return dataclasses.replace(
            self,
            prompt_len=prompt,
            output_len=np.minimum(self.output_len, room),
            limit=np.minimum(self.limit, room),
            prefix_len=np.minimum(self.prefix_len, prompt),
            brought=np.minimum(self.brought, prompt),
        )

    def scaled(self, divisor: float) -> Workload:
        """The same requests with all lengths divided, at least 1 token each. WorkloadError if the
        divisor is not positive."""
        if not 0 < divisor < math.inf:
            raise WorkloadError(f"scale must be a positive number, got {divisor}")
        prompt, output, limit, shared = (
            np.maximum(column / divisor, 1).astype(np.int64)
            for column in (self.prompt_len, self.output_len, self.limit, self.prefix_len)
        )
        source = self.prefix_of
        longest = np.minimum(prompt, (prompt + output)[source])
        return dataclasses.replace(
            self,
            prompt_len=prompt,
            output_len=output,
            limit=limit,
            prefix_len=np.where(source >= 0, np.minimum(shared, longest), 0),
            brought=np.minimum(self.brought, prompt),
        )

    def at_rate(self, rate: float) -> Workload:
        """The same requests with time stretched to an average of `rate` requests/s; for programs
        only when they begin, not what tools and people take. Raises WorkloadError if the rate is
        not positive, or if all requests arrive at once."""
        if not (math.isfinite(rate) and rate > 0):
            raise WorkloadError(f"rate must be a positive number, got {rate}")
        span = float(self.arrival[-1])
        if span == 0:
            raise WorkloadError("all requests arrive at once: there is no rate to change")
        arrival = self.arrival * ((len(self) - 1) / span / rate)
        if not self.programs.closed:
            return dataclasses.replace(self, arrival=arrival)
        arrival = self.programs.moved(self.arrival, arrival)
        order = np.argsort(arrival, kind="stable")
        return self.arrived(order, arrival[order])


def open_limit(lengths: Lengths) -> np.ndarray:
    """The limit of requests without max_tokens, int64 [n], tokens: that of a server whose
    max_model_len just fits the longest request."""
    return np.asarray(lengths.total.max() - lengths.prompt_len)


def all_at_once(count: int) -> np.ndarray:
    """Every request at time 0, float64 [count]."""
    return np.zeros(check_count(count))


def poisson_arrivals(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of a Poisson process, float64 [count] in seconds. rate: requests/s."""
    return gamma_arrivals(rate, 1.0, count, rng)


def gamma_arrivals(rate: float, cv: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times with independent Gamma gaps.

    Args:
        rate: Requests/s.
        cv: Standard deviation of the gaps over their mean. 1 is a Poisson process, more is
            burstier, less is more regular.
        count: Requests.
        rng: Random numbers for the gaps.

    Returns:
        float64 [count], seconds.

    Raises:
        WorkloadError: An argument is not positive.
    """
    for name, value in (("rate", rate), ("cv", cv)):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} must be a positive number, got {value}")
    shape = 1.0 / cv**2
    gaps = rng.gamma(shape, 1.0 / (rate * shape), check_count(count))
    return np.cumsum(gaps)


def on_off_arrivals(
    rate: float, on_s: float, off_s: float, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Arrival times of a bursty source that alternates between on and off periods, starting with
    on.

    Periods are exponential. While the source is on, requests come as a Poisson process, fast enough
    for `rate` on average over both.

    Args:
        rate: Requests/s, including off periods.
        on_s: Mean length of the on periods, seconds.
        off_s: Mean length of the off periods, seconds.
        count: Requests.
        rng: Random numbers for gaps and periods.

    Returns:
        float64 [count], seconds.

    Raises:
        WorkloadError: An argument is not positive.
    """
    for name, value in (("rate", rate), ("on_s", on_s), ("off_s", off_s)):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} must be a positive number, got {value}")
    gaps = rng.exponential(on_s / (rate * (on_s + off_s)), check_count(count))
    busy = np.cumsum(gaps)  # on a clock that stops while the source is off
    switches = np.cumsum(rng.exponential(on_s, 1 + int(2 * busy[-1] / on_s)))
    while switches[-1] < busy[-1]:
        switches = np.append(switches, switches[-1] + rng.exponential(on_s))
    off = np.concatenate([[0.0], np.cumsum(rng.exponential(off_s, len(switches)))])
    return busy + off[np.searchsorted(switches, busy)]


def fixed_lengths(prompt_len: int, output_len: int, count: int) -> Lengths:
    """`count` requests of one shape; lengths in tokens."""
    check_count(count)
    return Lengths(np.full(count, prompt_len, np.int64), np.full(count, output_len, np.int64))


def check_count(count: int) -> int:
    """Checks a number of requests, and returns it. Raises WorkloadError below 1."""
    if count < 1:
        raise WorkloadError(f"num_requests must be at least 1, got {count}")
    return count
