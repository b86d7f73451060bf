"""Records of programs: when each began and ended, and how much slower that was than alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.slo.metrics import summarise
from jaxserve.simulator.workloads.releases import Releases
from jaxserve.simulator.workloads.workload import Workload


@dataclass(frozen=True)
class ProgramRecords:
    """Arrays over the p programs that have begun, in order of their numbers. Times in seconds from
    the workload's start.

    Attributes:
        number: int64 [p], as in `Programs`.
        start: float64 [p], arrival of the first call.
        end: float64 [p], end of the last call that came; nan if the program was in progress at the
            end of the run.
        calls: int64 [p], calls in the workload.
        came: int64 [p], calls that have come.
        tool_time: float64 [p], what tools took before the calls that have come.
        think_time: float64 [p], what people took.
        given_up: bool [p], programs of which a call was refused or failed: their later calls never
            came.
        deadline: float64 [p], seconds from start to end; inf for none.
        alone: float64 [p], from start to end on an idle system, tools and people included; nan if
            not known.
        until: When the run was cut off; inf if it was not.
    """

    number: np.ndarray
    start: np.ndarray
    end: np.ndarray
    calls: np.ndarray
    came: np.ndarray
    tool_time: np.ndarray
    think_time: np.ndarray
    given_up: np.ndarray
    deadline: np.ndarray
    alone: np.ndarray
    until: float = math.inf

    @classmethod
    def from_releases(
        cls,
        workload: Workload,
        releases: Releases,
        served: np.ndarray | None = None,
        until: float = math.inf,
    ) -> ProgramRecords:
        """The records of a run.

        Args:
            workload: The requests, in their original order.
            releases: When they came, and which programs ended.
            served: float64 [n], seconds of each request on an idle system; None if not known.
            until: When the run was cut off, in seconds.
        """
        columns, here = workload.programs, np.zeros(len(workload), bool)
        here[releases.came] = True
        here &= columns.program >= 0
        count = int(columns.program.max(initial=-1)) + 1
        arrival, first = np.array(releases.arrival), np.full(count, math.inf)
        program = columns.program[here]
        np.minimum.at(first, program, arrival[here])
        deadline = np.full(count, math.inf)
        np.minimum.at(deadline, program, columns.deadline[here])
        began = np.flatnonzero(first < math.inf)

        def total(which: np.ndarray, weights: np.ndarray) -> np.ndarray:
            found = np.bincount(columns.program[which], weights[which], minlength=count)
            return np.asarray(found[began])

        ends = np.array([releases.ends.get(one, math.nan) for one in began.tolist()])
        gone = np.array([releases.given_up.get(one, math.nan) for one in began.tolist()])
        ones, tool = np.ones(len(workload)), columns.tool >= 0
        return cls(
            number=began,
            start=first[began],
            end=np.where(ends <= until, ends, math.nan),
            calls=total(columns.program >= 0, ones).astype(np.int64),
            came=total(here, ones).astype(np.int64),
            tool_time=total(here & tool, columns.wait),
            think_time=total(here & ~tool, columns.wait),
            given_up=gone <= until,
            deadline=deadline[began],
            alone=makespans_alone(workload, served)[began],
            until=until,
        )

    @classmethod
    def from_times(cls, workload: Workload, finish: np.ndarray) -> ProgramRecords:
        """The records of what was served.

        Args:
            workload: The requests, at their real arrivals.
            finish: float64 [n], when each ended; nan if it has not.
        """
        releases, program = Releases(workload), workload.programs.program
        releases.came = list(range(len(workload)))
        releases.arrival = workload.arrival.tolist()
        for one in np.unique(program[program >= 0]).tolist():
            end = float(finish[program == one].max())
            if not math.isnan(end):
                releases.ends[one] = end
        return cls.from_releases(workload, releases)

    def __len__(self) -> int:
        return len(self.number)

    @property
    def finished(self) -> np.ndarray:
        """Programs all of whose calls have ended with their whole outputs, bool [p]."""
        return np.asarray(np.isfinite(self.end) & ~self.given_up)

    @property
    def makespan(self) -> np.ndarray:
        """Start to end, float64 [p], seconds; nan while in progress."""
        return self.end - self.start

    @property
    def slowdown(self) -> np.ndarray:
        """The makespan over that on an idle system, both with the time of tools and people, float64
        [p]; nan for programs that have not finished."""
        return np.where(self.finished, self.makespan, math.nan) / self.alone

    @property
    def in_time(self) -> np.ndarray:
        """Programs that attain their deadlines, bool [p]: they have finished within them, or were
        cut off before."""
        going = np.isnan(self.end) & ~self.given_up
        took = np.where(going, self.until - self.start, self.makespan)
        return np.asarray(~self.given_up & (took <= self.deadline))

    def summary(self) -> dict[str, Any]:
        """The numbers of the programs. None for a mean or a share of nothing.

        Returns:
            begun, finished, given_up: Numbers of programs.
            calls: Calls that came.
            attainment: Share of the programs with deadlines that attain them.
            makespan_s, slowdown: Of those that have finished, `metrics.summarise`, and the P95.
            tool_time_s, think_time_s: Means of these.
            in_progress: Mean number of programs in progress, from the first start to the last end.
        """
        done, asked = self.finished, self.deadline < math.inf
        slowdown = self.slowdown[done]
        return {
            "begun": len(self),
            "finished": int(done.sum()),
            "given_up": int(self.given_up.sum()),
            "calls": int(self.came.sum()),
            "attainment": float(self.in_time[asked].mean()) if asked.any() else None,
            "makespan_s": _summarised(self.makespan[done]),
            "slowdown": _summarised(slowdown[np.isfinite(slowdown)]),
            "tool_time_s": float(self.tool_time[done].mean()) if done.any() else None,
            "think_time_s": float(self.think_time[done].mean()) if done.any() else None,
            "in_progress": self._in_progress(),
        }

    def _in_progress(self) -> float | None:
        ends = self.end[np.isfinite(self.end)]
        last = self.until if self.until < math.inf else float(ends.max(initial=-math.inf))
        if not len(self) or not last > self.start.min():
            return None
        end = np.where(np.isfinite(self.end), self.end, last)
        return float(np.maximum(end - self.start, 0.0).sum() / (last - self.start.min()))

    def table(self) -> dict[str, np.ndarray]:
        """Columns of the per-program table, [p] each; times in seconds, nan while in progress."""
        names = ("start", "end", "calls", "came", "tool_time", "think_time", "given_up")
        columns = {name: getattr(self, name) for name in names}
        return {
            "program": self.number,
            **columns,
            "deadline": self.deadline,
            "makespan": self.makespan,
            "alone": self.alone,
            "slowdown": self.slowdown,
        }


def _summarised(values: np.ndarray) -> dict[str, float] | None:
    found = summarise(values)
    return None if found is None else {**found, "p95": float(np.percentile(values, 95))}


def makespans_alone(workload: Workload, served: np.ndarray | None) -> np.ndarray:
    """Seconds from the first arrival of each program to its last end, by number, float64 [p]; calls
    that come at times of their own come as far apart as they do.

    Args:
        workload: The requests.
        served: float64 [n], seconds that each takes; None if not known, for nan.
    """
    count = int(workload.programs.program.max(initial=-1)) + 1
    if served is None:
        return np.full(count, math.nan)
    programs = workload.programs
    earliest = programs.earliest(workload.arrival, served)
    mine = programs.program >= 0
    first, last = np.full(count, math.inf), np.full(count, -math.inf)
    np.minimum.at(first, programs.program[mine], earliest[mine])
    np.maximum.at(last, programs.program[mine], (earliest + served)[mine])
    return last - first
