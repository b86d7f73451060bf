"""Workloads: when requests arrive, how long they are, and what they ask for.

Arrivals, lengths and terms are made apart, by small functions over a NumPy generator, and put
together in a `Workload`. The engine's bench and the simulator take the same ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.slo.slo_columns import SloColumns

MAX_LENGTH = 2**31 - 1  # what a request's length is stored in


class WorkloadError(ValueError):
    """A workload that cannot be made; the message says which argument, or file and line."""


@dataclass(frozen=True)
class Lengths:
    """prompt_len, output_len: int64 [n], tokens, each at least 1."""

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
        """The first `count` of them. WorkloadError if there are fewer."""
        if not 1 <= count <= len(self):
            raise WorkloadError(f"{count} requests are asked for, of {len(self)} lengths")
        return Lengths(self.prompt_len[:count], self.output_len[:count])


@dataclass(frozen=True)
class Workload:
    """n requests in order of arrival; `Workload.of` makes one.

    arrival: float64 [n], seconds from the start. prompt_len, output_len: int64 [n], tokens; nobody
    knows a request's output_len until it has ended. limit: int64 [n], the max_tokens asked for, at
    least output_len: that is known. The rest is as in `SloColumns`.
    """

    arrival: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray
    limit: np.ndarray
    tier: np.ndarray
    ttft: np.ndarray
    tbt: np.ndarray
    jct: np.ndarray
    slo_class: np.ndarray
    greedy: np.ndarray
    classes: tuple[str, ...]

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

    @classmethod
    def create(
        cls,
        arrival: np.ndarray,
        lengths: Lengths,
        *,
        limit: np.ndarray | None = None,
        terms: SloColumns | None = None,
    ) -> Workload:
        """Puts the parts together. limit: int64 [n], by default `open_limit`. terms: by default
        none."""
        if limit is None:
            limit = open_limit(lengths)
        terms = terms or SloColumns.none(len(lengths))
        columns = {field.name: getattr(terms, field.name) for field in dataclasses.fields(terms)}
        return cls(arrival, lengths.prompt_len, lengths.output_len, limit, **columns)

    @classmethod
    def merged(cls, parts: Sequence[Workload]) -> tuple[Workload, np.ndarray]:
        """All of their requests in order of arrival, and where each of them is in the parts one
        after the other, int64 [n]."""
        names = ("arrival", "prompt_len", "output_len", "limit")
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
        order = np.argsort(columns[0], kind="stable")
        arrival, prompt, output, limit = (column[order] for column in columns)
        terms = SloColumns.joined([part.terms for part in parts]).select(order)
        return cls.create(arrival, Lengths(prompt, output), limit=limit, terms=terms), order

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def lengths(self) -> Lengths:
        """Its prompt_len and output_len."""
        return Lengths(self.prompt_len, self.output_len)

    @property
    def terms(self) -> SloColumns:
        """What its requests ask for beside the work."""
        columns = (getattr(self, field.name) for field in dataclasses.fields(SloColumns))
        return SloColumns(*columns)

    def select(self, which: np.ndarray) -> Workload:
        """Some of the requests: ascending indices, or a mask. Their limits stay as they are."""
        return Workload.create(
            self.arrival[which],
            Lengths(self.prompt_len[which], self.output_len[which]),
            limit=self.limit[which],
            terms=self.terms.select(which),
        )

    def first(self, count: int) -> Workload:
        """The first `count` requests. WorkloadError if there are fewer."""
        return self.select(np.arange(len(self.lengths.first(count))))

    def within(self, total: int) -> Workload:
        """The same with prompts, then outputs and limits cut so that none may get longer than
        `total` tokens."""
        if total < 2:
            raise WorkloadError(f"a request has at least 2 tokens, got a limit of {total}")
        prompt = np.minimum(self.prompt_len, total - 1)
        room = total - prompt
        return dataclasses.replace(
            self,
            prompt_len=prompt,
            output_len=np.minimum(self.output_len, room),
            limit=np.minimum(self.limit, room),
        )

    def at_rate(self, rate: float) -> Workload:
        """The same requests with time stretched so that `rate` of them arrive a second on
        average. WorkloadError for no such rate, or if all arrive at once."""
        if not (math.isfinite(rate) and rate > 0):
            raise WorkloadError(f"rate must be a positive number, got {rate}")
        span = float(self.arrival[-1])
        if span == 0:
            raise WorkloadError("all requests arrive at once: there is no rate to change")
        return dataclasses.replace(self, arrival=self.arrival * ((len(self) - 1) / span / rate))


def open_limit(lengths: Lengths) -> np.ndarray:
    """What requests may write that ask for no max_tokens, int64 [n], tokens: as many as a server
    gives whose max_model_len is just enough for the longest of them."""
    return np.asarray(lengths.total.max() - lengths.prompt_len)


def all_at_once(count: int) -> np.ndarray:
    """Every request at time 0, float64 [count]."""
    return np.zeros(_positive("num_requests", count))


def poisson_arrivals(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of a Poisson process, float64 [count] in seconds. rate: requests/s."""
    return gamma_arrivals(rate, 1.0, count, rng)


def gamma_arrivals(rate: float, cv: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times with independent Gamma gaps, float64 [count] in seconds.

    rate: requests/s. cv: standard deviation of the gaps over their mean; 1 is a Poisson process,
    more comes in bursts, less is more regular.
    """
    for name, value in (("rate", rate), ("cv", cv)):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} must be a positive number, got {value}")
    shape = 1.0 / cv**2
    gaps = rng.gamma(shape, 1.0 / (rate * shape), _positive("num_requests", count))
    return np.cumsum(gaps)


def on_off_arrivals(
    rate: float, on_s: float, off_s: float, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Arrival times of a source that is on and off in turn, float64 [count] in seconds.

    The lengths of on and off periods are exponential with means on_s and off_s; while on, requests
    come as a Poisson process, so fast that the rate over all is `rate`. Starts on.
    """
    for name, value in (("rate", rate), ("on_s", on_s), ("off_s", off_s)):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} must be a positive number, got {value}")
    gaps = rng.exponential(on_s / (rate * (on_s + off_s)), _positive("num_requests", count))
    busy = np.cumsum(gaps)  # on a clock that stands still while the source is off
    switches = np.cumsum(rng.exponential(on_s, 1 + int(2 * busy[-1] / on_s)))
    while switches[-1] < busy[-1]:
        switches = np.append(switches, switches[-1] + rng.exponential(on_s))
    off = np.concatenate([[0.0], np.cumsum(rng.exponential(off_s, len(switches)))])
    return busy + off[np.searchsorted(switches, busy)]


def fixed_lengths(prompt_len: int, output_len: int, count: int) -> Lengths:
    """`count` requests of one shape; lengths in tokens."""
    _positive("num_requests", count)
    return Lengths(np.full(count, prompt_len, np.int64), np.full(count, output_len, np.int64))


def _positive(name: str, count: int) -> int:
    if count < 1:
        raise WorkloadError(f"{name} must be at least 1, got {count}")
    return count
