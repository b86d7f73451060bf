"""How many bytes the operations of a compiled step move, and how few they could."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve_lab.compile_check.analysis.hlo import Array, Module, Operation

# Operations without work of their own, or that end an asynchronous one.
_NOTHING = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "tuple",
}
_SAME = {"bitcast", "get-tuple-element", "optimization-barrier", "tuple"}
_PARTS = {"slice", "dynamic-slice", "gather"}  # they read only what they return


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step moves on each device.

    Neither number counts the pool, since attention's reads depend on the contexts. A loop counts as
    often as the compiler knows it to run, else once; a conditional as the branch that moves most.

    Attributes:
        moved: Bytes that operations read from memory and write to it.
        floor: The least possible: used arguments read once, and the results written.
        kernels: Operations that run.
    """

    moved: int = 0
    floor: int = 0
    kernels: int = 0

    @property
    def times_floor(self) -> float:
        """moved / floor: 1 is the least possible; 0 if unknown."""
        return self.moved / self.floor if self.floor else 0.0


def traffic(module: Module, is_pool: Callable[[Operation], bool]) -> Traffic:
    """Counts the traffic of a step. is_pool says whether a parameter of the entry is the pool."""
    entry = module.computations[module.entry]
    pools = {a.size for op in entry if op.opcode == "parameter" and is_pool(op) for a in op.arrays}
    count = _Count(module, pools)
    kernels = count.run(module.entry)
    floor = 0
    for op in entry:
        if op.opcode == "parameter":
            floor += min(count.size(op.arrays), count.read[op.name])
        if op.is_root:
            floor += count.size(op.arrays)
    return Traffic(count.moved, floor, kernels)


class _Count:
    """pools: sizes of arrays that are the pool, in any shape."""

    def __init__(self, module: Module, pools: set[int]) -> None:
        self._module, self._pools = module, pools
        self.moved = 0
        self.read: Counter[str] = Counter()  # bytes by entry parameter

    def size(self, arrays: Sequence[Array]) -> int:
        """Bytes in memory, without the pool's."""
        return sum(a.size for a in arrays if not a.on_chip and a.size not in self._pools)

    def run(self, name: str, times: int = 1) -> int:
        """Counts the traffic of a computation that runs this often. Returns the number of
        operations."""
        values: dict[str, Operation] = {}
        origins: dict[str, set[str]] = {}
        kernels = 0
        for op in self._module.computations[name]:
            values[op.name] = op
            inputs = [values[operand] for operand in op.operands if operand in values]
            if op.opcode == "parameter":
                origins[op.name] = {op.name}
            elif op.opcode in _SAME:
                origins[op.name] = {o for source in inputs for o in origins.get(source.name, ())}
            if op.opcode in ("while", "call", "conditional"):
                runs = [self._alone(called, times * op.trips) for called in op.called]
                taken = [max(runs)] if op.opcode == "conditional" else runs
                self.moved += sum(moved for moved, _ in taken)
                kernels += sum(number for _, number in taken)
                for source in inputs:
                    self._note(origins.get(source.name, set()), self.size(source.arrays))
            elif op.opcode not in _NOTHING and not op.opcode.endswith("-done"):
                written = self._writes(op)
                kernels += times if self._runs(op) else 0
                self.moved += times * written
                for place, source in enumerate(inputs):
                    size = self._reads(op, place, source)
                    self.moved += times * size
                    self._note(origins.get(source.name, set()), size)
        return kernels

    def _alone(self, name: str, times: int) -> tuple[int, int]:
        """The traffic of a computation, not counted yet, and its number of operations."""
        before = self.moved
        kernels = self.run(name, times)
        moved, self.moved = self.moved - before, before
        return moved, kernels

    def _writes(self, op: Operation) -> int:
        """Bytes that it writes; for an update in place, only the new part."""
        update = self._update(op)
        if update is not None:
            return self.size(update[1].arrays)
        return sum(self.size(element) for element in op.written)

    def _update(self, op: Operation) -> tuple[int, Operation] | None:
        """For an operation whose result is an operand with an updated slice, which XLA does in
        place: (that operand's number, the new slice); None for any other."""
        if op.opcode != "fusion":
            return None
        inside = {inner.name: inner for inner in self._module.computations[op.called[0]]}
        root = next(inner for inner in inside.values() if inner.is_root)
        while root.opcode == "bitcast":
            root = inside[root.operands[0]]
        if root.opcode != "dynamic-update-slice":
            return None
        whole, new = (inside[name] for name in root.operands[:2])
        while whole.opcode == "bitcast":
            whole = inside[whole.operands[0]]
        return (whole.number, new) if whole.opcode == "parameter" else None

    def _note(self, origins: set[str], size: int) -> None:
        for name in origins:
            self.read[name] += size

    def _runs(self, op: Operation) -> bool:
        """Whether it copies into a TPU's VMEM, which runs beside other operations."""
        into = [array for element in op.written for array in element]
        return not (op.opcode.endswith("-start") and all(array.on_chip for array in into))

    def _reads(self, op: Operation, place: int, operand: Operation) -> int:
        """Bytes that it reads of operand number `place`."""
        whole = self.size(operand.arrays)
        if op.opcode in _PARTS or op.opcode.endswith("-start"):
            taken = sum(array.size for element in op.written for array in element)
            return min(whole, taken)
        if op.opcode != "fusion":
            return whole
        update = self._update(op)
        if update is not None and update[0] == place:
            return 0
        return min(whole, self._reads_inside(op.called[0], place, whole))

    def _reads_inside(self, name: str, place: int, whole: int) -> int:
        """Likewise for a fused computation's parameter."""
        lines = self._module.computations[name]
        same = {op.name for op in lines if op.opcode == "parameter" and op.number == place}
        taken = 0
        for op in lines:
            if op.opcode == "bitcast" and op.operands[0] in same:
                same.add(op.name)
            elif op.opcode in _PARTS and op.operands[0] in same:
                taken += sum(array.size for array in op.arrays)
            elif same.intersection(op.operands):
                return whole
        return taken
