"""Optional columns of any trace, beside arrival and lengths, and the parsing of single cells.
Invalid cells are rejected with file, line and column."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.request import NO_CLASS, Tier
from jaxserve.sched.slo.classes import SloClassError, class_name, tier_named, truth_of, value_of
from jaxserve.sched.slo.slo_columns import ALL_TARGETS, SloColumns
from jaxserve.simulator.workloads.programs import NO_PROGRAM, NO_TOOL, Programs
from jaxserve.simulator.workloads.workload import MAX_LENGTH, WorkloadError

NO_LIMIT = 0  # for requests without max_tokens
MAX_NAME = 128  # characters of a program's or a tool's name
MAX_PARENTS = 1024


@dataclass(frozen=True)
class Extras:
    """The optional columns of a request of a trace.

    Attributes:
        limit: max_tokens, or NO_LIMIT.
        tier: Real-time or best-effort.
        ttft, tbt, jct, max_tbt: Targets in seconds, inf for none.
        slo_class: Name of its class.
        greedy: Whether it takes the most likely token.
        value: See `Request.value`.
        program: Name of the program that it is a call of; "" for none.
        after: Numbers, from 1, of the earlier requests of the trace that it waits for.
        wait: Seconds from the last one's end to its arrival.
        tool: Name of the tool that ran in that time; "" for a person.
        deadline: Seconds from the program's first arrival to the end of its last call, inf for
            none.
    """

    limit: int = NO_LIMIT
    tier: Tier = Tier.REALTIME
    ttft: float = math.inf
    tbt: float = math.inf
    jct: float = math.inf
    max_tbt: float = math.inf
    slo_class: str = NO_CLASS
    greedy: bool = True
    value: float = 1.0
    program: str = ""
    after: tuple[int, ...] = ()
    wait: float = 0.0
    tool: str = ""
    deadline: float = math.inf


def length_of(where: str, name: str, text: str) -> int:
    """Parses a trace cell as a number of tokens. Raises WorkloadError with `where` and the
    column."""
    # int() would also accept " 7", "1_000" and digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise WorkloadError(f"{where}: {name} must be a whole number, got {text!r:.40}")
    if len(text) > 10 or not 1 <= int(text) <= MAX_LENGTH:
        raise WorkloadError(f"{where}: {name} must be 1 to {MAX_LENGTH}, got {text:.20}")
    return int(text)


def seconds_of(where: str, name: str, text: str) -> float:
    """Parses a trace cell as a time of 0 or more. Raises WorkloadError with `where` and the
    column."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise WorkloadError(f"{where}: {name} must be a time from 0, got {text!r:.40}")
    return value


def _target(where: str, name: str, text: str) -> float:
    value = seconds_of(where, name, text) / 1e3
    if value == 0:
        raise WorkloadError(f"{where}: {name} must be a positive time, got {text!r:.40}")
    return value


def _name(where: str, name: str, text: str) -> str:
    if len(text) > MAX_NAME or not text.isprintable():
        limits = f"1 to {MAX_NAME} characters that can be printed"
        raise WorkloadError(f"{where}: {name} must be {limits}, got {text!r:.40}")
    return text


def _after(where: str, name: str, text: str) -> tuple[int, ...]:
    parts = text.split("+", MAX_PARENTS)
    if len(parts) > MAX_PARENTS:
        raise WorkloadError(f"{where}: {name} may have at most {MAX_PARENTS} requests")
    return tuple(dict.fromkeys(length_of(where, name, part) for part in parts))


# Column -> field of Extras, and the parser of the cell.
_COLUMNS: dict[str, tuple[str, Callable[[str, str, str], Any]]] = {
    "max_tokens": ("limit", length_of),
    "tier": ("tier", lambda where, name, text: tier_named(f"{where}: {name}", text)),
    **{f"{name}_ms": (name, _target) for name in ALL_TARGETS},
    "class": ("slo_class", lambda where, name, text: class_name(f"{where}: {name}", text)),
    "greedy": ("greedy", lambda where, name, text: truth_of(f"{where}: {name}", text)),
    "value": ("value", lambda where, name, text: value_of(f"{where}: {name}", text)),
    "program": ("program", _name),
    "after": ("after", _after),
    "wait_ms": ("wait", lambda where, name, text: seconds_of(where, name, text) / 1e3),
    "tool": ("tool", _name),
    "program_deadline_ms": ("deadline", _target),
}
OPTIONAL_COLUMNS = tuple(_COLUMNS)


def extras_of(where: str, cells: Mapping[str, str], output_len: int) -> Extras:
    """Parses a row's optional columns; empty cells are skipped. Raises WorkloadError with `where`
    and the column."""
    values = {}
    for name, text in cells.items():
        if text:
            field, read = _COLUMNS[name]
            try:
                values[field] = read(where, name, text)
            except SloClassError as error:
                raise WorkloadError(str(error)) from None
    extras = Extras(**values)
    if extras.limit != NO_LIMIT and extras.limit < output_len:
        raise WorkloadError(
            f"{where}: max_tokens is {extras.limit}, less than the {output_len} tokens written"
        )
    if not extras.after and (extras.wait or extras.tool):
        raise WorkloadError(f"{where}: wait_ms and tool are of requests that come after others")
    if extras.deadline < math.inf and not (extras.program or extras.after):
        raise WorkloadError(f"{where}: program_deadline_ms is of requests of a program")
    return extras


def terms_of(rows: Sequence[Extras]) -> SloColumns:
    """The rows as columns. Classes are in order of first appearance."""
    classes = tuple(dict.fromkeys(row.slo_class for row in rows))
    index = {name: i for i, name in enumerate(classes)}
    return SloColumns(
        np.array([row.tier for row in rows], np.int8),
        **{name: np.array([getattr(row, name) for row in rows]) for name in ALL_TARGETS},
        slo_class=np.array([index[row.slo_class] for row in rows], np.int64),
        greedy=np.array([row.greedy for row in rows], bool),
        classes=classes,
        value=np.array([row.value for row in rows], np.float64),
    )


def programs_of(where: str, rows: Sequence[Extras]) -> Programs:
    """The rows' programs. A request without a program's name is of the program of those that it
    waits for. Raises WorkloadError with `where` and the row."""
    numbers, program = dict[str, int](), list[int]()
    parent, child = list[int](), list[int]()
    count = 0
    for number, row in enumerate(rows):
        mine = NO_PROGRAM
        if row.program:
            mine = numbers.setdefault(row.program, count)
        for one in sorted(row.after):
            if one > number:
                raise WorkloadError(
                    f"{where}: request {number + 1} must wait for an earlier one, not {one}"
                )
            if program[one - 1] == NO_PROGRAM:  # of a program that has no name
                program[one - 1] = count if mine == NO_PROGRAM else mine
                count = max(count, program[one - 1] + 1)
            mine = program[one - 1] if mine == NO_PROGRAM else mine
            parent.append(one - 1)
            child.append(number)
        program.append(mine)
        count = max(count, mine + 1)
    tools = tuple(dict.fromkeys(row.tool for row in rows if row.tool))
    index = {name: i for i, name in enumerate(tools)} | {"": NO_TOOL}
    own = np.array([row.deadline for row in rows], np.float64)
    deadline = np.full(count + 1, np.inf)  # the last one of requests without a program
    np.minimum.at(deadline, program, own)
    found = Programs(
        program=np.array(program, np.int64),
        wait=np.array([row.wait for row in rows], np.float64),
        tool=np.array([index[row.tool] for row in rows], np.int64),
        deadline=deadline[program],
        told=np.zeros(len(rows), bool),
        parent=np.array(parent, np.int64),
        child=np.array(child, np.int64),
        tools=tools,
    )
    if problem := found.problem():
        raise WorkloadError(f"{where}: {problem}")
    return found
