"""Results of a simulation: a record per request, a record per batch, and their summary."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.request import Rule, Tier
from jaxserve.sched.slo.metrics import (
    Attained,
    Times,
    attained,
    group_metrics,
    rate,
    span,
    split_metrics,
)
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.simulator.program_records import ProgramRecords
from jaxserve.simulator.settings import BATCH, REFUSED, BatchRows, Served
from jaxserve.simulator.workloads.workload import Workload

_SHARES = tuple(f"{name}_attainment" for name in ALL_TARGETS)


@dataclass(frozen=True)
class RequestRecords:
    """Arrays over the n requests of a simulation, in order of arrival. Times in seconds from the
    workload's start.

    Attributes:
        workload: The requests.
        preemptions: int64 [n], how often each lost its cache.
        replica: int64 [n], the replica that served it, or REFUSED.
        token_times: float64 [sum of tokens], when each token reached the host. Request i's are
            token_times[offsets[i] : offsets[i] + tokens[i]].
        tokens: int64 [n], tokens written: output_len, or less for requests that were refused,
            failed or had not ended at `end`.
        failed: bool [n], requests that ended early because all replicas had died.
        end: When the run was cut off; inf if it was not.
        found: int64 [n], cached tokens of each prompt; None without prefix caching.
        drafts, moves: See `Served`.
    """

    workload: Workload
    preemptions: np.ndarray
    replica: np.ndarray
    token_times: np.ndarray
    tokens: np.ndarray
    failed: np.ndarray
    end: float = math.inf
    found: np.ndarray | None = None
    drafts: tuple[np.ndarray, np.ndarray] | None = None
    moves: np.ndarray | None = None

    @classmethod
    def from_served(cls, served: Served, until: float) -> RequestRecords:
        """The records of a run that was cut off at `until`, seconds."""
        tokens, times = served.workload.output_len, served.token_times
        wrote = np.isfinite(times)
        if not wrote.all():
            tokens = np.add.reduceat(wrote, np.cumsum(tokens) - tokens, dtype=np.int64)
            times = times[wrote]
        return cls(
            served.workload,
            served.preemptions,
            served.replica,
            times,
            tokens,
            failed=served.failed,
            end=until,
            found=served.found,
            drafts=served.drafts,
            moves=served.moves,
        )

    def __len__(self) -> int:
        return len(self.workload)

    @property
    def arrival(self) -> np.ndarray:
        """float64 [n]."""
        return self.workload.arrival

    @property
    def prompt_len(self) -> np.ndarray:
        """int64 [n], tokens."""
        return self.workload.prompt_len

    @property
    def output_len(self) -> np.ndarray:
        """int64 [n], tokens."""
        return self.workload.output_len

    @property
    def refused(self) -> np.ndarray:
        """bool [n]."""
        return np.asarray(self.replica == REFUSED)

    @property
    def finished(self) -> np.ndarray:
        """Requests that have written their whole output, bool [n]."""
        return np.asarray(self.tokens == self.output_len)

    @property
    def times(self) -> Times:
        """The times in the form used for load tests."""
        going = ~self.finished & ~self.refused & ~self.failed
        return Times(self.arrival, self.token_times, self.tokens, self.finished, going, self.end)

    @property
    def offsets(self) -> np.ndarray:
        """Where each request's tokens begin in token_times, int64 [n]."""
        return self.times.offsets

    @property
    def first_token(self) -> np.ndarray:
        """When the first token came, float64 [n]; nan if there is none."""
        return self.times.first_token

    @property
    def finish(self) -> np.ndarray:
        """When the last token came, float64 [n]; nan if it has not."""
        return np.where(self.finished, self.times.last_token, np.nan)

    @property
    def left(self) -> np.ndarray:
        """When the request left: its last token, or the end of the run if it had not ended; float64
        [n]. nan if it was refused, or failed without a token."""
        over = self.finished | self.refused | self.failed
        return np.where(over, self.times.last_token, self.end)

    @property
    def ttft(self) -> np.ndarray:
        """Arrival to first token, float64 [n]; nan if there is none."""
        return self.times.ttft

    @property
    def latency(self) -> np.ndarray:
        """Arrival to last token, float64 [n]; nan if it has not come."""
        return self.finish - self.arrival

    @property
    def tpot(self) -> np.ndarray:
        """Mean time between tokens of each request with more than one, including preempted time,
        float64."""
        several = self.tokens > 1
        span = (self.times.last_token - self.first_token)[several]
        return np.asarray(span / (self.tokens[several] - 1))

    @property
    def tbt(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Times.tbt`."""
        return self.times.tbt


@dataclass(frozen=True)
class BatchRecords:
    """Arrays over the batches of a simulation, replica by replica, each in the order in which they
    ran.

    Attributes:
        start: Seconds.
        duration: Seconds.
        num_tokens: Tokens computed.
        num_decodes: Decodes in the batch.
        num_prefills: Prefill chunks in the batch.
        kv_used: Tokens that fit in the blocks in use.
        preemptions: Requests that lost their cache since the batch before.
        num_hidden: Requests in the batch with hidden caches.
        num_recomputed: Tokens computed again after their cache was lost.
        saved_slots, loaded_slots: Slots of one plane moved to and from host memory since the batch
            before.
        num_shared: Blocks that several requests hold.
        replica: Number of the replica.
    """

    start: np.ndarray
    duration: np.ndarray
    num_tokens: np.ndarray
    num_decodes: np.ndarray
    num_prefills: np.ndarray
    kv_used: np.ndarray
    preemptions: np.ndarray
    num_hidden: np.ndarray
    num_recomputed: np.ndarray
    saved_slots: np.ndarray
    loaded_slots: np.ndarray
    num_shared: np.ndarray
    replica: np.ndarray

    @classmethod
    def from_logs(cls, logs: list[np.ndarray]) -> BatchRecords:
        """Joins the logs of the replicas, arrays of BATCH."""
        table = np.concatenate(logs)
        columns = {name: table[name].copy() for name in BATCH.names or ()}
        replica = np.repeat(np.arange(len(logs)), [len(log) for log in logs])
        return cls(**columns, replica=replica)

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class SimulationResult:
    """The records of one simulation. Fields from `goodput_bound` to `found_by` are set only if the
    schedule was searched for (`oracle.search`).

    Attributes:
        requests: Records of the requests.
        batches: Records of the batches.
        rows: By replica and batch, which requests were in it; None if not recorded.
        kv_tokens: Size of the cache of one replica, tokens.
        seed_read: Whether the seed may change the outcome for the same workload.
        goodput_bound: Requests/s that no schedule exceeds, inf if there is no bound.
        search_runs: Schedules simulated.
        found_by: Name of the policy with the best schedule, see `oracle.search.Found`.
        expected: float64 [n], seconds to the first token as predicted on arrival; None if not
            requested.
        programs: Records of the programs that began; None if no request is of one.
    """

    requests: RequestRecords
    batches: BatchRecords
    rows: list[list[BatchRows]] | None
    kv_tokens: int
    seed_read: bool
    goodput_bound: float | None = None
    search_runs: int | None = None
    found_by: str | None = None
    expected: np.ndarray | None = None
    num_dropped: int = 0
    programs: ProgramRecords | None = None

    @property
    def lengthening(self) -> np.ndarray | None:
        """Seconds that best-effort requests added to each batch, float64 [batches], see
        `sched/slo/tiers.py`; None if rows were not recorded."""
        if self.rows is None:
            return None
        return np.array([one.lengthening for replica in self.rows for one in replica])

    def summary(self, rule: Rule = Rule.SERVER) -> dict[str, Any]:
        """The numbers of one run, in seconds unless the name says milliseconds. None for a mean or
        a rate of nothing, for example if every request was refused.

        Args:
            rule: When a request attains its SLO.

        Returns:
            latency_s: Sum of the batch times (InferMax section 4.1) of the busiest replica.
            makespan_s: First arrival to last token, or to the end of a run that was cut off.
            tps: Generated tokens over latency_s.
            mean_tpot_s: Over requests with more than one token, including preempted time.
            slo_attainment: Share of the requests with targets that finished within all of their own
            (`sched/slo/metrics.py`); None if no request has any.
            ttft_attainment, tbt_attainment, jct_attainment, max_tbt_attainment: The same for one
            target, among requests that have it.
            num_refused: Requests that found the queue full; they attain nothing and are in no
            latency.
            num_failed: Requests that ended early because all replicas had died.
            num_dropped: Requests that were left out as too long; they are counted nowhere else.
            saved_slots, loaded_slots: Slots of one plane moved to and from host memory.
            mean_shared_blocks, peak_shared_blocks: Blocks that several requests hold, over the time
                of the batches.
            drafted_tokens, accepted_tokens: Drafted tokens that were computed, and accepted ones;
            only if tokens could be drafted.
            goodput_bound_per_s, search_runs: See the fields; only if the schedule was searched for.
            programs: See `ProgramRecords.summary`; only if there are programs.
            tiers, classes: The same by name, see `metrics.group_metrics`.
        """
        requests, batches = self.requests, self.batches
        latency = float(np.bincount(batches.replica, weights=batches.duration).max(initial=0.0))
        times, terms = requests.times, requests.workload.terms
        met = attained(times, terms)
        total = group_metrics(times, terms, met, rule=rule)
        tokens, slo = len(requests.token_times), total["slo"] or {}
        size, kv_used = batches.num_decodes + batches.num_prefills, batches.kv_used
        return {
            "latency_s": latency,
            "makespan_s": span(times),
            "tps": rate(tokens, latency),
            "mean_ttft_s": _mean(requests.ttft[requests.tokens > 0]),
            "mean_tpot_s": _mean(requests.tpot),
            "num_batches": len(batches),
            "num_preemptions": int(batches.preemptions.sum()),
            **({} if requests.moves is None else {"num_moves": int(requests.moves.sum())}),
            "recomputed_tokens": int(batches.num_recomputed.sum()),
            "saved_slots": int(batches.saved_slots.sum()),
            "loaded_slots": int(batches.loaded_slots.sum()),
            "slo_attainment": slo.get("attainment"),
            **{name: slo.get(name) for name in (*_SHARES, "goodput_per_s")},
            **self._search(),
            "num_requests": len(requests),
            "num_refused": int(requests.refused.sum()),
            "num_failed": int(requests.failed.sum()),
            "num_dropped": self.num_dropped,
            "num_finished": total["finished"],
            "finished_per_s": total["finished_per_s"],
            "output_tokens": tokens,
            **self._reuse(),
            **self._drafts(),
            **{n: total[n] for n in ("ttft_ms", "tbt_ms", "e2e_ms", "normalised_latency_ms")},
            "mean_batch_requests": _mean(size),
            "mean_kv_used": _share(_mean(kv_used, batches.duration), self.kv_tokens),
            "peak_kv_used": float(kv_used.max(initial=0)) / self.kv_tokens,
            "mean_shared_blocks": _mean(batches.num_shared, batches.duration),
            "peak_shared_blocks": int(batches.num_shared.max(initial=0)),
            **split_metrics(times, terms, met, total, rule),
            **({} if self.programs is None else {"programs": self.programs.summary()}),
        }

    def _reuse(self) -> dict[str, Any]:
        found, prompts = self.requests.found, int(self.requests.prompt_len.sum())
        if found is None:
            return {}
        return {"cached_tokens": int(found.sum()), "cache_hit_rate": float(found.sum()) / prompts}

    def _drafts(self) -> dict[str, Any]:
        drafts = self.requests.drafts
        if drafts is None:
            return {}
        return {"drafted_tokens": int(drafts[0].sum()), "accepted_tokens": int(drafts[1].sum())}

    @property
    def met(self) -> Attained:
        """Which targets each request met."""
        return attained(self.requests.times, self.requests.workload.terms)

    @property
    def attained(self) -> np.ndarray:
        """Which requests attained their SLO by a server's verdict, bool [n]."""
        return self.met.slo()

    def _search(self) -> dict[str, Any]:
        if self.goodput_bound is None:
            return {}
        bound = self.goodput_bound if math.isfinite(self.goodput_bound) else None
        return {"goodput_bound_per_s": bound, "search_runs": self.search_runs}

    def request_table(self) -> dict[str, np.ndarray]:
        """Columns of the per-request table, [n] each: limit is the requested max_tokens; slo_ttft,
        slo_tbt, slo_jct and slo_max_tbt are the requested targets in seconds, inf for none; replica
        is REFUSED, and times are nan, if the queue was full; attained is None for requests without
        targets. If there are programs, program is the number of each request's."""
        r, asked = self.requests, self.requests.workload
        attained = self.attained.astype(object)
        attained[~asked.terms.asked] = None
        names = ("arrival", "prompt_len", "output_len", "first_token", "finish", "preemptions")
        return {
            "request": np.arange(len(r)),
            **{name: getattr(r, name) for name in names},
            "replica": r.replica,
            "limit": asked.limit,
            "tier": np.array([tier.name.lower() for tier in Tier])[asked.tier],
            "class": np.array(asked.classes)[asked.slo_class],
            "greedy": asked.greedy,
            **{f"slo_{name}": getattr(asked, name) for name in ALL_TARGETS},
            "value": asked.value,
            "attained": attained,
            **({"program": asked.programs.program} if self.programs is not None else {}),
        }

    def batch_table(self) -> dict[str, np.ndarray]:
        """Columns of the per-batch table, [batches] each."""
        return {"batch": np.arange(len(self.batches)), **vars(self.batches)}

    def program_table(self) -> dict[str, np.ndarray]:
        """Columns of the per-program table, see `ProgramRecords.table`. Raises ValueError if there
        are no programs."""
        if self.programs is None:
            raise ValueError("programs_table: no request is of a program")
        return self.programs.table()


def _mean(values: np.ndarray, weights: np.ndarray | None = None) -> float | None:
    return float(np.average(values, weights=weights)) if len(values) else None


def _share(value: float | None, whole: float) -> float | None:
    return None if value is None else value / whole


def write_table(columns: dict[str, np.ndarray], path: str | Path) -> None:
    """Writes a CSV file with a header, or a JSON list of objects if the name ends in .json. Values
    that are not finite become empty cells, or null."""
    cells = (_cells(column) for column in columns.values())
    rows: Iterator[tuple[Any, ...]] = zip(*cells, strict=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        if str(path).endswith(".json"):
            json.dump([dict(zip(columns, row, strict=True)) for row in rows], file)
            file.write("\n")
        else:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(rows)


def _cells(column: np.ndarray) -> list[Any]:
    if column.dtype.kind != "f":
        return column.tolist()
    finite = np.isfinite(column)
    return [value if ok else None for value, ok in zip(column.tolist(), finite, strict=True)]
