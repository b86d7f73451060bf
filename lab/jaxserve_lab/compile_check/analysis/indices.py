"""Whether kernels of Pallas-Triton index arrays beyond 4 GiB with 64 bits."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax._src.lib import triton
from jax._src.lib.mlir import ir

_TARGET = "__gpu$xla.gpu.triton"
_REACH = 1 << 31  # elements; 4 GiB for a pool of 16-bit ones
_MOVE = re.compile(r"(%\w+) = tt\.addptr (%\w+), %\w+ : .*?(i32|i64)>?(?: loc.*)?$")
_SAME = re.compile(r"(%\w+) = tt\.(?:splat|broadcast|expand_dims|reshape) (%\w+)")


def narrow_indices(lowered: jax.stages.Lowered) -> list[str]:
    """Each array beyond 4 GiB (at 16 bits) that a kernel of the program indexes with 32 bits, as
    "kernel: operand number". Such a kernel would read wrong addresses."""
    problems: list[str] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            problems.extend(_of_call(operation))
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir()
    module.operation.walk(visit)
    return list(dict.fromkeys(problems))


def _of_call(call: Any) -> list[str]:
    attributes = call.attributes
    if ir.StringAttr(attributes["call_target_name"]).value != _TARGET:
        return []
    config = attributes["mhlo.backend_config"]
    types = [ir.RankedTensorType(operand.type) for operand in call.operands]
    types += [ir.RankedTensorType(result.type) for result in call.results]
    sizes = {number: _size(tuple(kind.shape)) for number, kind in enumerate(types)}
    large = {number for number, size in sizes.items() if size > _REACH}
    if not large:
        return []
    triton.dialect.register_dialect(call.context)
    text = str(ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes, call.context))
    name = ir.StringAttr(config["name"]).value
    return [f"{name}: operand {number}" for number in narrow_in(text, large)]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def narrow_in(text: str, large: set[int]) -> list[int]:
    """The arguments in `large` of the kernel in `text`, Triton's IR, to which an offset of 32 bits
    is added. Values are traced back to the argument of their first address."""
    origin: dict[str, int] = {f"%arg{number}": number for number in large}
    arguments: dict[int, None] = {}
    for line in text.splitlines():
        if moved := _MOVE.search(line.strip()):
            new, old, width = moved.groups()
            if _known(origin, new, old) is not None and width == "i32":
                arguments[origin[new]] = None
        elif same := _SAME.search(line):
            _known(origin, same[1], same[2])
    return list(arguments)


def _known(origin: dict[str, int], new: str, old: str) -> int | None:
    """Sets the origin of `new` to that of `old`; later regions reuse names."""
    if old in origin:
        origin[new] = origin[old]
    else:
        origin.pop(new, None)
    return origin.get(new)
