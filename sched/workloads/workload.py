"""Workloads: when requests arrive, how long their prompts are and how much they write.

Arrivals and lengths are made apart, by small functions over a NumPy generator, and put together
in a `Workload`. The engine's bench and the simulator take the same ones.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTH_COLUMNS = ("prompt_tokens", "output_tokens")
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

    def first(self, count: int) -> Lengths:
        """The first `count` of them. WorkloadError if there are fewer."""
        if not 1 <= count <= len(self):
            raise WorkloadError(f"{count} requests are asked for, of {len(self)} lengths")
        return Lengths(self.prompt_len[:count], self.output_len[:count])

    def within(self, total: int) -> Lengths:
        """The same with prompts, then outputs cut so that none has more than `total` tokens."""
        if total < 2:
            raise WorkloadError(f"a request has at least 2 tokens, got a limit of {total}")
        prompt = np.minimum(self.prompt_len, total - 1)
        return Lengths(prompt, np.minimum(self.output_len, total - prompt))


@dataclass(frozen=True)
class Workload:
    """n requests in order of arrival. arrival: float64 [n], seconds from the start. prompt_len,
    output_len: int64 [n], tokens."""

    arrival: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray

    def __post_init__(self) -> None:
        Lengths(self.prompt_len, self.output_len)
        if self.arrival.shape != self.prompt_len.shape:
            raise WorkloadError(f"{self.arrival.size} arrivals for {self.prompt_len.size} lengths")
        if (np.diff(self.arrival, prepend=0.0) < 0).any() or not np.isfinite(self.arrival).all():
            raise WorkloadError("arrivals must be ascending times from 0")

    @classmethod
    def of(cls, arrival: np.ndarray, lengths: Lengths) -> Workload:
        return cls(arrival, lengths.prompt_len, lengths.output_len)

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.prompt_len, self.output_len)

    def first(self, count: int) -> Workload:
        """The first `count` requests. WorkloadError if there are fewer."""
        return Workload.of(self.arrival[:count], self.lengths.first(count))

    def at_rate(self, rate: float) -> Workload:
        """The same requests with time stretched so that `rate` of them arrive a second on
        average."""
        if not (math.isfinite(rate) and rate > 0):
            raise WorkloadError(f"rate must be a positive number, got {rate}")
        span = float(self.arrival[-1])
        if span == 0:
            raise WorkloadError("all requests arrive at once: there is no rate to change")
        return Workload.of(self.arrival * ((len(self) - 1) / span / rate), self.lengths)


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


def read_lengths(path: str | Path) -> Lengths:
    """Lengths from a CSV file with the header `prompt_tokens,output_tokens`, in file order.

    WorkloadError names file, line and reason for whatever is not two positive whole numbers.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(_length_rows(path, csv.reader(file)))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: not a CSV text file ({error})") from error
    if not rows:
        raise WorkloadError(f"{path}: no rows after the header")
    table = np.array(rows, np.int64)
    return Lengths(table[:, 0].copy(), table[:, 1].copy())


def _length_rows(path: str | Path, reader: Any) -> Iterator[tuple[int, int]]:
    header: list[str] = next(reader, [])
    if tuple(header) != LENGTH_COLUMNS:
        wanted = ",".join(LENGTH_COLUMNS)
        raise WorkloadError(f"{path}:1: the header must be {wanted}, got {','.join(header)!r}")
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if len(row) != len(LENGTH_COLUMNS):
            raise WorkloadError(f"{where}: 2 columns expected, got {len(row)}")
        prompt, output = (
            length_of(where, name, text) for name, text in zip(LENGTH_COLUMNS, row, strict=True)
        )
        yield prompt, output


def length_of(where: str, name: str, text: str) -> int:
    """The length written in a trace. WorkloadError names `where` and the column."""
    # int() would also take " 7", "1_000" and other scripts' digits.
    if not (text.isascii() and text.isdigit()):
        raise WorkloadError(f"{where}: {name} must be a whole number, got {text!r}")
    if len(text) > 10 or not 1 <= int(text) <= MAX_LENGTH:
        raise WorkloadError(f"{where}: {name} must be 1 to {MAX_LENGTH}, got {text:.20}")
    return int(text)


def _positive(name: str, count: int) -> int:
    if count < 1:
        raise WorkloadError(f"{name} must be at least 1, got {count}")
    return count
