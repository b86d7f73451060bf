"""The traffic of many users: the Azure hours, many times beside each other and after each other,
each time from another minute on."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.lengths import sampler
from jaxserve.simulator.workloads.traces import read_trace
from jaxserve.simulator.workloads.workload import (
    Lengths,
    Workload,
    WorkloadError,
    gamma_arrivals,
)

HOUR = 3600.0
LONGEST, MOST_OUTPUT = 8192, 1024  # tokens, of a request and of what it writes
TBT = 0.2  # seconds, of all


class Kind(NamedTuple):
    """One of the Azure hours.

    Attributes:
        name: Of its class of requests.
        file: Its trace.
        drawn: Sampler of the lengths, without a trace.
        cv: Coefficient of variation of the gaps, without a trace.
        size: Its requests, without a trace.
        ttft: Target in seconds.
    """

    name: str
    file: str
    drawn: str
    cv: float
    size: int
    ttft: float


KINDS = (
    Kind("conv", "AzureLLMInferenceTrace_conv.csv", "azure-conv", 1.09, 19_366, 1.0),
    Kind("code", "AzureLLMInferenceTrace_code.csv", "azure-code", 13.2, 8_819, 2.0),
)


@cache
def _hours(folder: str) -> list[tuple[np.ndarray, Lengths]]:
    """Arrivals within the hour, and lengths, by kind. folder: of the traces; "" to draw."""
    return [_read(kind, folder) if folder else _draw(kind) for kind in KINDS]


def check_folder(folder: str) -> None:
    """WorkloadError if the folder lacks a trace; "" is no folder."""
    for kind in KINDS if folder else ():
        path = Path(folder) / kind.file
        if not path.is_file():
            raise WorkloadError(f"--azure: there is no {path}")


def _read(kind: Kind, folder: str) -> tuple[np.ndarray, Lengths]:
    path = Path(folder) / kind.file
    trace = read_trace(path)
    if trace.arrival is None:
        raise WorkloadError(f"{path}: a trace with arrivals is needed")
    return trace.arrival % HOUR, trace.lengths


def _draw(kind: Kind) -> tuple[np.ndarray, Lengths]:
    rng = np.random.default_rng((len(kind.name), kind.size))
    arrival = gamma_arrivals(kind.size / HOUR, kind.cv, kind.size, rng)
    return arrival / arrival[-1] * HOUR % HOUR, sampler(kind.drawn)(kind.size, rng)


def traffic(count: int, rate: float, seed: int, folder: str = "") -> Workload:
    """The requests of many users. At similar rates they are the same, at scaled arrivals.

    Args:
        count: Number of requests.
        rate: Mean requests/s.
        seed: Of the minutes at which the hours begin.
        folder: Has all of the traces; "" to draw.
    """
    hours, rng = _hours(folder), np.random.default_rng((seed, 17))
    natural = sum(len(arrival) for arrival, _ in hours) / HOUR
    beside = max(1, round(rate / natural))
    laps = int(np.ceil(count / (beside * natural * HOUR))) + 1
    phases = [rng.uniform(0.0, HOUR, (beside, laps)) for _ in hours]
    until = 1.1 * count / (beside * natural) + 1.0
    while len((found := _until(until, hours, phases))[0]) < count:
        until *= 2.0  # it began with a lull
    times, which, kind = found
    order = np.argsort(times, kind="stable")[:count]
    made = _workload(times[order], which[order], kind[order], hours)
    return made.at_rate(rate)


def _until(
    until: float, hours: list[tuple[np.ndarray, Lengths]], phases: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The requests before that time: arrival, index in their hour, and index of the hour, each [n].
    phases: for each hour, seconds into it at which the laps of its streams begin, [streams,
    laps]."""
    parts = []
    for number, (arrival, _) in enumerate(hours):
        starts = np.arange(phases[number].shape[1]) * HOUR
        for of_stream in phases[number]:
            times = (arrival[None, :] - of_stream[:, None]) % HOUR + starts[:, None]
            which = np.broadcast_to(np.arange(len(arrival)), times.shape)
            early = times.ravel() < until
            row = np.full(int(early.sum()), number)
            parts.append((times.ravel()[early], which.ravel()[early], row))
    times, which, kind = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return times, which, kind


def _workload(
    times: np.ndarray, which: np.ndarray, kind: np.ndarray, hours: list[tuple[np.ndarray, Lengths]]
) -> Workload:
    prompt, output = np.zeros(len(times), np.int64), np.zeros(len(times), np.int64)
    for number, (_, lengths) in enumerate(hours):
        mine = kind == number
        prompt[mine] = lengths.prompt_len[which[mine]]
        output[mine] = lengths.output_len[which[mine]]
    output = np.minimum(output, MOST_OUTPUT)
    prompt = np.minimum(prompt, LONGEST - MOST_OUTPUT)
    never = np.full(len(times), np.inf)
    terms = SloColumns(
        tier=np.zeros(len(times), np.int8),
        ttft=np.array([each.ttft for each in KINDS])[kind],
        tbt=np.full(len(times), TBT),
        jct=never,
        max_tbt=never,
        slo_class=kind,
        greedy=np.ones(len(times), bool),
        classes=tuple(each.name for each in KINDS),
    )
    limit = np.full(len(times), LONGEST) - prompt
    lengths = Lengths(prompt, output)
    return Workload.create(times - times[0], lengths, limit=limit, terms=terms)
