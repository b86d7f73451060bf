"""Targets of the load: an engine in this process, or a server."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxserve.client import Client, ServerError
from jaxserve.engine.errors import EngineStopped, QueueFull
from jaxserve.engine.output import FinishReason, Output
from jaxserve.engine.stats import EngineInfo
from jaxserve.sched.request import NO_CLASS, SLO, Program, Request, SamplingParams, Tier
from jaxserve.sched.slo.metrics import Times
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.server.requests.engine_client import EngineClient
from jaxserve.simulator.program_records import ProgramRecords
from jaxserve.simulator.workloads.releases import Releases
from jaxserve.simulator.workloads.workload import Workload

NO_SLO = SLO()
LONGEST_WAIT = 3600.0  # seconds, for a clock that takes no more at a time
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
        program: what it says of its program, if it is a call of one.
    """

    prompt: tuple[int, ...]
    output_len: int
    max_tokens: int
    slo: SLO = NO_SLO
    tier: Tier = Tier.REALTIME
    temperature: float = 0.0
    slo_class: str = NO_CLASS
    value: float = 1.0
    program: Program | None = None


@dataclass
class Record:
    """The outcome of one job.

    Attributes:
        sent: seconds on `clock`.
        token_times: times of the job's tokens, seconds on `clock`.
        tokens: the tokens, where the target has their ids.
        outcome: "finished", "rejected" (the queue was full) or "failed"; "" until it is done.
        preemptions: as counted by the server; 0 for a request that was cancelled over the network.
        error: why it was rejected or failed.
        prompt_tokens, cached_tokens: of the prompt, as the server counts them; 0 where it does not
            say.
    """

    sent: float
    token_times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: str = ""
    preemptions: int = 0
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Done(Protocol):
    """Hears that a job is done, like a semaphore."""

    def release(self) -> None:
        """The job is done. Any thread may call this, once."""
        ...


class Target(Protocol):
    """Serves jobs. `send` returns at once; it may release `done` on any thread."""

    def send(self, job: Job, record: Record, done: Done) -> None:
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

    def send(self, job: Job, record: Record, done: Done) -> None:
        """See `Target`."""
        self._sent += 1
        name = f"bench-{self._sent}"

        def on_output(output: Output) -> None:
            ended = book_times(record, job, output.token_times, output.token_ids)
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
        request = Request(
            name, *asked, slo_class=job.slo_class, value=job.value, program=job.program
        )
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

    def send(self, job: Job, record: Record, done: Done) -> None:
        """See `Target`."""
        threading.Thread(target=self._call, args=(job, record, done), daemon=True).start()

    def _call(self, job: Job, record: Record, done: Done) -> None:
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
                program=_said(job.program),
            )
            for message in generation:
                # A message may carry several tokens, which reached the caller together.
                times = [clock()] * len(message.token_ids)
                ended = book_times(record, job, times, message.token_ids)
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


def _said(program: Program | None) -> dict[str, Any] | None:
    """A program as the client takes it."""
    if program is None:
        return None
    deadline = None if program.deadline is None else 1e3 * program.deadline
    said = {"deadline_ms": deadline, "expected_calls": program.expected_calls}
    return {"id": program.id, "over": program.over, **said}


def book_times(
    record: Record, job: Job, times: Sequence[float], tokens: Sequence[int] = ()
) -> bool:
    """Records a job's tokens, but none beyond output_len, which come while it is cancelled.

    Args:
        record: Of the job.
        job: The job.
        times: When new tokens came, in seconds on `clock`.
        tokens: Their ids, if they are known.

    Returns:
        Whether the job has all of its tokens.
    """
    left = job.output_len - len(record.token_times)
    record.token_times.extend(times[:left])
    record.tokens.extend(tokens[:left])
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


class _Ended:
    """Tells a queue which job is done."""

    def __init__(self, ended: queue.SimpleQueue[int], number: int) -> None:
        self._ended, self._number = ended, number

    def release(self) -> None:
        self._ended.put(self._number)


@dataclass(frozen=True)
class Drive:
    """What became of a workload.

    Attributes:
        start: On `clock`.
        came: Numbers of the jobs that were sent, in order. The others are calls of programs that
            were given up.
        arrival: float64 [n], when each of these was due, in seconds since the start.
        records: Of each of these.
        programs: Records of the programs; None if there are none.
    """

    start: float
    came: list[int]
    arrival: np.ndarray
    records: list[Record]
    programs: ProgramRecords | None


def drive(
    target: Target, jobs: Sequence[Job], workload: Workload, served: np.ndarray | None = None
) -> Drive:
    """Sends each job when it is due and waits for all. No job waits for another's answer, but for
    those of programs that say so; their prompts then have the answers instead of random tokens.

    Args:
        target: Serves the jobs.
        jobs: Of the workload's requests.
        workload: When they are due.
        served: float64 [n], seconds of each on an idle target, for the slowdown of programs; None
            if not known.
    """
    releases, ended = Releases(workload), queue.SimpleQueue[int]()
    sent, records, running = dict[int, Job](), dict[int, Record](), 0
    name, start = uuid.uuid4().hex[:8], clock()
    while True:
        wait = start + releases.next_time - clock()
        if wait <= 0:
            number = releases.take_first()
            sent[number] = _with_answers(workload, jobs[number], number, sent, records)
            said = workload.programs.said(number, releases.left(number), f"{name}-")
            sent[number] = dataclasses.replace(sent[number], program=said)
            records[number], running = Record(sent=clock()), running + 1
            target.send(sent[number], records[number], _Ended(ended, number))
            continue
        if not running and wait == math.inf:
            break
        with contextlib.suppress(queue.Empty):
            number = ended.get(timeout=min(wait, LONGEST_WAIT))
            running -= 1
            if records[number].outcome == "finished":
                releases.ended(number, records[number].token_times[-1] - start)
            else:
                releases.gave_up(number, clock() - start)
    programs = None
    if workload.programs.closed:
        programs = ProgramRecords.from_releases(workload, releases, served)
    arrival = np.array(releases.arrival)[releases.came]
    return Drive(start, releases.came, arrival, list(records.values()), programs)


def _with_answers(
    workload: Workload,
    job: Job,
    number: int,
    sent: dict[int, Job],
    records: dict[int, Record],
) -> Job:
    """A call with what those before it in its program were asked and have answered."""
    source, shared = int(workload.prefix_of[number]), int(workload.prefix_len[number])
    programs = workload.programs.program
    if source not in sent or programs[number] < 0 or programs[source] != programs[number]:
        return job
    begin = (*sent[source].prompt, *records[source].tokens)[:shared]
    return dataclasses.replace(job, prompt=begin + job.prompt[len(begin) :])


def serve_all(
    target: Target, workload: Workload, rng: np.random.Generator
) -> tuple[float, list[Record]]:
    """Serves the workload with random prompts, each request to its end. Returns the start on
    `clock`, and the records. BenchError if the target cannot or does not serve a request."""
    info = target.info()
    check_fits(workload, info)
    jobs = random_jobs(workload, info["vocab_size"], rng)
    found = drive(target, jobs, workload)
    for job, record in zip(jobs, found.records, strict=True):
        if record.outcome != "finished":
            raise BenchError(f"a request was {record.outcome}: {record.error}")
        if len(record.token_times) != job.output_len:
            raise BenchError(f"{len(record.token_times)} tokens came, not {job.output_len}")
    return found.start, found.records


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
