"""Closed sessions: conversations, loops of agents, and research that fans out, in which a call
comes only after those that it waits for have ended.

Each session is a program. A person thinks, or a tool runs, between an answer and the call that
contains it. The lengths are those of `sessions.py`, and so are most turns.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.simulator.workloads.lengths import Distribution, Moments, Uniform
from jaxserve.simulator.workloads.prefixes import NO_PREFIX, Prefixes
from jaxserve.simulator.workloads.programs import NO_TOOL, Programs
from jaxserve.simulator.workloads.sessions import SESSIONS, Sessions, Starts
from jaxserve.simulator.workloads.workload import Lengths, WorkloadError, check_count

LONGEST_TOOL = 600.0  # seconds after which a tool is stopped
# Seconds per token that no system beats, to draw enough programs where some begin as others end.
FASTEST = 1e-3
_SAMPLE = 4  # chunks from which the mean number of calls is estimated


@dataclass(frozen=True)
class Tool:
    """A tool, whose times are log-normal, and at most LONGEST_TOOL.

    Attributes:
        name: Its name.
        share: Its share of the calls.
        median: Seconds.
        spread: Standard deviation of the logarithm of its times.
    """

    name: str
    share: float
    median: float
    spread: float


@dataclass(frozen=True)
class Calls:
    """n calls, program by program, parents before their children.

    Attributes:
        program: int64 [n], ascending from 0.
        prompt, output: int64 [n], tokens.
        fresh: int64 [n], index of the system prompt with which a call begins that goes on with no
            other; -1 for one that does.
        source: int64 [n], the call that it goes on with; NO_PREFIX for none.
        shared: int64 [n], tokens that it has from that one, or from the system prompt.
        wait: float64 [n], seconds, see `Programs`.
        tool: int64 [n], see `Programs`.
        parent, child: int64 [m], see `Programs`.
    """

    program: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    fresh: np.ndarray
    source: np.ndarray
    shared: np.ndarray
    wait: np.ndarray
    tool: np.ndarray
    parent: np.ndarray
    child: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Calls]) -> Calls:
        """The parts one after another, each with programs of its own."""
        found, first, programs = list[Calls](), 0, 0
        for part in parts:
            source = np.where(part.source >= 0, part.source + first, NO_PREFIX)
            moved = dataclasses.replace(
                part,
                program=part.program + programs,
                source=source,
                parent=part.parent + first,
                child=part.child + first,
            )
            found.append(moved)
            first, programs = first + len(part.program), programs + int(part.program[-1]) + 1
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(one, name) for one in found]) for name in names))

    def first(self, count: int) -> Calls:
        """The calls of the first `count` programs."""
        calls = int(np.searchsorted(self.program, count))
        edges = int(np.searchsorted(self.child, calls))
        columns = {name: getattr(self, name) for name in vars(self)}
        return Calls(
            **{n: c[: edges if n in ("parent", "child") else calls] for n, c in columns.items()}
        )

    def prefixes(self) -> Prefixes:
        """What calls share with those that they go on with, and all that begin with the same system
        prompt with the first of these."""
        source = self.source.copy()
        for system in np.unique(self.fresh[self.fresh >= 0]).tolist():
            same = np.flatnonzero(self.fresh == system)
            source[same[1:]] = same[0]
        return Prefixes(source, np.where(source >= 0, self.shared, 0))


class Family(Hashable, Protocol):
    """A distribution of programs."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that its calls use; none if a person thinks between them."""
        ...

    @property
    def planned(self) -> bool:
        """Whether calls say how many are still to come."""
        ...

    @property
    def source(self) -> str:
        """Where the numbers are from, or that they are assumed."""
        ...

    def draw(self, chunk: int, seed: int) -> Calls:
        """Draws a chunk of programs, the same for the same number and seed."""
        ...


@dataclass(frozen=True)
class Chain:
    """Sessions, each call of which waits for the one before.

    Attributes:
        sessions: Their lengths and turns. `pause` is how long a person thinks; `pace`, and the
            pause of those with tools, do not count here.
        tools: The tools that run between two calls, one each time.
        source: See `Family`.

    Raises:
        WorkloadError: Several sessions start together: here each is a program of its own.
    """

    sessions: Sessions
    tools: tuple[Tool, ...]
    source: str
    planned: bool = False

    def __post_init__(self) -> None:
        if self.sessions.together != 1:
            raise WorkloadError(f"a chain starts alone, not {self.sessions.together} together")

    def draw(self, chunk: int, seed: int) -> Calls:
        """See `Family`."""
        turns, rng = self.sessions.turns_of(chunk, seed), np.random.default_rng((seed, 2, chunk))
        number, goes_on = np.arange(len(turns.turn)), turns.turn > 0
        total, systems = turns.prompt + turns.output, np.array(self.sessions.system_prompts)
        wait, tool = (
            rng.exponential(self.sessions.pause, len(number)),
            np.full(len(number), NO_TOOL),
        )
        if self.tools:
            wait, tool = tool_times(self.tools, len(number), rng)
        return Calls(
            program=np.cumsum(~goes_on) - 1,
            prompt=turns.prompt,
            output=turns.output,
            fresh=np.where(goes_on, -1, turns.system),
            source=np.where(goes_on, number - 1, NO_PREFIX),
            shared=np.where(goes_on, total[number - 1], systems[turns.system]),
            wait=np.where(goes_on, wait, 0.0),
            tool=np.where(goes_on, tool, NO_TOOL),
            parent=number[goes_on] - 1,
            child=number[goes_on],
        )


@dataclass(frozen=True)
class Research:
    """Programs that plan, work in several branches at once, and write a report of what these found.

    The report goes on with the plan, and waits for all branches. A branch is a loop with tools,
    with a system prompt and a task of its own.

    Attributes:
        planner, worker: Tokens of the system prompts of plan and report, and of the branches.
        question: Tokens of what is asked for.
        plan: Output of the first call.
        branches: Number of branches.
        calls: Calls of a branch.
        task: Tokens of a branch's task.
        result: Tokens of a tool's result.
        output: Output of a branch's calls; that of its last one goes into the report's prompt.
        report: Output of the last call.
        max_context: Most tokens of a prompt and its output; a branch ends before a call that
            exceeds it.
        tools: The tools of the branches.
        source: See `Family`.

    Raises:
        WorkloadError: A report, or the first call of a branch, may have more tokens than
            `max_context`.
    """

    planner: int
    worker: int
    question: Distribution
    plan: Distribution
    branches: Uniform
    calls: Uniform
    task: Distribution
    result: Distribution
    output: Distribution
    report: Distribution
    max_context: int
    tools: tuple[Tool, ...]
    source: str
    planned: bool = True

    PROGRAMS = 32  # of a chunk

    def __post_init__(self) -> None:
        begin = self.planner + self.question.high + self.plan.high
        longest = max(
            begin + self.branches.high * self.output.high + self.report.high,
            self.worker + self.task.high + self.output.high,
        )
        if longest > self.max_context:
            raise WorkloadError(
                f"a call may have {longest} tokens, more than max_context, {self.max_context}"
            )

    def draw(self, chunk: int, seed: int) -> Calls:
        """See `Family`."""
        rng = np.random.default_rng((seed, 1, chunk))
        rows = list[
            tuple[int, ...]
        ]()  # program, prompt, output, fresh, source, shared, uses a tool
        edges = list[tuple[int, int]]()
        columns = (self.question, self.plan, self.report, self.branches)
        drawn = zip(*(one.sample(self.PROGRAMS, rng).tolist() for one in columns), strict=True)
        for program, (question, plan, report, branches) in enumerate(drawn):
            first, asked = len(rows), self.planner + question
            rows.append((program, asked, plan, 0, NO_PREFIX, self.planner, 0))
            ends, found = list[int](), 0
            for _ in range(branches):
                last, said = self._branch(rows, edges, first, rng)
                ends.append(last)
                found += said
            begin = asked + plan
            rows.append((program, begin + found, report, -1, first, begin, 0))
            edges += [(end, len(rows) - 1) for end in ends]
        program, prompt, output, fresh, source, shared, uses = np.array(rows, np.int64).T
        wait, tool = tool_times(self.tools, len(rows), rng)
        parent, child = np.array(edges, np.int64).T
        return Calls(
            *(program, prompt, output, fresh, source, shared),
            wait=np.where(uses > 0, wait, 0.0),
            tool=np.where(uses > 0, tool, NO_TOOL),
            parent=parent,
            child=child,
        )

    def _branch(
        self,
        rows: list[tuple[int, ...]],
        edges: list[tuple[int, int]],
        plan: int,
        rng: np.random.Generator,
    ) -> tuple[int, int]:
        """Adds a branch to the calls and edges. Returns its last call, and that one's output."""
        count = int(self.calls.sample(1, rng)[0])
        new = [*self.task.sample(1, rng).tolist(), *self.result.sample(count - 1, rng).tolist()]
        before, said, last = self.worker, 0, plan
        for turn, (more, output) in enumerate(
            zip(new, self.output.sample(count, rng), strict=True)
        ):
            prompt = before + more
            if prompt + output > self.max_context:
                break
            fresh, source, shared = (1, NO_PREFIX, self.worker) if not turn else (-1, last, before)
            rows.append((rows[plan][0], prompt, int(output), fresh, source, shared, int(turn > 0)))
            edges.append((last, len(rows) - 1))
            before, said, last = prompt + int(output), int(output), len(rows) - 1
        return last, said


def tool_times(
    tools: Sequence[Tool], count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws which tools run, and how long.

    Args:
        tools: At least one.
        count: Number of times that a tool runs.
        rng: Random numbers.

    Returns:
        Seconds, float64 [count], and indices into tools, int64 [count].
    """
    shares = np.array([tool.share for tool in tools])
    which = rng.choice(len(tools), count, p=shares / shares.sum())
    median, spread = (np.array([getattr(t, n) for t in tools])[which] for n in ("median", "spread"))
    return np.minimum(median * np.exp(spread * rng.standard_normal(count)), LONGEST_TOOL), which


@functools.cache
def mean_calls(family: Family) -> float:
    """Mean calls of a program. The same for every seed."""
    chunks = [family.draw(chunk, 0) for chunk in range(_SAMPLE)]
    return sum(len(one.program) for one in chunks) / sum(int(one.program[-1]) + 1 for one in chunks)


def sample(
    family: Family,
    count: int,
    rng: np.random.Generator,
    *,
    rate: float,
    starts: Starts,
    at_once: int = 0,
) -> tuple[np.ndarray, Lengths, Prefixes, Programs]:
    """Draws whole programs with at least `count` calls. The first begins when nothing else does.

    Args:
        family: Their distribution.
        count: Calls.
        rng: Random numbers.
        rate: Calls/s on average, if programs begin at times of their own.
        starts: When they begin then.
        at_once: Programs in progress at a time, 0 for times of their own.

    Returns:
        The earliest times at which calls may arrive, float64 [n], in seconds, ascending; if
        programs begin as others end, on a system with FASTEST. Lengths, shared prefixes, programs.

    Raises:
        WorkloadError: count is below 1, or the rate is not positive.
    """
    check_count(count)
    seed, chunks, known = int(rng.integers(2**62)), list[Calls](), 0
    while known < count:
        chunks.append(family.draw(len(chunks), seed))
        known += len(chunks[-1].program)
    calls = Calls.joined(chunks)
    many = int(calls.program[count - 1]) + 1
    calls = calls.first(many)
    size = len(calls.program)
    programs = Programs(
        program=calls.program,
        wait=calls.wait,
        tool=calls.tool,
        deadline=np.full(size, math.inf),
        told=np.full(size, family.planned),
        parent=calls.parent,
        child=calls.child,
        tools=tuple(tool.name for tool in family.tools),
        at_once=at_once,
    )
    if at_once:
        served = calls.output * FASTEST
        alone = programs.earliest(np.zeros(size), served) + served
        begin = _in_turn(
            np.maximum.reduceat(alone, np.searchsorted(calls.program, range(many))), at_once
        )
    else:
        served = np.zeros(size)
        begin = starts(rate / mean_calls(family), many, np.random.default_rng((seed, 0)))
    earliest = programs.earliest(begin[calls.program], served)
    order = np.argsort(earliest, kind="stable")
    prefixes = calls.prefixes().in_order(order, calls.prompt)
    lengths = Lengths(calls.prompt[order], calls.output[order])
    return earliest[order], lengths, prefixes, programs.select(order)


def _in_turn(lasts: np.ndarray, at_once: int) -> np.ndarray:
    """When programs begin that take so long, float64 [p], with so many in progress at a time."""
    ends, found = [0.0] * at_once, list[float]()
    for seconds in lasts.tolist():
        found.append(ends[0])
        heapq.heapreplace(ends, found[-1] + seconds)
    return np.array(found)


# All assumed: most tools read a file or look something up at once, a few run for long. Tests of a
# project take from a second to minutes.
AGENT_TOOLS = (
    Tool("read_file", 0.4, median=0.05, spread=0.8),
    Tool("edit_file", 0.2, median=0.05, spread=0.8),
    Tool("search", 0.2, median=0.3, spread=1.0),
    Tool("run_tests", 0.15, median=6.0, spread=1.2),
    Tool("fetch_page", 0.05, median=1.5, spread=1.0),
)
RESEARCH_TOOLS = (
    Tool("web_search", 0.5, median=0.8, spread=0.7),
    Tool("fetch_page", 0.45, median=1.5, spread=1.0),
    Tool("run_code", 0.05, median=3.0, spread=1.3),
)
CLOSED_SESSIONS: dict[str, Family] = {
    # As `conversation`, which thinks for 30 s on average.
    "closed-conversation": Chain(SESSIONS["conversation"], (), SESSIONS["conversation"].source),
    # As `agent`, one loop at a time, whose tools take 2.1 s on average.
    "closed-agent": Chain(
        dataclasses.replace(SESSIONS["agent"], together=1.0), AGENT_TOOLS, "assumed"
    ),
    # All assumed. A question of a paragraph, a plan of a page, 2 to 6 branches of 2 to 6 calls,
    # whose results are pages, and a report of several pages.
    "closed-research": Research(
        planner=1500,
        worker=2500,
        question=Moments(200, 200, 2048),
        plan=Moments(300, 150, 1024),
        branches=Uniform(2, 6),
        calls=Uniform(2, 6),
        task=Moments(150, 80, 1024),
        result=Moments(1500, 1500, 8192),
        output=Moments(250, 200, 1024),
        report=Moments(1200, 600, 4096),
        max_context=32768,
        tools=RESEARCH_TOOLS,
        source="assumed",
    ),
}
"""The closed workloads, by name."""
