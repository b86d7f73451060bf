"""AMX: tile registers of 16 rows of 64 bytes, and products of them.

A product adds to a tile C of float32 that of A [16, 32] and B [32, 16], both bfloat16. In memory, a
row of B holds two neighbouring rows of the matrix, interleaved by column: pairs. The sums for every
number of C have the same order: 16 pairs one after the other, even and odd factors separately, then
both sums and C. Denormals count as 0.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxserve.pallas_kernels.cpu import pairs, vectors
from jaxserve.pallas_kernels.cpu.numba_ffi import intrinsic
from jaxserve.pallas_kernels.cpu.pairs import LINE

SIDE = 16  # rows of a tile, and columns of C
DEPTH = 32  # inputs of a product
BYTES = 1024  # of a tile
REGISTERS = 8
C, A, B = (0, 1, 2, 3), (4, 5), (6, 7)
_FEATURES = ("amx-tile", "amx-bf16")
_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18  # Linux on x86-64

_BYTE, _HALF = ir.IntType(8), ir.IntType(16)
_CONFIGURATION = ir.ArrayType(_BYTE, 64)


@functools.cache
def usable() -> bool:
    """Whether the processor has tiles and Linux lets this process use them; asked once for all
    threads."""
    found = llvm.get_host_cpu_features()
    if not pairs.has_pairs() or not all(found.get(name, False) for name in _FEATURES):
        return False
    return _permitted()


def _permitted() -> bool:
    syscall = getattr(ctypes.CDLL(None), "syscall", None)
    return syscall is not None and syscall(_ARCH_PRCTL, _REQ_XCOMP_PERM, _XTILEDATA) == 0


def _further(builder: Any, address: Any, size: int) -> Any:
    return builder.add(address, vectors.constant(size))


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [one.type for one in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


@intrinsic
def begin(_: Any, columns: Any) -> Any:
    """Configures this thread's registers: all of the A registers, and `columns` columns of B and C.
    Each `begin` must be followed by an `end`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # The operand of LDTILECFG: palette 1, then the bytes of a row and the rows of each
        # register.
        line = builder.trunc(builder.mul(args[0], vectors.constant(vectors.BYTES)), _HALF)
        place = cgutils.alloca_once_value(builder, ir.Constant(_CONFIGURATION, None))
        start = builder.ptrtoint(place, vectors.WORD)
        vectors.store(builder, ir.Constant(_BYTE, 1), start, 1)
        for register in range(REGISTERS):
            size = ir.Constant(_HALF, LINE) if register in A else line
            vectors.store(builder, size, _further(builder, start, 16 + 2 * register), 2)
            rows = ir.Constant(_BYTE, SIDE)
            vectors.store(builder, rows, _further(builder, start, 48 + register), 1)
        _call(builder, "ldtilecfg", builder.inttoptr(start, cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.none(types.int64), generate


@intrinsic
def end(_: Any) -> Any:
    """Releases this thread's registers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(), generate


def _register(number: Any) -> Any:
    return ir.Constant(_BYTE, number.literal_value)


@intrinsic(prefer_literal=True)
def zero(_: Any, tile: Any) -> Any:
    """Fills a register (a literal) with zeros."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilezero", _register(tile))
        return context.get_dummy_value()

    return types.none(tile), generate


def _moves(name: str) -> Any:
    def typed(_: Any, tile: Any, address: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.inttoptr(args[1], cgutils.voidptr_t)
            _call(builder, name, _register(tile), place, args[2])
            return context.get_dummy_value()

        return types.none(tile, types.int64, types.int64), generate

    return intrinsic(prefer_literal=True)(typed)


# (Register, a literal; address; bytes from one row there to the next.)
load, store = _moves("tileloadd64"), _moves("tilestored64")


@intrinsic(prefer_literal=True)
def multiply(_: Any, c: Any, a: Any, b: Any) -> Any:
    """Adds a @ b to c.

    Args:
        c, a, b: Registers, literals.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tdpbf16ps", *map(_register, (c, a, b)))
        return context.get_dummy_value()

    return types.none(c, a, b), generate
