"""Programs, as columns: which requests are the calls of one agent's run or of one conversation,
which of them wait for which, and how long a tool or a person takes in between.

The calls of a program are a directed acyclic graph. An edge says that its child is sent after its
parent has ended; a join has several parents.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxserve.sched.request import MAX_EXPECTED_CALLS, Program

NO_PROGRAM = -1  # for a request by itself
NO_TOOL = -1  # for a person, or for no time at all
COLUMNS = ("program", "wait", "tool", "deadline", "told")


@dataclass(frozen=True)
class Programs:
    """The programs of n requests, and the m edges between these. `Workload` checks them.

    Attributes:
        program: int64 [n], number of each request's program, or NO_PROGRAM.
        wait: float64 [n], seconds from the end of the last of its parents to its arrival; 0 for a
            request without parents, which comes at its own time.
        tool: int64 [n], index of the tool that ran in that time, or NO_TOOL.
        deadline: float64 [n], seconds from the program's first arrival to the end of its last call;
            inf for none.
        told: bool [n], whether it says how many calls are still to come, as clients with a plan do.
        parent, child: int64 [m], indices of requests, by ascending child.
        tools: Names.
        at_once: Programs in progress at a time: another one begins when one has ended. 0: each
            begins when its first calls arrive.
    """

    program: np.ndarray
    wait: np.ndarray
    tool: np.ndarray
    deadline: np.ndarray
    told: np.ndarray
    parent: np.ndarray
    child: np.ndarray
    tools: tuple[str, ...] = ()
    at_once: int = 0

    @classmethod
    def none(cls, count: int) -> Programs:
        """`count` requests by themselves."""
        nothing, no_edge = np.full(count, NO_PROGRAM, np.int64), np.zeros(0, np.int64)
        never = np.full(count, np.inf)
        told = np.zeros(count, bool)
        return cls(nothing, np.zeros(count), nothing, never, told, no_edge, no_edge)

    @classmethod
    def joined(cls, parts: Sequence[Programs]) -> Programs:
        """The parts one after another, each with programs of its own.

        Raises:
            ValueError: A part keeps a number of programs in progress, and another one has programs,
                too.
        """
        if len(parts) == 1:
            return parts[0]
        at_once = max(part.at_once for part in parts)
        if at_once and sum(part.closed for part in parts) > 1:
            raise ValueError("programs that begin as others end cannot be merged with others")
        tools = tuple(dict.fromkeys(name for part in parts for name in part.tools))
        edges, columns, first, numbers = list[np.ndarray](), list[Programs](), 0, 0
        for part in parts:
            edges.append(np.stack([part.parent, part.child]) + first)
            known = np.array([*map(tools.index, part.tools), NO_TOOL], np.int64)
            program = np.where(part.program >= 0, part.program + numbers, NO_PROGRAM)
            columns.append(dataclasses.replace(part, program=program, tool=known[part.tool]))
            first, numbers = first + len(part), numbers + int(part.program.max(initial=-1)) + 1
        found = {n: np.concatenate([getattr(part, n) for part in columns]) for n in COLUMNS}
        parent, child = np.concatenate(edges, axis=1)
        return cls(**found, parent=parent, child=child, tools=tools, at_once=at_once)

    def __len__(self) -> int:
        return len(self.program)

    @property
    def closed(self) -> bool:
        """Whether any request is of a program, so that arrivals may depend on what is served."""
        return bool((self.program >= 0).any())

    @cached_property
    def waits(self) -> np.ndarray:
        """Which requests wait for others, bool [n]."""
        found = np.zeros(len(self), bool)
        found[self.child] = True
        return found

    @cached_property
    def tools_after(self) -> dict[int, dict[str, str]]:
        """By number of each request after which tools run: their names, by ids of their calls."""
        found = dict[int, dict[str, str]]()
        uses = self.tool[self.child] >= 0
        edges = zip(self.parent[uses].tolist(), self.child[uses].tolist(), strict=True)
        for parent, child in edges:
            found.setdefault(parent, {})[f"{parent}-{child}"] = self.tools[self.tool[child]]
        return found

    def problem(self) -> str:
        """What is wrong with the columns, in one line; "" if nothing is."""
        count, parent, child = len(self), self.parent, self.child
        if any(getattr(self, name).shape != (count,) for name in COLUMNS):
            return f"{', '.join(COLUMNS)} must have the same length"
        if parent.shape != child.shape:
            return f"{parent.size} parents for {child.size} children"
        bad = np.flatnonzero((parent < 0) | (parent >= child) | (child >= count))
        if len(bad):
            worst = bad[0]
            return (
                f"request {child[worst] + 1} must wait for an earlier one, not {parent[worst] + 1}"
            )
        order = child * count + parent
        if (np.diff(order) <= 0).any():
            return "edges must be different, in order of their children, then of their parents"
        split = np.flatnonzero(
            (self.program[parent] != self.program[child]) | (self.program[child] < 0)
        )
        if len(split):
            worst = split[0]
            return (
                f"request {child[worst] + 1} waits for {parent[worst] + 1}, which is not of its "
                "program"
            )
        if not (np.isfinite(self.wait) & (self.wait >= 0)).all():
            return "wait must be a time of 0 or more seconds"
        if not ((self.tool >= NO_TOOL) & (self.tool < len(self.tools))).all():
            return "tool must be an index into tools"
        if not (self.deadline > 0).all():
            return "deadline must be a positive time"
        if ((self.wait > 0) | (self.tool >= 0))[~self.waits].any():
            return "only requests that wait for others have tools, and time in between"
        return "" if self.at_once >= 0 else f"at_once must be at least 0, got {self.at_once}"

    def said(self, number: int, left: int, prefix: str = "") -> Program | None:
        """What a request says of its program; None if it is of none.

        Args:
            number: The request.
            left: Calls of its program that are still to come.
            prefix: Of the program's name.
        """
        if self.program[number] < 0:
            return None
        deadline = float(self.deadline[number])
        name, given = f"{prefix}{self.program[number]}", deadline if deadline < math.inf else None
        if not self.told[number]:
            return Program(name, given)
        return Program(name, given, min(left, MAX_EXPECTED_CALLS), over=left == 0)

    def select(self, which: np.ndarray) -> Programs:
        """The programs of selected requests: a mask, or indices in any order that has parents
        before their children. A request none of whose parents is selected waits for nobody."""
        kept = np.arange(len(self))[which]
        number = np.full(len(self), -1)
        number[kept] = np.arange(len(kept))
        edges = number[np.stack([self.parent, self.child])]
        edges = edges[:, (edges >= 0).all(axis=0)]
        parent, child = edges[:, np.lexsort(edges)]
        columns = {name: getattr(self, name)[kept] for name in COLUMNS}
        alone = np.ones(len(kept), bool)
        alone[child] = False
        columns["wait"] = np.where(alone, 0.0, columns["wait"])
        columns["tool"] = np.where(alone, NO_TOOL, columns["tool"])
        return dataclasses.replace(self, **columns, parent=parent, child=child)

    def cut_off(self, gone: np.ndarray) -> np.ndarray:
        """The requests that never come if some do not: those, and all that wait for them. gone, and
        the result: bool [n]."""
        found = gone.copy()
        for parent, child in zip(self.parent.tolist(), self.child.tolist(), strict=True):
            found[child] |= found[parent]
        return found

    def earliest(self, start: np.ndarray, served: np.ndarray) -> np.ndarray:
        """When each request arrives if each takes a given time, float64 [n].

        Args:
            start: float64 [n], when those without parents arrive, in seconds.
            served: float64 [n], seconds from each arrival to its end.
        """
        at, took, wait = start.tolist(), served.tolist(), self.wait.tolist()
        for number in np.flatnonzero(self.waits).tolist():
            at[number] = 0.0
        for parent, child in zip(self.parent.tolist(), self.child.tolist(), strict=True):
            at[child] = max(at[child], at[parent] + took[parent] + wait[child])
        return np.array(at)

    def moved(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Arrivals after those of requests without parents have moved: others move with the one of
        their parents that moves most. before, and the result: float64 [n], in seconds, as is
        after, of which only those without parents count."""
        shift = np.where(self.waits, -np.inf, after - before).tolist()
        for parent, child in zip(self.parent.tolist(), self.child.tolist(), strict=True):
            shift[child] = max(shift[child], shift[parent])
        return np.asarray(before + np.array(shift))
