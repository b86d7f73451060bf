"""Whom the load goes to: an engine in this process, or a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxserve.client import Client, ServerError
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.sched.metrics import RequestTimes
from jaxserve.sched.request import SLO, Request, SamplingParams
from jaxserve.sched.workloads.workload import Workload

clock = time.monotonic
"""The engine's own clock, so that times of both sides can be compared."""


class BenchError(RuntimeError):
    """The measurement is not valid; the message says why, in one line."""


@dataclass(frozen=True)
class Job:
    """One request to send."""

    prompt: tuple[int, ...]
    output_len: int


@dataclass
class Record:
    """What came of one job. outcome: finished, rejected (the queue was full) or failed."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    outcome: str = ""
    preemptions: int = 0
    error: str = ""


class Target(Protocol):
    """Serves jobs. `send` returns at once; `on_done` may be called on any thread."""

    def send(self, job: Job, slo: SLO, record: Record, done: threading.Semaphore) -> None: ...

    def info(self) -> dict[str, Any]:
        """The fields of EngineInfo."""
        ...


class SubmittingEngine(Protocol):
    """What is needed of an engine."""

    def submit(self, request: Request, on_output: Any) -> None: ...

    def info(self) -> Any: ...


class EngineTarget:
    """An engine in this process, started."""

    def __init__(self, engine: SubmittingEngine) -> None:
        self._engine = engine
        self._sent = 0

    def info(self) -> dict[str, Any]:
        return dict(vars(self._engine.info()))

    def send(self, job: Job, slo: SLO, record: Record, done: threading.Semaphore) -> None:
        def on_output(output: Output) -> None:
            record.token_times.extend(output.token_times)
            if output.finish_reason is None:
                return
            complete = output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            record.outcome = "finished" if complete else "failed"
            record.error = output.error
            record.preemptions = output.usage.preemptions if output.usage else 0
            done.release()

        self._sent += 1
        sampling = SamplingParams(max_tokens=job.output_len, ignore_eos=True)
        request = Request(f"bench-{self._sent}", job.prompt, sampling, slo)
        try:
            self._engine.submit(request, on_output)
        except QueueFull as error:
            record.outcome, record.error = "rejected", str(error)
            done.release()
        except EngineStopped as error:
            record.outcome, record.error = "failed", str(error)
            done.release()


class ServerTarget:
    """A running server. One thread a request: what is timed includes this client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def info(self) -> dict[str, Any]:
        message = self._client.info(timeout=30.0)
        return {f.name: getattr(message, f.name) for f in message.DESCRIPTOR.fields}

    def send(self, job: Job, slo: SLO, record: Record, done: threading.Semaphore) -> None:
        run = threading.Thread(target=self._call, args=(job, slo, record, done), daemon=True)
        run.start()

    def _call(self, job: Job, slo: SLO, record: Record, done: threading.Semaphore) -> None:
        targets = {"ttft_ms": slo.ttft, "tbt_ms": slo.tbt}
        try:
            for message in self._client.generate(
                job.prompt,
                max_tokens=job.output_len,
                ignore_eos=True,
                slo={name: value * 1e3 for name, value in targets.items() if value is not None},
            ):
                # A message may carry several tokens: they reached the caller together.
                record.token_times.extend([clock()] * len(message.token_ids))
                if message.HasField("finish"):
                    record.preemptions = message.finish.usage.preemptions
                    record.outcome = "finished"
        except ServerError as error:
            full = error.code == "RESOURCE_EXHAUSTED"
            record.outcome, record.error = "rejected" if full else "failed", str(error)
        except Exception as error:  # whatever it is, the run must not wait for ever
            record.outcome, record.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            done.release()


def random_jobs(workload: Workload, vocab_size: int, rng: np.random.Generator) -> list[Job]:
    """Prompts of uniformly random token ids."""
    lengths = zip(workload.prompt_len.tolist(), workload.output_len.tolist(), strict=True)
    return [Job(tuple(rng.integers(0, vocab_size, p).tolist()), o) for p, o in lengths]


def check_fits(workload: Workload, info: dict[str, Any]) -> None:
    """BenchError if the model does not serve requests of these lengths."""
    limit = min(info["max_model_len"], info["pool_tokens"])
    total = workload.prompt_len + workload.output_len
    worst = int(total.argmax())
    if total[worst] > limit:
        raise BenchError(
            f"request {worst + 1} has {workload.prompt_len[worst]} tokens in and "
            f"{workload.output_len[worst]} out; {info['model']} serves at most {limit} in all"
        )


def drive(
    target: Target, jobs: Sequence[Job], arrival: np.ndarray, slo: SLO
) -> tuple[float, list[Record]]:
    """Sends each job when it is due and waits for all. Open loop: nothing waits for an answer.

    arrival: seconds after the start, [len(jobs)]. Returns the start on `clock`, and the records.
    """
    done = threading.Semaphore(0)
    records: list[Record] = []
    start = clock()
    for job, due in zip(jobs, (start + arrival).tolist(), strict=True):
        wait = due - clock()
        if wait > 0:
            time.sleep(wait)
        records.append(Record(sent=clock()))
        target.send(job, slo, records[-1], done)
    for _ in records:
        done.acquire()
    return start, records


def must_finish(jobs: Sequence[Job], records: Sequence[Record]) -> None:
    """BenchError unless every job got all of its tokens."""
    for job, record in zip(jobs, records, strict=True):
        if record.outcome != "finished":
            raise BenchError(f"a request was {record.outcome}: {record.error}")
        if len(record.token_times) != job.output_len:
            raise BenchError(f"{len(record.token_times)} tokens came, not {job.output_len}")


def times(due: float, record: Record) -> RequestTimes:
    return RequestTimes(due, np.array(record.token_times), record.outcome == "finished")
