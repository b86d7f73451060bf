"""InferMax section 5 as a CP-SAT program: variables, constraints (1) to (5), batch times.

The paper gives every request i in batch j the variables S (tokens known), m (in the cache), c
(computed), g (a token comes out) and e (preempted), and ties them with the conditional constraints
(1) to (3), linearised with a big M (5). That relaxes to almost nothing: with it, the instances of
Figure 15 keep a gap of one half after a minute. Here the same five quantities are functions of the
*state* a request is in during a batch, one literal each, k being the tokens it has when the batch
ends:

    prefill k   computes all that is pending and writes token k; nothing, or part, was cached
    decode k    computes one token and writes token k
    hold k      computes nothing, keeps its cache
    chunk k     computes a part of what is pending; keeps `part` tokens in the cache
    rest k      computes nothing, keeps a part
    wait k      computes nothing, has no cache (and k = O: is done)

Exactly one state holds, and who may follow whom is linear in the literals (a flow through the
batches), which is (1) to (3) and termination:

    prefill, decode, hold k -> decode k+1, hold k, wait k     (m grows by c, or is lost)
    wait k                  -> prefill k+1, chunk k, wait k   (c at most S - m)
    chunk, rest k           -> prefill k+1, decode k+1, chunk k, rest k, wait k

A step to `wait` from a state with cache is the preemption e; c = 0 in it, as (2) has it. (4) and P
are sums over the requests of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from jaxserve.sched.cache.block_sizes import blocks_a_plane
from jaxserve.simulator.optimal.batch_time import BatchTime
from jaxserve.simulator.optimal.cells import PARTIAL, RUNS, WHOLE, Cell, Sums
from jaxserve.simulator.optimal.cost import ScaledCost
from jaxserve.simulator.optimal.problem import Problem
from jaxserve.simulator.optimal.replay import Replay, Schedule


class Program:
    """The constraint program of one problem.

    Args:
        problem: The scheduling problem.
        cost: The cost model, in units of time.
        batches: Most batches of a schedule.
        longest: Upper bound of a batch time, units.

    Attributes:
        model: CP-SAT's model.
        cells: By [request][batch].
        active: A literal for each batch, whether it computes anything; active ones come first.
        batch_cost: An expression for the time of each batch, units.
    """

    def __init__(self, problem: Problem, cost: ScaledCost, batches: int, longest: int) -> None:
        self.problem = problem
        workload = problem.workload
        self.cost = cost
        self.model = cp_model.CpModel()
        self.prompt = workload.prompt_len.tolist()
        self.output = workload.output_len.tolist()
        self.batches = batches
        self.cells = [[self._cell(i, j) for j in range(batches)] for i in range(len(workload))]
        for i, line in enumerate(self.cells):
            self._follow(i, line)
        self.active = [self.model.new_bool_var(f"active_{j}") for j in range(batches)]
        most_cached = max(self.cached(i, k) for i, k in enumerate(self.output))
        time = BatchTime(self.model, cost, problem, longest, most_cached)
        self.batch_cost = [self._batch(j, time) for j in range(batches)]
        self._order_twins()

    def cached(self, i: int, k: int) -> int:
        """Tokens in the cache of request i once token k is written: the last is never stored."""
        return int(self.prompt[i] + k - 1)

    def _blocks(self, tokens: int) -> int:
        return int(blocks_a_plane(tokens, self.problem.block_size))

    def _cell(self, i: int, j: int) -> Cell:
        """The states that request i can be in during batch j: k tokens need k batches, and the
        other O - k as many again."""
        out, left = self.output[i], self.batches - 1 - j
        room = self.problem.prefill_tokens
        kinds: list[tuple[str, Iterable[int]]] = [
            ("wait", range(out + 1)),
            ("prefill", range(1, out + 1)),
            ("decode", range(2, out + 1)),
            ("hold", range(1, out)),
        ]
        if self.problem.chunked:
            kinds += [("chunk", range(out)), ("rest", range(out))]
        states = {
            (kind, k): self.model.new_bool_var(f"{kind}_{i}_{j}_{k}")
            for kind, ks in kinds
            for k in ks
            if max(0, out - left) <= k <= j + (kind in ("prefill", "decode"))
            and not (kind == "prefill" and not self.problem.chunked and self.cached(i, k) > room)
        }
        self.model.add_exactly_one(states.values())
        cell = Cell(states)
        if self.problem.chunked:
            self._parts(i, j, cell)
        return cell

    def _parts(self, i: int, j: int, cell: Cell) -> None:
        model, most = self.model, self.cached(i, self.output[i])
        cell.part = model.new_int_var(0, most, f"part_{i}_{j}")
        cell.part_squared = model.new_int_var(0, most**2, f"part2_{i}_{j}")
        model.add_multiplication_equality(cell.part_squared, [cell.part, cell.part])
        for k, lit in cell.of_kinds(*PARTIAL):
            model.add(cell.part <= self.prompt[i] + k - 1).only_enforce_if(lit)
            model.add(cell.part >= 1).only_enforce_if(lit)
        for _, lit in cell.of_kinds("wait", *WHOLE):
            model.add(cell.part == 0).only_enforce_if(lit)
        cell.part_blocks = cell.part
        if self.problem.block_size > 1:
            cell.part_blocks = model.new_int_var(0, self._blocks(most), f"blocks_{i}_{j}")
            model.add(cell.part_blocks * self.problem.block_size >= cell.part)

    def _follow(self, i: int, line: list[Cell]) -> None:
        """Constrains which state may follow which. Before the first batch every request waits with
        no tokens."""
        out = self.output[i]
        before = Cell({("wait", 0): self.model.new_constant(1)})
        for cell in line:
            for k in range(out + 1):
                self._flow(before, cell, k)
            if self.problem.chunked:
                self._follow_parts(i, before, cell)
            before = cell
        total = Sums()
        for cell in line:
            total.add(cell, [self.cached(i, k) for k in range(out + 1)])
        self.model.add(total.tokens >= self.cached(i, out))
        self.model.add(total.quad >= self.prompt[i] ** 2)
        last = [line[-1].states.get((kind, out)) for kind in ("wait", "prefill", "decode")]
        self.model.add_exactly_one(lit for lit in last if lit is not None)

    def _flow(self, before: Cell, cell: Cell, k: int) -> None:
        """A request with k tokens continues in a state that may come next, and nothing else
        does."""
        whole, partial, waited = (
            [before.states[kind, k] for kind in kinds if (kind, k) in before.states]
            for kinds in (WHOLE, PARTIAL, ("wait",))
        )
        decode, prefill = (cell.states.get((kind, k + 1), 0) for kind in ("decode", "prefill"))
        hold, wait, chunk, rest = (
            cell.states.get((kind, k), 0) for kind in ("hold", "wait", "chunk", "rest")
        )
        add = self.model.add
        add(sum(whole + partial + waited) == decode + prefill + hold + wait + chunk + rest)
        add(hold <= sum(whole))
        add(rest <= sum(partial))
        add(decode + hold <= sum(whole + partial))
        add(prefill + chunk + rest <= sum(partial + waited))

    def _follow_parts(self, i: int, before: Cell, cell: Cell) -> None:
        """reused: the cached part on which a prefill, chunk or rest builds."""
        model, most = self.model, self.cached(i, self.output[i])
        cell.reused = model.new_int_var(0, most, f"reused_{i}")
        cell.reused_squared = model.new_int_var(0, most**2, f"reused2_{i}")
        cell.rested = model.new_int_var(0, most, f"rested_{i}")
        for _, lit in cell.of_kinds("prefill", *PARTIAL):
            model.add(cell.reused == before.part).only_enforce_if(lit)
            model.add(cell.reused_squared == before.part_squared).only_enforce_if(lit)
        for _, lit in cell.of_kinds("wait", "decode", "hold"):
            model.add(cell.reused == 0).only_enforce_if(lit)
            model.add(cell.reused_squared == 0).only_enforce_if(lit)
        for _, lit in cell.of_kinds("chunk"):
            model.add(cell.part >= cell.reused + 1).only_enforce_if(lit)
        for (kind, _), lit in cell.states.items():
            if kind == "rest":
                model.add(cell.part == cell.reused).only_enforce_if(lit)
                model.add(cell.rested == cell.part).only_enforce_if(lit)
            else:
                model.add(cell.rested == 0).only_enforce_if(lit)
        self._last_token(i, before, cell)
        self._imply(i, before, cell)

    def _imply(self, i: int, before: Cell, cell: Cell) -> None:
        """Implications of the conditions above, stated unconditionally for the solver's linear
        relaxation."""
        add = self.model.add
        add(cell.reused <= before.part)
        add(cell.reused_squared <= before.part_squared)
        add(cell.rested <= cell.reused)
        one = Sums()
        one.add(cell, [self.cached(i, k) for k in range(self.output[i] + 1)])
        add(one.tokens >= one.decodes + one.prefills)
        add(one.quad >= one.prefills)

    def _last_token(self, i: int, before: Cell, cell: Cell) -> None:
        """If one token is pending after the first was written, it is a decode, whatever came
        before: neither `RequestTable.decoding` nor a kernel sees a difference."""
        for k, lit in cell.of_kinds("prefill"):
            pending = 1 if k == 1 else 2
            self.model.add(cell.reused <= self.cached(i, k) - pending).only_enforce_if(lit)
        for k, lit in cell.of_kinds("decode"):
            for kind in PARTIAL:
                if (kind, k - 1) in before.states:
                    self.model.add(before.part == self.cached(i, k) - 1).only_enforce_if(
                        lit, before.states[kind, k - 1]
                    )

    def _batch(self, j: int, time: BatchTime) -> Any:
        """Constraint (4), P and the time of batch j, in units."""
        model, problem, cells = self.model, self.problem, [line[j] for line in self.cells]
        batch = Sums()
        for i, cell in enumerate(cells):
            batch.add(cell, [self.cached(i, k) for k in range(self.output[i] + 1)])
        active = self.active[j]
        has_prefill, has_decode = self._any(cells, "prefill", "chunk"), self._any(cells, "decode")
        model.add_bool_or(has_prefill, has_decode, ~active)
        model.add_implication(has_prefill, active)
        model.add_implication(has_decode, active)
        if j:
            model.add_implication(active, self.active[j - 1])
        for cell in cells:
            model.add(sum(lit for _, lit in cell.of_kinds(*RUNS)) <= active)
        self._memory(cells, active)
        model.add(batch.tokens <= problem.max_batch_tokens * active)
        if problem.prefill_tokens < problem.max_batch_tokens:
            model.add(batch.tokens - batch.decodes <= problem.prefill_tokens * has_prefill)
        return time.seconds_of(batch, active, has_prefill, has_decode)

    def _memory(self, cells: list[Cell], active: Any) -> None:
        """M. Nothing is held once all requests are done, and until then no batch is empty."""
        add, blocks = self.model.add, self.problem.kv_tokens // self.problem.block_size
        held = [
            (self._blocks(self.cached(i, k)), lit)
            for i, cell in enumerate(cells)
            for k, lit in cell.of_kinds(*WHOLE)
        ]
        whole = sum(size * lit for size, lit in held)
        add(whole + sum(cell.part_blocks for cell in cells) <= blocks * active)
        if self.problem.chunked:  # implied; these use literals only, which helps the solver's cuts
            some = sum(lit for cell in cells for _, lit in cell.of_kinds(*PARTIAL))
            add(whole + some <= blocks * active)
            add(sum(lit for size, lit in held if 2 * size > blocks) <= active)

    def _any(self, cells: list[Cell], *kinds: str) -> Any:
        """Whether a request is in one of these states."""
        found = self.model.new_bool_var("any")
        self.model.add_bool_or(
            [~found, *(lit for cell in cells for _, lit in cell.of_kinds(*kinds))]
        )
        for cell in cells:  # a request is in one state, so the sum is tighter than each literal
            self.model.add(sum(lit for _, lit in cell.of_kinds(*kinds)) <= found)
        return found

    def _order_twins(self) -> None:
        """Equal requests end in the order of their numbers, since they could be renamed."""
        last: dict[tuple[float, int, int], int] = {}
        arrival = self.problem.workload.arrival.tolist()
        for i, key in enumerate(zip(arrival, self.prompt, self.output, strict=True)):
            if key in last:
                self.model.add(self.end_batch(last[key]) <= self.end_batch(i))
            last[key] = i

    def end_batch(self, i: int) -> Any:
        """The number of the batch that writes the last token of request i, an expression."""
        out = self.output[i]
        return sum(
            j * lit
            for j, cell in enumerate(self.cells[i])
            for k, lit in cell.of_kinds("prefill", "decode")
            if k == out
        )

    def hint(self, replay: Replay) -> None:
        """Starts the search from a schedule of at most `batches` batches, with twins renamed."""
        order = _twins_by_end(replay)
        kv, decoding = replay.kv[:, order], replay.decoding[:, order]
        tokens = replay.schedule.tokens[:, order]
        for i, line in enumerate(self.cells):
            state, k = "wait", 0
            for j, cell in enumerate(line):
                held, count = (int(kv[j, i]), int(tokens[j, i])) if j < len(kv) else (0, 0)
                if count:
                    writes = held == self.prompt[i] + k
                    k += writes
                    state = "decode" if decoding[j, i] else "prefill" if writes else "chunk"
                else:
                    idle = "rest" if state in PARTIAL else "hold"
                    state = idle if held else "wait"
                for key, lit in cell.states.items():
                    self.model.add_hint(lit, int(key == (state, k)))
                if self.problem.chunked:
                    self.model.add_hint(cell.part, held if state in PARTIAL else 0)

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """The solver's schedule, up to its last batch that computes anything."""
        used = sum(solver.boolean_value(active) for active in self.active)
        tokens = np.zeros((used, len(self.cells)), np.int64)
        preempt = np.zeros(tokens.shape, bool)
        for i, line in enumerate(self.cells):
            before = "wait"
            for j, cell in enumerate(line[:used]):
                state = next(s for s, lit in cell.states.items() if solver.boolean_value(lit))
                tokens[j, i] = self._computed(i, cell, state, solver)
                lost = before != "wait" and state[1] < self.output[i]
                preempt[j, i] = state[0] == "wait" and lost
                before = state[0]
        return Schedule(tokens, preempt)

    def _computed(
        self, i: int, cell: Cell, state: tuple[str, int], solver: cp_model.CpSolver
    ) -> int:
        kind, k = state
        if kind not in RUNS:
            return 0
        if kind == "decode":
            return 1
        had = solver.value(cell.reused)
        return (self.cached(i, k) if kind == "prefill" else solver.value(cell.part)) - had


def _twins_by_end(replay: Replay) -> np.ndarray:
    """order[i] is the request whose schedule request i takes over, so that twins end in order of
    their numbers."""
    workload = replay.workload
    keys = np.stack([workload.arrival, workload.prompt_len, workload.output_len], axis=1)
    order = np.arange(len(workload))
    for key in np.unique(keys, axis=0):
        twins = np.flatnonzero((keys == key).all(axis=1))
        order[twins] = twins[np.argsort(replay.finish[twins], kind="stable")]
    return order
