"""The text of an optimised HLO module, as operations of computations."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(ROOT )?(%[\w.\-]+) = (.*)$")
_NAME = re.compile(r"%[\w.\-]+")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|branch_computations|true_computation|false_computation)="
    r"\{?((?:%[\w.\-]+(?:, )?)+)\}?"
)
_BITS = re.compile(r"[a-z]+(\d+)")
_ON_CHIP = re.compile(r"S\([13]\)")  # in a layout on TPUs: VMEM, or the v4's CMEM


@dataclass(frozen=True)
class Array:
    """An array, as a shape is printed in HLO.

    Attributes:
        dtype: XLA's name, such as "bf16", or "token".
        dims: Its shape; () for a scalar.
        layout: As printed; "" if there is none.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def size(self) -> int:
        """Bytes; 0 for a token."""
        bits = _BITS.match(self.dtype)
        width = 8 if self.dtype == "pred" else int(bits[1]) if bits else 0
        return math.prod(self.dims) * width // 8

    @property
    def on_chip(self) -> bool:
        """Whether its layout puts it in a TPU's on-chip memory."""
        return bool(_ON_CHIP.search(self.layout))


@dataclass(frozen=True)
class Operation:
    """One line of HLO.

    Attributes:
        name: With its "%".
        opcode: Such as "fusion".
        shape: The shape of its value, as printed.
        operands: Names.
        number: Number of a parameter, or of the element that a get-tuple-element takes; else -1.
        called: Names of the computations that it calls.
        is_root: Whether its value is the computation's.
        rest: The text after the operands.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    number: int
    called: tuple[str, ...]
    is_root: bool
    rest: str

    @functools.cached_property
    def elements(self) -> tuple[tuple[Array, ...], ...]:
        """The arrays of each element of a tuple; for any other value, its one array."""
        if not self.shape.startswith("("):
            return (arrays(self.shape),)
        return tuple(arrays(part) for part in _split(self.shape[1:-1]))

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of its value, in order."""
        return arrays(self.shape)

    @property
    def written(self) -> tuple[tuple[Array, ...], ...]:
        """The elements that it writes. The start of an asynchronous copy has a source and a target,
        but writes only the target."""
        if not self.opcode.endswith("-start") or len(self.elements) < 2:
            return self.elements
        return (self.elements[0 if self.opcode == "copy-start" else 1],)

    @property
    def trips(self) -> int:
        """How often a loop runs, if the compiler knows; else 1."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.rest)
        return int(known[1]) if known else 1

    @property
    def source(self) -> str:
        """The name of an entry parameter in the traced function, such as "params.layers[0]"."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


@dataclass(frozen=True)
class Module:
    """An HLO module.

    Attributes:
        computations: Operations in order, by the computation's name.
        entry: Name of the computation that is run.
    """

    computations: dict[str, tuple[Operation, ...]]
    entry: str


def read(text: str) -> Module:
    """Parses a module's text. ValueError if it has no entry computation."""
    computations: dict[str, list[Operation]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif current is not None and (match := _OPERATION.match(line)):
            current.append(_operation(match[2], match[3], bool(match[1])))
    if not entry:
        raise ValueError("the HLO has no entry computation")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def arrays(shape: str) -> tuple[Array, ...]:
    """Parses the arrays in a printed shape."""
    return tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


def _operation(name: str, text: str, is_root: bool) -> Operation:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].lstrip()
    begin = text.index("(")
    end = _closing(text, begin)
    opcode, inside, rest = text[:begin], text[begin + 1 : end], text[end + 1 :]
    number = -1
    if opcode == "parameter":
        number = int(inside)
    elif index := re.search(r", index=(\d+)", rest):
        number = int(index[1])
    called = tuple(n for names in _CALLED.findall(rest) for n in _NAME.findall(names))
    operands = tuple(_NAME.findall(inside))
    return Operation(name, opcode, shape, operands, number, called, is_root, rest)


def _closing(text: str, begin: int) -> int:
    """The position of the closing bracket for the one at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"unbalanced brackets in {text[:80]!r}")


def _split(shapes: str) -> Iterator[str]:
    """Splits the shapes of a tuple at the commas between them."""
    depth = begin = 0
    for place, letter in enumerate(shapes):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            yield shapes[begin:place]
            begin = place + 1
    yield shapes[begin:]
