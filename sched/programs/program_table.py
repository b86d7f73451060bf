"""The programs whose calls are served, or whose next call is expected.

A call belongs to the program that it names. If it names none and programs are inferred, it belongs
to the program whose answer it continues, or begins one. Programs are kept by tenant: what a tenant
names, or how many programs it begins, changes nothing for others.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxserve.sched.programs.call_counts import CallCounts, Kind
from jaxserve.sched.programs.tool_times import ToolTimes
from jaxserve.sched.programs.verdict import ProgramEnd, ProgramVerdict
from jaxserve.sched.request import MAX_EXPECTED_CALLS, Request
from jaxserve.sched.state.request_table import RequestTable

MOST_PROGRAMS = 1 << 14
"""Silent programs that are kept, 1 to 5 KB each. As many more may have calls running as requests
may be served."""
TENANT_SHARE = 0.25
"""Share of them that a tenant may have; without API keys there is one, which may have all."""
SILENCE = 300.0
"""Seconds after its last call after which a program counts as ended."""
TOOL_QUANTILE, TOOL_FACTOR, MOST_SILENCE = 0.99, 2.0, 3600.0
"""A program may be silent for so many times the time that its tool stays within in so many cases,
if that is longer, up to so many seconds."""
MOST_LINKS = 16
"""Links kept of each program, the latest. As many tools of an answer are noted."""
MOST_NAME = 64
"""Characters of a tool's name that count."""
MOST_BEHIND = 1024
"""Full blocks of a prompt behind the answer that it continues."""

Answer = tuple[bytes, tuple[int, ...]]
"""Where an output ends: the key of its last full block, and the tokens behind it if that block has
none of the output."""
NO_ANSWER: Answer = (b"", ())
Link = tuple[str, str, str | Answer]
"""Tenant, kind and value of what a later call may continue."""


@dataclass(eq=False, slots=True)
class _Program:
    """A program. Times in seconds.

    Attributes:
        number: its number; another program may have it later.
        serial: counts programs from 1, in the order in which they began.
        tenant, id, slo_class: see `ProgramVerdict`.
        start: when its first call came.
        deadline: from the start, as its calls say; inf for none.
        usual_deadline: the one that counts if no call says any; inf for none.
        calls, running: number of its calls, so far and now.
        ended: when its last call ended; inf before the first has.
        to_come: calls to come, as its latest call says; None if no call has said it.
        over: whether a call has said that it is the last.
        failed: whether the call that ended last was cancelled or failed.
        tools: names of the tools that the answers since it was last silent ask for.
        prompt: number of full blocks of its last prompt, and the key of the last of them; empty for
            none.
        rows: rows of its running calls.
        links: links that lead to it, the oldest first.
        waiting: what `ProgramTable.waiting` last said of it since its last call ended; None for
            nothing.
    """

    number: int
    serial: int
    tenant: str
    id: str
    slo_class: str
    start: float
    deadline: float = math.inf
    usual_deadline: float = math.inf
    calls: int = 0
    running: int = 0
    ended: float = math.inf
    to_come: int | None = None
    over: bool = False
    failed: bool = False
    tools: tuple[str, ...] = ()
    prompt: tuple[int, bytes] = (0, b"")
    rows: tuple[int, ...] = ()
    links: list[Link] = field(default_factory=list)
    waiting: Waiting | None = None

    @property
    def counts(self) -> bool:
        """Whether it is known to be a program: it is named, or has several calls."""
        return bool(self.id) or self.calls > 1

    @property
    def kind(self) -> Kind:
        """Its `call_counts.Kind`."""
        return self.tenant, self.slo_class, bool(self.id)

    @property
    def allowed(self) -> float:
        """From its start to its deadline, inf for none."""
        return self.usual_deadline if self.deadline == math.inf else self.deadline


@dataclass(eq=False, slots=True)
class _Call:
    """A running call.

    Attributes:
        program: Its program.
        about: What observers are told of it.
        rows: Number of its running continuations.
        complete: Whether one of those that have ended has ended by itself.
    """

    program: _Program
    about: ProgramCall
    rows: int = 0
    complete: bool = False


class ProgramCall(NamedTuple):
    """A call of a program, when it comes.

    Attributes:
        program: Counts programs from 1, in the order in which they began.
        named: Whether calls name the program.
        tenant: Its tenant.
        tools: Names of the tools that ran since the program's last call ended, empty for none or if
            another call runs.
        pause: Seconds since then; None for a program's first call, or if another one runs.
        deadline: Seconds from the program's first arrival to the end of its last call, as far as
            calls or their classes have said; inf for none.
    """

    program: int
    named: bool
    tenant: str
    tools: tuple[str, ...]
    pause: float | None
    deadline: float


class Waiting(NamedTuple):
    """A program whose next call is expected.

    Attributes:
        number: Its number, as in `RequestTable.program`.
        since: When its last call ended.
        tools: Names of the tools that its last answers ask for; empty for none.
        pause: Mean time that these take, in seconds; None if unknown.
    """

    number: int
    since: float
    tools: tuple[str, ...]
    pause: float | None


class ToolWait(NamedTuple):
    """A program that waits for a tool.

    Attributes:
        tenant: Its tenant.
        kind: Its kind, for `CallCounts`.
        since: When its last call ended.
        tools: Names of the tools.
    """

    tenant: str
    kind: Kind
    since: float
    tools: tuple[str, ...]


class ProgramTable:
    """The programs, and the columns of a request table that tell policies of them. One thread
    changes it. Times in seconds, on the clock of `Request.arrival`.

    Args:
        table: its columns about programs are kept up to date.
        infers: whether calls that name no program belong to those that they continue.
        silence: seconds after its last call after which a program counts as ended, or longer if its
            tools take longer.
        block_size: tokens of a block.

    Attributes:
        tool_times: learned times of tools.
        call_counts: learned numbers of calls.
        num_running: programs with running calls; only those that are named or have several calls
            count, here and in what follows.
        num_waiting: programs whose next call is expected.
        next_check: when `expire` may next find a program that has fallen silent; inf for never.
        on_verdict: called with each verdict.
        on_tools: called with the number of a program whose tools become known after its call ended.
    """

    def __init__(
        self,
        table: RequestTable,
        *,
        infers: bool = False,
        silence: float = SILENCE,
        block_size: int = 16,
    ) -> None:
        self._table, self._infers, self._silence = table, infers, silence
        self._block_size = block_size
        self.tool_times, self.call_counts = ToolTimes(), CallCounts()
        self.num_running = self.num_waiting = 0
        self.next_check = math.inf
        self.on_verdict: Callable[[ProgramVerdict], None] = lambda verdict: None
        self.on_tools: Callable[[int], None] = lambda number: None
        self._begun = 0
        self._programs: list[_Program | None] = []  # by number
        self._free: list[int] = []
        self._attained = np.zeros(1)  # by number, tokens; the last is of rows without a program
        self._expires = np.zeros(0)  # by number
        self._by_id: dict[tuple[str, str], _Program] = {}
        self._by_link: dict[Link, _Program] = {}
        # By tenant and key of a block: how many links have so many tokens behind it.
        self._tails: dict[tuple[str, bytes], Counter[int]] = {}
        self._calls: dict[int, _Call] = {}  # by row
        self._several: set[_Program] = set()  # those with several rows
        # Silent programs by tenant, the one whose last call ended first at the front.
        self._silent: dict[str, OrderedDict[int, _Program]] = {}
        self._num_silent = 0

    def __len__(self) -> int:
        return len(self._programs) - len(self._free)

    @property
    def num_calls(self) -> int:
        """Rows of running calls."""
        return len(self._calls)

    @property
    def num_links(self) -> int:
        """Links that lead to programs."""
        return len(self._by_link)

    # Calls.

    def begin(self, row: int, request: Request, first: int | None = None) -> None:
        """Begins a call, and sets the columns of its row.

        Args:
            row: Its row.
            request: The request.
            first: Row of another continuation of the same request.
        """
        if request.program is None and not self._infers:
            return
        call = None if first is None else self._calls.get(first)
        if call is None:
            call = _Call(*self._called(request))
        call.rows += 1
        call.program.rows += (row,)
        if len(call.program.rows) > 1:
            self._several.add(call.program)
        self._calls[row] = call
        self._show(call.program, row)

    def call_of(self, row: int) -> ProgramCall | None:
        """The call that a row is, or is a continuation of; None if it is of no program."""
        call = self._calls.get(row)
        return None if call is None else call.about

    def _called(self, request: Request) -> tuple[_Program, ProgramCall]:
        """The request's program, which has one more call, and that call."""
        said, now = request.program, request.arrival
        program = self._find(request)
        tools: tuple[str, ...] = ()
        pause = None
        if program is None:
            program = self._new(request)
        else:
            self._count(program, -1)
            tools, pause = self._wake(program, now)
        program.calls += 1
        program.running += 1
        self._count(program, 1)
        if program.to_come is not None:
            program.to_come = max(program.to_come - 1, 0)
        if said is not None:
            if said.expected_calls is not None:
                program.to_come = said.expected_calls
            program.over |= said.over
            before = program.allowed
            if said.deadline is not None:
                program.deadline = min(program.deadline, said.deadline)
            if said.usual_deadline is not None:
                program.usual_deadline = min(program.usual_deadline, said.usual_deadline)
            if program.allowed != before:
                self._table.program_deadline[list(program.rows)] = program.start + program.allowed
        keys = request.block_keys or ()
        program.prompt = len(keys), keys[-1] if keys else b""
        self._link(program, ("", "request", request.id))
        for kind, value in request.continues:
            if kind == "key":
                self._link(program, (program.tenant, kind, value))
        what = bool(program.id), program.tenant, tools, pause, program.allowed
        return program, ProgramCall(program.serial, *what)

    def _wake(self, program: _Program, now: float) -> tuple[tuple[str, ...], float | None]:
        """Notes that a program is no longer silent, if it was. Returns its tools, and how long it
        was silent."""
        if program.running:
            return (), None
        self._unlist(program)
        pause, tools = max(now - program.ended, 0.0), program.tools
        if len(tools) < 2:  # otherwise nobody knows which of them took so long
            self.tool_times.add(program.tenant, next(iter(tools), ""), pause)
        program.tools = ()
        return tools, pause

    def end(self, row: int, now: float, *, complete: bool, answer: Answer = NO_ANSWER) -> None:
        """Ends a continuation of a call.

        Args:
            row: Its row.
            now: When it ended.
            complete: Whether it ended by itself, so that the program may go on from it.
            answer: Where its output ends.
        """
        call = self._calls.pop(row, None)
        if call is None:
            return
        program = call.program
        self._table.program[row] = -1
        program.rows = tuple(mine for mine in program.rows if mine != row)
        if len(program.rows) < 2:
            self._several.discard(program)
        call.rows -= 1
        call.complete |= complete
        if answer != NO_ANSWER:
            self._link(program, (program.tenant, "answer", answer))
        if call.rows:
            return
        self._count(program, -1)
        program.running -= 1
        self._count(program, 1)
        program.ended, program.waiting = now, None
        program.failed = not call.complete
        if program.running:
            return
        self._silent.setdefault(program.tenant, OrderedDict())[program.number] = program
        self._num_silent += 1
        self._expires[program.number] = now + self._silence
        self.next_check = min(self.next_check, now + self._silence)
        if program.over:
            self._conclude(program, ProgramEnd.OVER)

    def charge(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Counts tokens that were computed for rows, each int64 [n], as service of their
        programs."""
        table, attained = self._table, self._attained
        numbers = table.program[rows]
        if self._several:
            np.add.at(attained, numbers, tokens)
        else:  # each has one row at most, and this takes a tenth of the time
            attained[numbers] += tokens
        attained[-1] = 0.0
        table.attained[rows] = attained[numbers]
        for program in self._several:
            table.attained[list(program.rows)] = attained[program.number]

    def note_tools(self, request_id: str, tools: Mapping[str, str]) -> None:
        """Notes that a request's answer asks for tools, whose results its program's next call will
        have.

        Args:
            request_id: The request.
            tools: Names of the tools, by the ids of the calls.
        """
        program = self._by_link.get(("", "request", request_id))
        if program is None:
            return
        for call_id, name in list(tools.items())[:MOST_LINKS]:
            self._link(program, (program.tenant, "tool", call_id))
            if name[:MOST_NAME] not in program.tools and len(program.tools) < MOST_LINKS:
                program.tools += (name[:MOST_NAME],)
        if not program.running:
            self.on_tools(program.number)

    # Ends.

    def expire(self, now: float) -> None:
        """Ends the programs that have been silent for too long."""
        if now < self.next_check:
            return
        for number in np.flatnonzero(self._expires <= now).tolist():
            program = self._programs[number]
            assert program is not None
            self._expires[number] = program.ended + self._patience(program)
            if self._expires[number] <= now:
                self._conclude(program, ProgramEnd.SILENT)
        # At most one look in a hundredth of the time: it sees all programs.
        soonest = float(self._expires.min(initial=math.inf))
        self.next_check = max(soonest, now + self._silence / 100)

    def _unlist(self, program: _Program) -> None:
        """The program is not silent any more."""
        silent = self._silent[program.tenant]
        del silent[program.number]
        if not silent:
            del self._silent[program.tenant]
        self._num_silent -= 1
        self._expires[program.number] = math.inf

    def _patience(self, program: _Program) -> float:
        """How long the program may be silent."""
        tools = program.tools or ("",)
        slow = self.tool_times.quantile(program.tenant, tools, TOOL_QUANTILE)
        if slow is None:
            return self._silence
        return max(self._silence, min(TOOL_FACTOR * slow, MOST_SILENCE))

    def _conclude(self, program: _Program, end: ProgramEnd) -> None:
        """Gives the verdict of a silent program, and forgets it."""
        self._count(program, -1)
        self._unlist(program)
        if program.id:
            del self._by_id[program.tenant, program.id]
        while program.links:
            self._unlink(program, program.links.pop())
        self._programs[program.number] = None
        self._free.append(program.number)
        broken = end is not ProgramEnd.OVER and bool(program.to_come)
        given_up = program.failed or broken
        if not given_up and end is not ProgramEnd.FORGOTTEN:
            self.call_counts.add(program.kind, program.calls)
        if program.counts:
            self.on_verdict(
                ProgramVerdict(
                    program.tenant,
                    program.id,
                    program.slo_class,
                    end,
                    program.calls,
                    max(program.ended - program.start, 0.0),
                    None if program.allowed == math.inf else program.allowed,
                    given_up,
                )
            )

    def tool_wait(self, number: int) -> ToolWait | None:
        """What is known of a program that waits for a tool; None if it does not, or is not known to
        be a program."""
        program = self._of(number)
        if program is None or program.running or not (program.counts and program.tools):
            return None
        return ToolWait(program.tenant, program.kind, program.ended, program.tools)

    def _of(self, number: int) -> _Program | None:
        return self._programs[number] if 0 <= number < len(self._programs) else None

    def silent_since(self, number: int) -> float | None:
        """When the program's last call ended; None if one runs, or if it is not known to be one."""
        program = self._of(number)
        silent = program is not None and program.counts and not program.running
        return program.ended if program is not None and silent else None

    def is_back(self, number: int, since: float) -> bool:
        """Whether the program, whose last call had ended at `since`, has sent its next call, and
        that one has not ended."""
        program = self._of(number)
        return program is not None and program.running > 0 and program.ended == since

    def waiting(self) -> list[Waiting]:
        """The programs whose next call is expected, the one whose last call ended first at the
        front of its tenant's."""
        found = list[Waiting]()
        for tenant, silent in self._silent.items():
            means = dict[tuple[str, ...], float | None]()  # many wait for the same tools
            for number, program in silent.items():
                if not (program.id or program.calls > 1):
                    continue
                tools = program.tools
                if tools not in means:
                    means[tools] = self.tool_times.mean(tenant, tools or ("",))
                waits, mean = program.waiting, means[tools]
                if waits is None or waits.pause != mean or waits.tools is not tools:
                    waits = program.waiting = Waiting(number, program.ended, tools, mean)
                found.append(waits)
        return found

    # Which program a call belongs to.

    def _find(self, request: Request) -> _Program | None:
        tenant = request.tenant
        if request.program is not None:
            return self._by_id.get((tenant, request.program.id))
        for kind, value in request.continues:
            found = self._by_link.get(("" if kind == "request" else tenant, kind, value))
            if found is not None and (kind != "key" or _goes_on(found, request)):
                return found
        return self._find_by_prefix(request)

    def _find_by_prefix(self, request: Request) -> _Program | None:
        """The program whose answer is part of the prompt, the latest such answer."""
        keys = request.block_keys or ()
        tenant, prompt = request.tenant, request.prompt
        for count in range(len(keys), max(len(keys) - MOST_BEHIND, 0), -1):
            key, behind = keys[count - 1], count * self._block_size
            for length in sorted(self._tails.get((tenant, key), ()), reverse=True):
                answer = key, prompt[behind : behind + length]
                if (found := self._by_link.get((tenant, "answer", answer))) is not None:
                    return found
        return None

    def _new(self, request: Request) -> _Program:
        tenant, said = request.tenant, request.program
        self._make_room(tenant)
        number = self._free.pop() if self._free else len(self._programs)
        name = "" if said is None else said.id
        self._begun += 1
        program = _Program(number, self._begun, tenant, name, request.slo_class, request.arrival)
        if number == len(self._programs):
            self._programs.append(None)
            if number == len(self._expires):
                more = max(number, 64)
                self._expires = np.concatenate([self._expires, np.full(more, math.inf)])
                self._attained = np.concatenate([self._attained[:-1], np.zeros(more + 1)])
        self._programs[number] = program
        self._attained[number] = 0.0
        if name:
            self._by_id[tenant, name] = program
        return program

    def _make_room(self, tenant: str) -> None:
        """Forgets the oldest silent program of the tenant, or of the one with the most, if there
        are too many."""
        mine = self._silent.get(tenant, OrderedDict[int, _Program]())
        most = int(MOST_PROGRAMS * (TENANT_SHARE if tenant else 1))
        if len(mine) < most:
            if self._num_silent < MOST_PROGRAMS:
                return
            mine = max(self._silent.values(), key=len)
        self._conclude(next(iter(mine.values())), ProgramEnd.FORGOTTEN)

    def _link(self, program: _Program, link: Link) -> None:
        """Makes the link lead to the program."""
        if link in program.links:
            program.links.remove(link)
        else:
            self._count_tail(link, 1)
            if len(program.links) == MOST_LINKS:
                self._unlink(program, program.links.pop(0))
        program.links.append(link)
        self._by_link[link] = program

    def _count_tail(self, link: Link, change: int) -> None:
        """Counts what is behind the block of a link to an answer, which comes or goes."""
        tenant, _, value = link
        if isinstance(value, str):
            return
        key, tail = value
        counts = self._tails.setdefault((tenant, key), Counter())
        counts[len(tail)] += change
        if not counts[len(tail)]:
            del counts[len(tail)]
        if not counts:
            del self._tails[tenant, key]

    def _unlink(self, program: _Program, link: Link) -> None:
        self._count_tail(link, -1)
        if self._by_link.get(link) is program:  # it may lead to a later one by now
            del self._by_link[link]

    # What is told of them.

    def _show(self, program: _Program, row: int) -> None:
        table = self._table
        table.program[row] = program.number
        table.program_start[row] = program.start
        table.program_deadline[row] = program.start + program.allowed
        table.calls_before[row] = program.calls - 1
        left = table.calls_after[row] = self._calls_left(program)
        table.tool_time_after[row] = left * self.tool_times.overall(program.tenant)
        table.attained[row] = self._attained[program.number]

    def _calls_left(self, program: _Program) -> float:
        """How many calls are expected after the latest one."""
        if program.over:
            return 0.0
        if program.to_come is not None:
            return float(min(program.to_come, MAX_EXPECTED_CALLS))
        return self.call_counts.left(program.kind, program.calls)

    def _count(self, program: _Program, change: int) -> None:
        if program.counts:
            self.num_running += change * (program.running > 0)
            self.num_waiting += change * (program.running == 0)


def _goes_on(program: _Program, request: Request) -> bool:
    """Whether a request with the cache key of a program's call is likely to continue it: many
    programs may have the key. None of its calls may run, and the prompt has to begin with the one
    before, as far as that is known."""
    blocks, key = program.prompt
    mine = request.block_keys
    return not program.running and (
        mine is None or not blocks or (len(mine) >= blocks and mine[blocks - 1] == key)
    )
