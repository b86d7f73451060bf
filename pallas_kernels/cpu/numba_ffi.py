"""Kernels that numba compiles, called by XLA's own threads through its foreign function interface.

A handler is given a call frame by XLA (the C structures of `xla/ffi/api/c_api.h`, which jaxlib
carries) and returns 0 for success. It cuts its work into shares, which XLA's threads and itself
take one by one from a counter: whoever is free takes the next, and a thread that comes late finds
nothing left. No Python runs in it, and none is waited for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from types import FunctionType
from typing import Any

import jax
import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils, registry
from numba.core.caching import FunctionCache
from numba.extending import intrinsic as _intrinsic

log = logging.getLogger(__name__)

intrinsic: Any = _intrinsic  # by its types, Python could not call what it makes

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
INLINE: dict[str, Any] = {**OPTIONS, "forceinline": True}
FAST: dict[str, Any] = {**INLINE, "fastmath": {"nnan", "nsz", "arcp", "contract", "reassoc"}}

# Words of 8 bytes into XLA's structures.
_FRAME = 21  # XLA_FFI_CallFrame, without the future at its end
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGS, _RETS = 1, 2, 3, 4, 9, 14
_EXECUTE = 3  # the stage
_DATA, _DIMS = 3, 5  # of XLA_FFI_Buffer
_VERSION = 4  # of XLA_FFI_Api

# Words into what the threads of one call share.
_NEXT, _DONE, _HOLDERS, _SHARES, _PLAN, _COUNT, _OPERANDS = range(7)

_WORD = ir.IntType(64)
_malloc: Any = types.ExternalFunction("malloc", types.int64(types.int64))
free: Any = types.ExternalFunction("free", types.void(types.int64))
copy: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as `carray` takes it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _fetch_add(_: Any, address: Any, value: Any) -> Any:
    """The word at the address, to which the value is then added, at once for all threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", word, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(_: Any, function: Any, argument: Any) -> Any:
    """Calls the C function of one word at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [args[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def address_of(_: Any, symbol: Any) -> Any:
    """The address of the C function of this name, a constant. It is looked up by name when code is
    loaded, so that compiled code can be kept on disk."""
    if not isinstance(symbol, types.StringLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD])
        found = cgutils.get_or_insert_function(builder.module, kind, symbol.literal_value)
        return builder.ptrtoint(found, _WORD)

    return types.int64(symbol), generate


@njit(**OPTIONS)
def words(address: int, count: int) -> Any:
    """The int64 numbers at an address."""
    return carray(pointer(address), (count,), np.int64)


@njit(**OPTIONS)
def data(operand: int) -> Any:
    """A pointer to the numbers of an operand, an XLA_FFI_Buffer, for `carray`."""
    return pointer(data_address(operand))


@njit(**OPTIONS)
def data_address(operand: int) -> int:
    """The address of an operand's numbers."""
    return words(operand, 6)[_DATA]


@njit(**OPTIONS)
def int32s(operand: int) -> Any:
    """An operand of one axis, int32."""
    return carray(data(operand), (dims(operand, 1)[0],), np.int32)


@njit(**OPTIONS)
def dims(operand: int, rank: int) -> Any:
    """The shape of an operand: int64 [rank]."""
    return words(words(operand, 6)[_DIMS], rank)


_HEADER = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"


def _api_word(function: str) -> int:
    """Where in XLA_FFI_Api a function is, by jaxlib's own header: their order may change."""
    fields = r"^\s*_XLA_FFI_API_STRUCT_FIELD\((\w+)\);"
    return 6 + re.findall(fields, _HEADER.read_text(), re.MULTILINE).index(function)


_SCHEDULE = _api_word("XLA_FFI_ThreadPool_Schedule")
_THREADS = _api_word("XLA_FFI_ThreadPool_NumThreads")


@njit(**OPTIONS)
def allocate(count: int) -> int:
    """The address of memory for so many words. Freed with the block if given to `finish`, else with
    `free`."""
    return _malloc(8 * count)


@njit(**OPTIONS)
def operands(block: int) -> Any:
    """A call's operands and then its results, int64, for `data` and `dims`."""
    return words(block + 8 * _OPERANDS, words(block, _OPERANDS)[_COUNT])


@njit(**OPTIONS)
def take_share(block: int) -> int:
    """The number of the next share, or -1 if none is left. The block may not be used after a -1."""
    i = _fetch_add(block + 8 * _NEXT, 1)
    if i < words(block, _OPERANDS)[_SHARES]:
        return i
    _release(block)
    return -1


@njit(**OPTIONS)
def finish_share(block: int) -> int:
    """Counts the share before as computed, and takes the next as `take_share` does."""
    _fetch_add(block + 8 * _DONE, 1)
    return take_share(block)


@njit(**OPTIONS)
def _release(block: int) -> None:
    if _fetch_add(block + 8 * _HOLDERS, -1) == 1:
        free(words(block, _OPERANDS)[_PLAN])
        free(block)


@njit(**OPTIONS)
def _call_helpers(frame: int, block: int, task: int) -> None:
    """Has other threads of XLA's pool do the task, too."""
    given, asked = words(frame, _FRAME), _malloc(8 * 6)
    api, query = words(given[_API], _SCHEDULE + 1), words(asked, 6)
    query[0], query[1], query[2], query[3], query[5] = 32, 0, given[_CONTEXT], asked + 40, 1
    _call(api[_THREADS], asked)
    helpers = min(query[5], words(block, _OPERANDS)[_SHARES]) - 1
    query[0], query[3], query[4] = 40, task, block
    for _ in range(helpers):
        _fetch_add(block + 8 * _HOLDERS, 1)
        if _call(api[_SCHEDULE], asked) != 0:
            _fetch_add(block + 8 * _HOLDERS, -1)
            break
    free(asked)


@njit(**OPTIONS)
def begin(frame: int) -> int:
    """Begins a handler. Returns the address of the block that the call's threads share, or 0 with
    nothing to compute."""
    given = words(frame, _FRAME)
    if given[_EXTENSION] != 0:  # XLA asks for the version: the one that it has
        metadata = words(words(given[_EXTENSION], 4)[3], 5)
        metadata[3] = words(given[_API], _VERSION + 1)[_VERSION]
        metadata[4] = 0  # traits
        return 0
    if given[_STAGE] & 0xFFFFFFFF != _EXECUTE:
        return 0
    ins, outs = given[_ARGS - 2], given[_RETS - 2]
    block = _malloc(8 * (_OPERANDS + ins + outs))
    words(block, _OPERANDS)[_COUNT] = ins + outs
    found = operands(block)
    arguments, results = words(given[_ARGS], ins), words(given[_RETS], outs)
    for i in range(ins):  # assigned as slices, numba needs a second more for their errors' texts
        found[i] = arguments[i]
    for i in range(outs):
        found[ins + i] = results[i]
    return block


@njit(**OPTIONS)
def finish(frame: int, block: int, shares: int, address: int, task: int) -> int:
    """Ends a handler: has all shares computed, by this thread and others of XLA's pool.

    Args:
        frame: Address of XLA's call frame.
        block: From `begin`; 0 for nothing to compute.
        shares: Number of shares.
        address: Memory of `allocate` with what all shares need to know; freed with the block. 0 for
            none.
        task: Address of a function that computes shares of a block until none is left.

    Returns:
        0, for success.
    """
    if block == 0:
        return 0
    shared = words(block, _OPERANDS)
    # Two hold the block: this function, and the task as it calls it itself.
    shared[_NEXT], shared[_DONE], shared[_HOLDERS] = 0, 0, 2
    shared[_SHARES], shared[_PLAN] = shares, address
    if shares > 1:
        _call_helpers(frame, block, task)
    _call(task, block)
    while _fetch_add(block + 8 * _DONE, 0) < shares:
        _sched_yield()
    _release(block)
    return 0


def compiled_once(target: Callable[..., str]) -> Callable[..., str]:
    """Runs a function that registers a kernel, and returns its name, once for its arguments: steps
    are compiled by several threads."""
    lock, run = threading.Lock(), functools.cache(target)

    @functools.wraps(target)
    def locked(*args: Any, **kwargs: Any) -> str:
        with lock:
            return run(*args, **kwargs)

    return locked


def register(
    name: str, plan: Callable[[Any], Any], share: Callable[[Any, int, int], None], *files: str
) -> str:
    """Makes a kernel the target of `jax.ffi.ffi_call` of this name on CPUs. It is compiled now, or
    read from numba's cache on disk.

    Args:
        name: Of the target.
        plan: (operands) -> (number of shares, address of memory of `allocate` with what all shares
            need to know, or 0). Jitted; may close over numbers only.
        share: (operands, that address, number of the share), computes one share. Jitted; may close
            over numbers only.
        *files: Source files of the code.

    Returns:
        The name.
    """
    symbol, code = f"{name}_task", digest(*files)

    def handler(frame: int) -> int:
        len(code)
        block = begin(frame)
        shares, address = _plan(operands(block)) if block else (0, 0)
        return finish(frame, block, shares, address, address_of(symbol))

    def task(block: int) -> int:
        len(code)
        i = take_share(block)
        while i >= 0:
            _share(operands(block), words(block, _OPERANDS)[_PLAN], i)
            i = finish_share(block)
        return 0

    llvm.add_symbol(symbol, _compiled(_with(task, _share=share), symbol))
    address = _compiled(_with(handler, _plan=plan), f"{name}_handler")
    jax.ffi.register_ffi_target(name, _capsule(address, None, None), platform="cpu")
    return name


_plan: Any = None  # of handlers and tasks, see `_with`
_share: Any = None


def _with(function: Callable[[int], int], **globals_: Any) -> Callable[[int], int]:
    """The function with globals of its own. numba caches compiled code by the values that it closes
    over, and those of jitted functions differ between processes."""
    code, closure = function.__code__, function.__closure__
    return FunctionType(code, {**globals(), **globals_}, closure=closure)


def digest(*files: str) -> str:
    """Hash of the code of these files and this one, and of XLA's structures. numba itself looks at
    one file only."""
    code = b"".join(Path(file).read_bytes() for file in (str(_HEADER), __file__, *files))
    return hashlib.sha256(code).hexdigest()


_kept: list[Any] = []  # compiled functions that XLA has the addresses of


def _compiled(function: Callable[[int], int], name: str) -> int:
    """The address of the function's machine code.

    numba names its cache files by `name` and this processor. So the name must be unique: of two
    processes that write to the same files at once, one would leave its code under the other's key.
    """
    machine = repr(registry.cpu_target.target_context.codegen().magic_tuple())
    function.__qualname__ = f"{name}_{hashlib.sha256(machine.encode()).hexdigest()[:8]}"
    signature = types.int64(types.int64)
    keeping = cfunc(signature, cache=True, **OPTIONS)
    made: Any
    try:
        try:
            made = keeping(function)
        except (EOFError, UnpicklingError):  # a file is not whole: the machine may have gone down
            FunctionCache(function).flush()
            made = keeping(function)
    except (RuntimeError, OSError) as error:  # no folder for it that can be written; a full disk
        log.warning("%s is compiled at each start, it cannot be kept: %s", name, error)
        made = cfunc(signature, **OPTIONS)(function)
    _kept.append(made)
    return int(made.address)


_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
