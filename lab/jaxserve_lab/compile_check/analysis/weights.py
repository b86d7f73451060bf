"""Which operations of a compiled step move weights instead of computing with them.

Normally a weight goes directly into a matmul, or a gather of some rows. If it is first copied,
sliced, transposed, converted or joined, by an operation or a fusion that does nothing else, it is
read and written once more in each step. Copies into a TPU's VMEM, or a v4's CMEM, are reads and do
not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxserve_lab.compile_check.analysis.hlo import Array, Module, Operation

MOST = 4 << 20  # bytes of weights that an operation may move, such as biases and norms

# Whether a value is weights, or that for each element of a tuple.
Has: TypeAlias = "bool | tuple[Has, ...]"

_SAME = {"bitcast", "copy-done", "slice-done", "async-done", "optimization-barrier"}
_MOVES = {
    "all-gather",
    "broadcast",
    "collective-permute",
    "concatenate",
    "convert",
    "copy",
    "copy-start",
    "dynamic-slice",
    "dynamic-update-slice",
    "pad",
    "reshape",
    "reverse",
    "slice",
    "slice-start",
    "transpose",
}
# Operations that move their first operand; the others are positions or values.
_FIRST_ONLY = {"dynamic-slice", "pad"}


@dataclass(frozen=True)
class Move:
    """An operation that moves weights.

    Attributes:
        name: With its "%".
        opcode: Such as "copy".
        size: Bytes of weights that it writes to memory.
    """

    name: str
    opcode: str
    size: int


_WIDENS = {"add", "and", "bitcast-convert", "multiply", "or", "shift-left", "subtract"}
_WIDENS |= {"shift-right-arithmetic", "shift-right-logical"}
_SMALL = {"f8e4m3fn", "s4", "s8", "u8"}


def moves(module: Module, is_weight: Callable[[Operation], bool], most: int = MOST) -> list[Move]:
    """The operations that move more than `most` bytes of weights each. is_weight says whether a
    parameter of the entry is a weight."""
    return _found(module, is_weight, most, _MOVES)


def dequantized(
    module: Module, is_weight: Callable[[Operation], bool], most: int = MOST
) -> list[Move]:
    """The operations that write more than `most` bytes of dequantised weights instead of computing
    with them, or that move quantised weights. is_weight as in `moves`."""

    def is_small(op: Operation) -> bool:
        return is_weight(op) and all(array.dtype in _SMALL for array in op.arrays)

    return _found(module, is_small, most, _MOVES | _WIDENS)


def _found(
    module: Module, is_weight: Callable[[Operation], bool], most: int, moving: set[str]
) -> list[Move]:
    entry = module.computations[module.entry]
    parameters = {op.number: is_weight(op) for op in entry if op.opcode == "parameter"}
    result: list[Move] = []
    _run(
        module,
        module.entry,
        [parameters.get(n, False) for n in range(len(parameters))],
        result,
        moving,
    )
    return [move for move in dict.fromkeys(result) if move.size > most]


def is_parameter_of_model(op: Operation) -> bool:
    """Whether an entry parameter is one of the step's `params`."""
    return op.source.startswith("params")


def _run(
    module: Module, name: str, given: Sequence[Has], found: list[Move] | None, moving: set[str]
) -> Has:
    """Whether the computation's result is weights. found: collects moves; None inside a fusion,
    which writes only its result. moving: the operations that move."""
    has: dict[str, Has] = {}
    result: Has = False
    for op in module.computations[name]:
        inputs = [has.get(operand, False) for operand in op.operands]
        has[op.name] = _result(module, op, inputs, given, found, moving)
        if op.is_root:
            result = has[op.name]
    return result


def _result(
    module: Module,
    op: Operation,
    inputs: list[Has],
    given: Sequence[Has],
    found: list[Move] | None,
    moving: set[str],
) -> Has:
    if op.opcode == "parameter":
        return given[op.number] if op.number < len(given) else False
    if op.opcode == "tuple":
        return tuple(inputs)
    if op.opcode == "get-tuple-element":
        whole = inputs[0]
        return whole[op.number] if isinstance(whole, tuple) else whole
    if op.opcode in _SAME:
        return inputs[0]
    if op.opcode == "while":
        return _run(module, op.called[0], inputs, found, moving)
    if op.opcode in ("call", "conditional"):
        # A conditional's first operand is the choice, the others belong to the branches.
        own = [[value] for value in inputs[1:]] if op.opcode == "conditional" else [inputs]
        results = [_run(module, *pair, found, moving) for pair in zip(op.called, own, strict=False)]
        return next((value for value in results if _any(value)), False)
    if op.opcode == "fusion" or (op.opcode == "async-start" and op.called):
        moved = _run(module, op.called[0], inputs, None, moving)
    elif op.opcode in moving:
        moved = _any(inputs[0] if op.opcode in _FIRST_ONLY and inputs else tuple(inputs))
    else:
        return False
    if found is not None and (size := _written(op, moved)):
        found.append(Move(op.name, op.opcode, size))
    return moved


def _any(has: Has) -> bool:
    return any(_any(part) for part in has) if isinstance(has, tuple) else has


def _written(op: Operation, moved: Has) -> int:
    """Bytes of weights that it writes to memory."""
    written = op.written
    if isinstance(moved, tuple) and len(moved) == len(written):
        return sum(_bytes(array) for array, has in zip(written, moved, strict=True) if _any(has))
    return sum(_bytes(array) for array in written) if _any(moved) else 0


def _bytes(arrays: Sequence[Array]) -> int:
    return sum(array.size for array in arrays if not array.on_chip)
