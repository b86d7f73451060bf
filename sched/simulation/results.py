"""What a simulation gives: one record a request, one a batch, and their summary."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.metrics import attained, summarise
from jaxserve.sched.request import SLO
from jaxserve.sched.simulation.replica import BATCH_COLUMNS, BatchRows


@dataclass(frozen=True)
class RequestRecords:
    """Arrays over the n requests, in order of arrival. Times in seconds from the workload's start.

    token_times: float64 [sum of output_len], when each token reached the host; request i's are
    token_times[offsets[i] : offsets[i] + output_len[i]]. preemptions: how often its cache was
    taken away. replica: who served it.
    """

    arrival: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray
    preemptions: np.ndarray
    replica: np.ndarray
    token_times: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def first_token(self) -> np.ndarray:
        return np.asarray(self.token_times[self.offsets])

    @property
    def finish(self) -> np.ndarray:
        return np.asarray(self.token_times[self.offsets + self.output_len - 1])

    @property
    def ttft(self) -> np.ndarray:
        """Arrival to first token."""
        return np.asarray(self.first_token - self.arrival)

    @property
    def latency(self) -> np.ndarray:
        """Arrival to last token."""
        return np.asarray(self.finish - self.arrival)

    @property
    def tpot(self) -> np.ndarray:
        """Mean time between tokens of each request that has more than one, preempted time
        included."""
        several = self.output_len > 1
        span = (self.finish - self.first_token)[several]
        return np.asarray(span / (self.output_len[several] - 1))

    @property
    def tbt(self) -> tuple[np.ndarray, np.ndarray]:
        """Times between tokens of all requests one after the other, and each one's share of them:
        float64 [sum of output_len - n], int64 [n]."""
        gaps = np.diff(self.token_times, prepend=0.0)
        within = np.ones(len(gaps), bool)
        within[self.offsets] = False
        return gaps[within], self.output_len - 1


@dataclass(frozen=True)
class BatchRecords:
    """Arrays over the batches, replica by replica, each in the order in which they ran. start and
    duration in seconds; num_tokens computed; kv_used: tokens that the cache has room for, whole
    blocks; preemptions: requests that lost their cache when the batch was planned; num_hidden:
    requests of it with hidden caches."""

    start: np.ndarray
    duration: np.ndarray
    num_tokens: np.ndarray
    num_decodes: np.ndarray
    num_prefills: np.ndarray
    kv_used: np.ndarray
    preemptions: np.ndarray
    num_hidden: np.ndarray
    replica: np.ndarray

    @classmethod
    def of(cls, logs: list[np.ndarray]) -> BatchRecords:
        """logs: one array [batches, len(BATCH_COLUMNS)] a replica."""
        table = np.concatenate(logs)
        columns = dict(zip(BATCH_COLUMNS, table.T, strict=True))
        times = {name: columns.pop(name) for name in ("start", "duration")}
        counts = {name: column.astype(np.int64) for name, column in columns.items()}
        replica = np.repeat(np.arange(len(logs)), [len(log) for log in logs])
        return cls(**times, **counts, replica=replica)

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class SimulationResult:
    """requests, batches: see there. rows: per replica and batch who was in it, if that was asked
    for. kv_tokens: the size of the cache, in tokens."""

    requests: RequestRecords
    batches: BatchRecords
    rows: list[list[BatchRows]] | None
    kv_tokens: int

    def summary(self, slo: SLO | None = None) -> dict[str, Any]:
        """The numbers of one run; seconds, or milliseconds where the name says so.

        latency_s: sum of the batch times (InferMax section 4.1), of the busiest replica.
        makespan_s: first arrival to last token. tps: generated tokens over latency_s. mean_tpot_s:
        over requests with more than one token, preempted time included. slo_attainment: share of
        the requests whose TTFT, and whose 99th percentile of TBT, are within them; 1 if there
        are none.
        """
        requests, batches = self.requests, self.batches
        busy = np.bincount(batches.replica, weights=batches.duration)
        latency = float(busy.max())
        tbt, shares = requests.tbt
        tokens = len(requests.token_times)
        tpot = requests.tpot
        met = attained(requests.ttft, tbt, shares, slo or SLO())
        makespan = float(requests.finish.max() - requests.arrival[0])
        return {
            "latency_s": latency,
            "makespan_s": makespan,
            "tps": tokens / latency,
            "mean_ttft_s": float(requests.ttft.mean()),
            "mean_tpot_s": float(tpot.mean()) if len(tpot) else 0.0,
            "num_batches": len(batches),
            "num_preemptions": int(batches.preemptions.sum()),
            "slo_attainment": float(met.mean()),
            "goodput_per_s": float(met.sum()) / makespan,
            "num_requests": len(requests),
            "output_tokens": tokens,
            "ttft_ms": summarise(requests.ttft, 1e3),
            "tbt_ms": summarise(tbt, 1e3),
            "e2e_ms": summarise(requests.latency, 1e3),
            "mean_batch_requests": float((batches.num_decodes + batches.num_prefills).mean()),
            "mean_kv_used": float(
                np.average(batches.kv_used, weights=batches.duration) / self.kv_tokens
            ),
            "peak_kv_used": float(batches.kv_used.max()) / self.kv_tokens,
        }

    def request_table(self) -> dict[str, np.ndarray]:
        """Columns of the per-request table."""
        r = self.requests
        names = ("arrival", "prompt_len", "output_len", "first_token", "finish", "preemptions")
        columns = {name: getattr(r, name) for name in names}
        return {"request": np.arange(len(r)), **columns, "replica": r.replica}

    def batch_table(self) -> dict[str, np.ndarray]:
        """Columns of the per-batch table."""
        return {"batch": np.arange(len(self.batches)), **vars(self.batches)}


def write_table(columns: dict[str, np.ndarray], path: str | Path) -> None:
    """A CSV file with a header, or where the name ends in .json a JSON list of objects."""
    rows: Iterator[tuple[Any, ...]] = zip(*(c.tolist() for c in columns.values()), strict=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        if str(path).endswith(".json"):
            json.dump([dict(zip(columns, row, strict=True)) for row in rows], file)
            file.write("\n")
        else:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)
