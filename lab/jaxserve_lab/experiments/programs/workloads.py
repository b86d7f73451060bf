"""The workloads of the league of programs: closed ones, in which late answers delay what
follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.cost.reachability import prefill_times
from jaxserve.sched.request import SLO
from jaxserve.sched.slo.classes import seconds_or_inf
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.programs import Programs
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.experiments.league.workloads import INTERACTIVE, LLAMA, STANDARD, TOOLS

PLACE = LLAMA
LONGEST = 32768  # tokens of the longest request, and C
SLACK = (
    3.0  # a program's deadline, in times of its calls alone; tools and people take what they take
)
LOADS = AT, ABOVE = "at", "above"


@dataclass(frozen=True)
class Entry:
    """A workload.

    Attributes:
        programs: Name of its closed sessions.
        targets: SLO of each of their calls.
        at_once: Programs in progress, by load: at saturation `sarathi` has nine of ten in time.
        calls: Calls of a run, about.
        chat: Chats beside them, in requests/s.
        chats: Number of these chats.
    """

    programs: str
    targets: SLO
    at_once: tuple[int, int]
    calls: int
    chat: float = 0.0
    chats: int = 0


WORKLOADS = {
    "agents": Entry("closed-agent", TOOLS[PLACE], (8, 12), 450),
    "conversations": Entry("closed-conversation", STANDARD[PLACE], (100, 200), 800),
    "chat beside agents": Entry("closed-agent", TOOLS[PLACE], (6, 9), 350, 1.0, 350),
    "research": Entry("closed-research", TOOLS[PLACE], (9, 14), 450),
}


def make_workload(name: str, load: str, seed: int, place: System, share: float = 1.0) -> Workload:
    """Requests of a workload.

    Args:
        name: In WORKLOADS.
        load: In LOADS.
        seed: Of lengths, tools and chats.
        place: The system, by which deadlines go.
        share: Of its calls and chats.
    """
    entry = WORKLOADS[name]
    calls, at_once = round(entry.calls * share), entry.at_once[LOADS.index(load)]
    made = _asking(
        WorkloadSpec(entry.programs, calls, programs=at_once).make_workload(seed), entry.targets
    )
    made = replace(made, programs=_with_deadlines(made, place))
    if not entry.chats:
        return made
    chats = WorkloadSpec("sharegpt", round(entry.chats * share), rate=entry.chat).make_workload(
        seed
    )
    return Workload.merged([made, _asking(chats, INTERACTIVE[PLACE])])[0]


def _asking(made: Workload, slo: SLO) -> Workload:
    """The requests, with these targets, and as much output as the model has left."""
    count = len(made)
    ttft, tbt = (np.full(count, seconds_or_inf(target)) for target in (slo.ttft, slo.tbt))
    terms = replace(SloColumns.none(count), ttft=ttft, tbt=tbt)
    return replace(made.with_terms(terms), limit=LONGEST - made.prompt_len)


def _with_deadlines(made: Workload, place: System) -> Programs:
    """The programs, with deadlines by what their longest paths take alone."""
    programs, served = made.programs, served_alone(made, place)
    hurried = replace(programs, wait=np.zeros(len(made)), tool=np.full(len(made), -1))
    whole, work = (_makespans(one, served) for one in (programs, hurried))
    return replace(programs, deadline=(whole + (SLACK - 1) * work)[programs.program])


def _makespans(programs: Programs, served: np.ndarray) -> np.ndarray:
    """Seconds from start to end of each program if its calls take so long, float64 [p]."""
    ends = programs.earliest(np.zeros(len(served)), served) + served
    found = np.full(int(programs.program.max()) + 1, -math.inf)
    np.maximum.at(found, programs.program, ends)
    return found


def served_alone(made: Workload, place: System) -> np.ndarray:
    """Seconds of each call on an idle system that still has what its program computed before,
    float64 [n]."""
    own = made.programs.program[made.prefix_of] == made.programs.program
    found = np.where((made.prefix_of >= 0) & own, made.prefix_len, 0)
    model = place.cost_model
    first = prefill_times(model.batch_time, np.maximum(made.prompt_len - found, 1), LONGEST)
    last = BatchFeatures.of_decodes(np.ones(len(made)), made.lengths.total)
    return np.asarray(first + (made.output_len - 1) * model.batch_time(last))
