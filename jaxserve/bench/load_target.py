"""Targets of the load: an engine in this process, or a server."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxserve.client import Client, ServerError
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import EngineInfo
from jaxserve.sched.request import NO_CLASS, SLO, Request, SamplingParams, Tier
from jaxserve.sched.slo.metrics import Times
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.simulator.workloads.workload import Workload

NO_SLO = SLO()
clock = time.monotonic
"""The engine's own clock, so that times on both sides can be compared."""


class BenchError(RuntimeError):
    """The measurement is not valid; the message says why in one line."""


@dataclass(frozen=True)
class Job:
    """One request to send.

    Attributes:
        prompt: token ids.
        output_len: tokens after which it ends.
        max_tokens: the requested limit. If it is more than output_len, the sender ends the request
            by cancelling, so that the server does not know its length in advance.
        slo: its targets.
        tier: real-time or best-effort.
        temperature: sampling temperature; 0 is greedy.
        slo_class, value: name of its class, and `Request.value`. Passed to an engine, but not to a
        server, which has its own classes and values.
    """

    prompt: tuple[int, ...]
    output_len: int
    max_tokens: int
    slo: SLO = NO_SLO
    tier: Tier = Tier.REALTIME
    temperature: float = 0.0
    slo_class: str = NO_CLASS
    value: float = 1.0


@dataclass
class Record:
    """The outcome of one job.

    Attributes:
        sent: seconds on `clock`.
        token_times: times of the job's tokens, seconds on `clock`.
        outcome: "finished", "rejected" (the queue was full) or "failed"; "" until it is done.
        preemptions: as counted by the server; 0 for a request that was cancelled over the network.
        error: why it was rejected or failed.
    """

    sent: float
    token_times: list[float] = field(default_factory=list)
    outcome: str = ""
    preemptions: int = 0
    error: str = ""


class Target(Protocol):
    """Serves jobs. `send` returns at once; it may release `done` on any thread."""

    def send(self, job: Job, record: Record, done: threading.Semaphore) -> None:
        """Serves the job, writes its outcome into the record, and then releases `done`."""
        ...

    def info(self) -> dict[str, Any]:
        """The fields of EngineInfo."""
        ...


class EngineTarget:
    """An engine in this process, started."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._sent = 0

    def info(self) -> dict[str, Any]:
        """The fields of EngineInfo."""
        return dataclasses.asdict(self._engine.info())

    def send(self, job: Job, record: Record, done: threading.Semaphore) -> None:
        """See `Target`."""
        self._sent += 1
        name = f"bench-{self._sent}"

        def on_output(output: Output) -> None:
            ended = book_times(record, job, output.token_times)
            if output.finish_reason is None:
                if ended and job.output_len < job.max_tokens:
                    self._engine.cancel(name)
                return
            by_itself = output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            complete = by_itself or (ended and output.finish_reason is FinishReason.CANCELLED)
            record.outcome = "finished" if complete else "failed"
            record.error = output.error
            record.preemptions = output.usage.preemptions if output.usage else 0
            done.release()

        sampling = SamplingParams(job.max_tokens, temperature=job.temperature, ignore_eos=True)
        asked = (job.prompt, sampling, job.slo, job.tier)
        request = Request(name, *asked, slo_class=job.slo_class, value=job.value)
        self._engine.check(request)
        try:
            self._engine.submit(request, on_output)
        except QueueFull as error:
            record.outcome, record.error = "rejected", str(error)
            done.release()
        except EngineStopped as error:
            record.outcome, record.error = "failed", str(error)
            done.release()


class ThreadedTarget(ABC):
    """A target with one thread per request: measured times include this client."""

    def send(self, job: Job, record: Record, done: threading.Semaphore) -> None:
        """See `Target`."""
        threading.Thread(target=self._call, args=(job, record, done), daemon=True).start()

    def _call(self, job: Job, record: Record, done: threading.Semaphore) -> None:
        try:
            self.serve(job, record)
        except Exception as error:  # on any error, so that the run does not wait for ever
            record.outcome, record.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            done.release()

    @abstractmethod
    def serve(self, job: Job, record: Record) -> None:
        """Serves the job and writes its outcome into the record. If it raises, the job has
        failed."""


class ServerTarget(ThreadedTarget):
    """A running server; a `Target`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def info(self) -> dict[str, Any]:
        """The fields of EngineInfo, from the server."""
        message = self._client.info(timeout=30.0)
        found = {f.name: getattr(message, f.name) for f in dataclasses.fields(EngineInfo)}
        return {**found, "sampling_defaults": dict(message.sampling_defaults)}

    def serve(self, job: Job, record: Record) -> None:
        """See `ThreadedTarget`."""
        targets = {name: getattr(job.slo, name) for name in ALL_TARGETS}
        try:
            generation = self._client.generate(
                job.prompt,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                temperature=job.temperature,
                slo={f"{name}_ms": t * 1e3 for name, t in targets.items() if t is not None},
                tier=job.tier.name.lower(),
            )
            for message in generation:
                # A message may carry several tokens, which reached the caller together.
                ended = book_times(record, job, [clock()] * len(message.token_ids))
                if message.HasField("finish"):
                    record.preemptions = message.finish.usage.preemptions
                    record.outcome = "finished"
                elif ended and job.output_len < job.max_tokens:
                    generation.cancel()
                    record.outcome = "finished"
                    break
        except ServerError as error:
            full = error.code == "RESOURCE_EXHAUSTED"
            record.outcome, record.error = "rejected" if full else "failed", str(error)


def book_times(record: Record, job: Job, times: Sequence[float]) -> bool:
    """Records the times of a job's tokens, without those beyond output_len that come while it is
    being cancelled. Returns whether the job has all of its tokens."""
    record.token_times.extend(times[: job.output_len - len(record.token_times)])
    return len(record.token_times) == job.output_len


def random_jobs(workload: Workload, vocab_size: int, rng: np.random.Generator) -> list[Job]:
    """Jobs with prompts of uniformly random token ids, and the workload's lengths, limits and SLOs.
    Prompts share tokens as in the workload. Random ids stand for shared answers, since a server's
    answer is not known in advance."""
    columns = (
        workload.prefix_of,
        workload.prefix_len,
        workload.prompt_len,
        workload.output_len,
        workload.limit,
        workload.tier,
        workload.greedy,
        workload.slo_class,
        workload.value,
        *(getattr(workload, name) for name in ALL_TARGETS),
    )

    def drawn(tokens: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab_size, tokens).tolist())

    jobs = list[Job]()
    answers = dict[int, tuple[int, ...]]()
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for source, shared, prompt, output, limit, tier, greedy, slo_class, value, *targets in rows:
        begin = jobs[source].prompt[:shared] if shared else ()
        if len(begin) < shared:
            if source not in answers:
                answers[source] = drawn(jobs[source].output_len)
            begin += answers[source][: shared - len(begin)]
        ids = begin + drawn(prompt - shared)
        slo = SLO(*(t if math.isfinite(t) else None for t in targets))
        sampled = 0.0 if greedy else 1.0
        name = workload.classes[slo_class]
        jobs.append(Job(ids, output, limit, slo, Tier(tier), sampled, name, value))
    return jobs


def check_fits(workload: Workload, info: dict[str, Any]) -> None:
    """BenchError if the model does not serve requests of these lengths and limits."""
    limit = min(info["max_model_len"], info["pool_tokens"])
    total = workload.prompt_len + workload.limit
    worst = int(total.argmax())
    if total[worst] > limit:
        asked, output = workload.limit[worst], workload.output_len[worst]
        more = f" of {asked} asked for" if asked > output else ""
        raise BenchError(
            f"request {worst + 1} has {workload.prompt_len[worst]} tokens in and {output} out"
            f"{more}; {info['model']} serves at most {limit} in all"
        )


def drive(target: Target, jobs: Sequence[Job], arrival: np.ndarray) -> tuple[float, list[Record]]:
    """Sends each job when it is due and waits for all. Open loop: no job waits for another's
    answer.

    Args:
        target: serves the jobs.
        jobs: in order of arrival.
        arrival: [len(jobs)], seconds after the start.

    Returns:
        The start on `clock`, and a record of each job.
    """
    done = threading.Semaphore(0)
    records: list[Record] = []
    start = clock()
    for job, due in zip(jobs, (start + arrival).tolist(), strict=True):
        wait = due - clock()
        if wait > 0:
            time.sleep(wait)
        records.append(Record(sent=clock()))
        target.send(job, records[-1], done)
    for _ in records:
        done.acquire()
    return start, records


def serve_all(
    target: Target, workload: Workload, rng: np.random.Generator
) -> tuple[float, list[Record]]:
    """Serves the workload with random prompts, each request to its end. Returns the start on
    `clock`, and the records. BenchError if the target cannot or does not serve a request."""
    info = target.info()
    check_fits(workload, info)
    jobs = random_jobs(workload, info["vocab_size"], rng)
    start, records = drive(target, jobs, workload.arrival)
    for job, record in zip(jobs, records, strict=True):
        if record.outcome != "finished":
            raise BenchError(f"a request was {record.outcome}: {record.error}")
        if len(record.token_times) != job.output_len:
            raise BenchError(f"{len(record.token_times)} tokens came, not {job.output_len}")
    return start, records


def last_token(records: Sequence[Record]) -> float:
    """When the last token came, on `clock`."""
    return max(record.token_times[-1] for record in records)


def times(due: np.ndarray, records: Sequence[Record]) -> Times:
    """The records as arrays. due: float64 [n], when each job was due to be sent, on `clock`."""
    return Times.from_tokens(
        due.tolist(),
        [record.token_times for record in records],
        [record.outcome == "finished" for record in records],
    )
