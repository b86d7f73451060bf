"""Optimal schedules: InferMax section 5 on OR-Tools CP-SAT (the extra `optimal`).

`solve` finds how long the best schedule of a small workload takes, or whether one better than x
exists. It knows arrivals and output lengths, which policies do not. The program itself is in
`program.py`; results are replayed on the engine's own scheduler.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.sched.plan import InvalidPlan
from jaxserve.simulator.optimal.cost import ScaledCost
from jaxserve.simulator.optimal.problem import (
    OBJECTIVES,
    OptimalError,
    Problem,
    check_size,
    enough_batches,
    longest_batch,
)
from jaxserve.simulator.optimal.replay import Replay, ReplayError, Schedule

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from jaxserve.simulator.optimal.program import Program

__all__ = ["OBJECTIVES", "OptimalError", "Problem", "Solution", "one_by_one", "solve"]

EXACT = 2.0**52  # most units of time for which the solver's bounds are exact


@dataclass(frozen=True)
class Solution:
    """The solver's answer.

    Attributes:
        status: `optimal`: no schedule is better. `feasible`: the best schedule found, or, with
            `better_than`, one that is better. `infeasible`: no better one exists. `unknown`:
            undecided, usually because time ran out.
        objective: Of the replay, seconds; None without a schedule.
        bound: Seconds that no schedule of at most max_batches batches can beat; None with
            `better_than`.
        schedule: The schedule found, if any.
        replay: Its replay.
        max_batches: Most batches that were considered.
        all_batches: Whether schedules with more batches cannot be better.
        unit: Seconds of the solver's unit of time.
        rounding: Largest relative error of the bound from counting in units.
        literals: Variables of the program; 0 if it was not needed.
        wall_s: Seconds of the search.
        note: Caveats of the status.
    """

    status: str
    objective: float | None
    bound: float | None
    schedule: Schedule | None
    replay: Replay | None
    max_batches: int
    all_batches: bool
    unit: float
    rounding: float
    literals: int
    wall_s: float
    note: str = ""

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective; 0 up to `rounding` for an optimum."""
        if self.objective is None or self.bound is None:
            return None
        return max(0.0, 1 - self.bound / self.objective)


def solve(
    problem: Problem,
    *,
    better_than: float | None = None,
    warm_start: Schedule | None = None,
    max_batches: int = 0,
    time_limit: float = 60.0,
    workers: int = 2,
    seed: int = 0,
    on_improved: Callable[[float, float], None] | None = None,
) -> Solution:
    """Finds the best schedule, or, with `better_than`, any that is better.

    Args:
        problem: The scheduling problem.
        better_than: Stop at a schedule whose objective is below so many seconds.
        warm_start: Where to start the search (InferMax section 5, Challenge), by default one
            request after the other. A schedule that breaks a limit is ignored, and the note says
            so.
        max_batches: Most batches of a schedule, but no fewer than the start has; 0 for as many
            as an optimal one can have.
        time_limit: Seconds.
        workers: Threads of the solver. With more than one, the time to a result varies between
            runs.
        seed: Seed of the solver.
        on_improved: on_improved(objective, bound), in seconds, is called from the solver's thread.

    Raises:
        OptimalError: The program would be too large.
    """
    start, note = _start(problem, warm_start)
    cost = ScaledCost.from_cost_model(problem.cost_model)
    value = problem.value(start)
    target = value if better_than is None else min(better_than, value)
    enough = enough_batches(problem, cost, target)
    batches = min(max_batches or enough, enough)
    if better_than is None:
        batches = max(batches, len(start.schedule))
    task = _Task(problem, cost, start, batches, enough <= batches, note, better_than)
    if better_than is not None and value < better_than:
        return task.answer("feasible", start, None, 0, 0.0)
    return task.run(time_limit, workers, seed, on_improved)


@dataclass(frozen=True)
class _Task:
    problem: Problem
    cost: ScaledCost
    start: Replay
    batches: int
    all_batches: bool
    note: str
    better_than: float | None

    def run(
        self,
        time_limit: float,
        workers: int,
        seed: int,
        on_improved: Callable[[float, float], None] | None,
    ) -> Solution:
        began = time.monotonic()
        program, scale = self._program()
        solver = _solver(time_limit, workers, seed)
        callback = None if on_improved is None else _callback(on_improved, scale)
        status = solver.solve(program.model, callback)
        took = time.monotonic() - began
        name = solver.status_name(status)
        literals = len(program.model.proto.variables)
        if name in ("OPTIMAL", "FEASIBLE"):
            played = self.problem.play(program.schedule(solver))
            bound = scale(solver.best_objective_bound) if self.better_than is None else None
            proven = name == "OPTIMAL" and self.better_than is None
            said = "optimal" if proven and self.all_batches else "feasible"
            return self.answer(said, played, bound, literals, took)
        if self.better_than is not None:
            proven = name == "INFEASIBLE" and self.all_batches
            return self.answer("infeasible" if proven else "unknown", None, None, literals, took)
        if name == "INFEASIBLE" or name == "MODEL_INVALID":
            raise RuntimeError(f"the program is {name} though a schedule is known: {self.note}")
        bound = scale(solver.best_objective_bound)
        return self.answer("feasible", self.start, max(bound, 0.0), literals, took)

    def _program(self) -> tuple[Program, Callable[[float], float]]:
        """The program with its objective, and a function that converts the objective's units to
        seconds."""
        from jaxserve.simulator.optimal.program import Program

        problem, cost = self.problem, self.cost
        check_size(problem.workload, self.batches, problem.chunked)
        program = Program(problem, cost, self.batches, longest_batch(problem, cost))
        objective, offset = _objective(program, problem, self._most_time())
        count = len(problem.workload) if problem.objective == "mean_ttft" else 1

        def seconds(units: float) -> float:
            return (units - offset) * cost.unit / count / (1 + cost.error)

        if self.better_than is None:
            slack = (1 + cost.error) * problem.value(self.start) * count / cost.unit
            program.model.add(objective <= math.ceil(slack) + offset + self.batches)
            program.model.minimize(objective)
        else:
            limit = math.ceil(self.better_than * count / cost.unit - 1e-6) - 1
            program.model.add(objective <= limit + offset)
        if len(self.start.schedule) <= self.batches:
            program.hint(self.start)
        return program, seconds

    def _most_time(self) -> int:
        """Upper bound of the end of any useful schedule, in units."""
        problem = self.problem
        longest = self.batches * longest_batch(problem, self.cost)
        most = problem.workload.arrival.max() / self.cost.unit + longest
        if most > EXACT:
            raise OptimalError(
                f"{self.batches} batches take up to {most * self.cost.unit:.3g} s, too long to be "
                f"counted in units of {self.cost.unit:g} s; give a smaller max_batches"
            )
        return math.ceil(most)

    def answer(
        self, status: str, played: Replay | None, bound: float | None, literals: int, took: float
    ) -> Solution:
        notes = [self.note]
        value = None if played is None else self.problem.value(played)
        if value is not None and self.better_than is not None and value >= self.better_than:
            status, played, value = "unknown", None, None
            notes.append("what was found is better by less than the rounding error")
        if not self.all_batches:
            notes.append(f"only schedules of at most {self.batches} batches were considered")
        schedule = None if played is None else played.schedule
        return Solution(
            status,
            value,
            bound,
            schedule,
            played,
            self.batches,
            self.all_batches,
            self.cost.unit,
            self.cost.error,
            literals,
            took,
            "; ".join(filter(None, notes)),
        )


def one_by_one(problem: Problem) -> Schedule:
    """One request after the other, in chunks that P allows: always possible."""
    room = problem.prefill_tokens
    lines: list[tuple[int, int]] = []
    workload = problem.workload
    for i, (prompt, output) in enumerate(
        zip(workload.prompt_len.tolist(), workload.output_len.tolist(), strict=True)
    ):
        lines += [(i, min(room, prompt - done)) for done in range(0, prompt, room)]
        lines += [(i, 1)] * (output - 1)
    tokens = np.zeros((len(lines), len(workload)), np.int64)
    for j, (i, count) in enumerate(lines):
        tokens[j, i] = count
    return Schedule(tokens, np.zeros(tokens.shape, bool))


def _start(problem: Problem, warm_start: Schedule | None) -> tuple[Replay, str]:
    fallback = problem.play(one_by_one(problem))
    if warm_start is None:
        return fallback, ""
    try:
        return problem.play(warm_start), ""
    except (InvalidPlan, ReplayError) as error:
        return fallback, f"the warm start breaks a limit ({error}) and was left out"


def _objective(program: Program, problem: Problem, most: int) -> tuple[Any, int]:
    """The objective in units (summed over the requests for a mean), and the part to subtract: the
    sum of arrivals."""
    if problem.objective == "latency":
        return sum(program.batch_cost), 0
    model = program.model
    arrival = [program.cost.units(t) for t in problem.workload.arrival.tolist()]
    ends: list[Any] = []
    end: Any = 0
    for j, cost in enumerate(program.batch_cost):
        begin = end
        if any(arrival):
            begin = model.new_int_var(0, most, f"begin_{j}")
            model.add(begin >= end)
            for i, line in enumerate(program.cells):
                running = sum(lit for _, lit in line[j].of_kinds("prefill", "decode", "chunk"))
                if arrival[i]:
                    model.add(begin >= arrival[i] * running)
        end = model.new_int_var(0, most, f"end_{j}")
        model.add(end == begin + cost)
        ends.append(end)
    if problem.objective == "makespan":
        return ends[-1], 0
    firsts = []
    for i, line in enumerate(program.cells):
        first = model.new_int_var(0, most, f"first_{i}")
        for j, cell in enumerate(line):
            if ("prefill", 1) in cell.states:
                model.add(first >= ends[j]).only_enforce_if(cell.states["prefill", 1])
        # Implied: every batch up to it takes time. Without this the solver's bound is poor.
        number = sum(
            (j + 1) * c.states["prefill", 1]
            for j, c in enumerate(line)
            if ("prefill", 1) in c.states
        )
        model.add(first >= program.cost.least(0) * number)
        firsts.append(first)
    return sum(firsts), sum(arrival)


def _solver(time_limit: float, workers: int, seed: int) -> cp_model.CpSolver:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.relative_gap_limit = 0.0
    solver.parameters.absolute_gap_limit = 0.0
    if workers == 1:
        # Times are large integers, and the simplex over them stalls for good in about one run of
        # 300, even with three requests. Other workers would continue; a single one is stuck.
        solver.parameters.linearization_level = 0
    return solver


def _callback(
    on_improved: Callable[[float, float], None], seconds: Callable[[float], float]
) -> cp_model.CpSolverSolutionCallback:
    from ortools.sat.python import cp_model

    class Report(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            on_improved(seconds(self.objective_value), seconds(self.best_objective_bound))

    return Report()
