"""Kernels that numba compiles, called by XLA's own threads through its foreign function interface.

A handler is given a call frame by XLA (the C structures of `xla/ffi/api/c_api.h`, which jaxlib
carries) and returns 0 for success. It cuts its work into shares, which it and its helpers take one
by one from a counter: a free thread takes the next share, and a late thread finds nothing left. It
neither runs Python nor waits for it.

Helpers are threads of this process, one for each core except the caller's. A decode step makes
hundreds of calls of some tens of microseconds each, and waking a thread takes about as long. So a
helper polls for the next call for a while before it sleeps, and yields meanwhile, since XLA's own
threads need the cores between calls. Each helper has a place, where a caller leaves its block; the
caller takes it back if the helper has not come by the end. A thread that takes a block from a place
holds it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils, registry
from numba.core.ccallback import CFunc
from numba.extending import intrinsic as _intrinsic

from jaxserve.numba_cache.checked_cache import cache_of

intrinsic: Any = _intrinsic  # by its type hints, its result could not be called from Python

# Nothing calls these functions from Python. What would let it takes a sixth of the time to compile.
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
# Without fast math: sums in another order have other bits.
INLINE: dict[str, Any] = {**OPTIONS, "forceinline": True}

# Offsets into XLA's structures, in words of 8 bytes.
_FRAME = 21  # XLA_FFI_CallFrame, without the future at its end
_EXTENSION, _API, _STAGE, _ARGS, _RETS = 1, 2, 4, 9, 14
_EXECUTE = 3  # the stage
_DATA, _DIMS = 3, 5  # of XLA_FFI_Buffer
_VERSION = 4  # of XLA_FFI_Api

# Offsets into the block that the threads of one call share, in words.
_NEXT, _DONE, _HOLDERS, _SHARES, _PLAN, _COUNT, _TASK, _OPERANDS = range(8)

# Offsets into a helper's memory, which has cache lines of its own, in words: a block to help with,
# whether it sleeps, and both ends of the pipe that wakes it.
_PLACE, _ASLEEP, _READ, _WRITE, _LETTER, _HELPER = 0, 1, 2, 3, 4, 16
_LOOKS = 400  # polls for the next call, some 200 us
_MOST_HELPERS = 63
_HELPERS = "jaxserve_kernel_helpers"  # that memory, after the number of helpers


_WORD = ir.IntType(64)
_malloc: Any = types.ExternalFunction("malloc", types.int64(types.int64))
free: Any = types.ExternalFunction("free", types.void(types.int64))
copy: Any = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_read: Any = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write: Any = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as a pointer for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def fetch_add(_: Any, address: Any, value: Any) -> Any:
    """Atomically adds the value to the word at the address. Returns the word before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", word, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _exchange(_: Any, address: Any, expected: Any, value: Any) -> Any:
    """Atomically replaces the word at the address by the value if it is the expected one. Returns
    the word before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], _WORD.as_pointer())
        both = builder.cmpxchg(word, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(both, 0)

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def _load(_: Any, address: Any) -> Any:
    """Atomically loads the word at the address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], _WORD.as_pointer())
        return builder.load_atomic(word, "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _call(_: Any, function: Any, argument: Any) -> Any:
    """Calls the C function at an address with one word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [args[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _flush_denormals(_: Any) -> Any:
    """Makes this thread treat denormals as 0, like XLA's own threads, so that a share has the same
    result in each thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, module = ir.IntType(32), builder.module
        if llvm.get_process_triple().startswith(("x86", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
            place = cgutils.alloca_once(builder, word)
            at = builder.bitcast(place, cgutils.voidptr_t)
            builder.call(cgutils.get_or_insert_function(module, kind, "llvm.x86.sse.stmxcsr"), [at])
            flags = builder.or_(builder.load(place), ir.Constant(word, 0x8040))  # results, operands
            builder.store(flags, place)
            builder.call(cgutils.get_or_insert_function(module, kind, "llvm.x86.sse.ldmxcsr"), [at])
        elif llvm.get_process_triple().startswith(("aarch64", "arm64")):
            get, put = ir.FunctionType(_WORD, []), ir.FunctionType(ir.VoidType(), [_WORD])
            get = cgutils.get_or_insert_function(module, get, "llvm.aarch64.get.fpcr")
            put = cgutils.get_or_insert_function(module, put, "llvm.aarch64.set.fpcr")
            builder.call(put, [builder.or_(builder.call(get, []), ir.Constant(_WORD, 1 << 24))])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic(prefer_literal=True)
def address_of(_: Any, symbol: Any) -> Any:
    """The address of the C function of this name, a constant. It is looked up by name when code is
    loaded, so that compiled code can be stored on disk."""
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


@njit(**OPTIONS)
def allocate(count: int) -> int:
    """The address of new memory for this many words. It is freed with the block if given to
    `finish`, else by `free`."""
    return _malloc(8 * count)


@njit(**OPTIONS)
def operands(block: int) -> Any:
    """A call's operands and then its results, int64, for `data` and `dims`."""
    return words(block + 8 * _OPERANDS, words(block, _OPERANDS)[_COUNT])


@njit(**OPTIONS)
def take_share(block: int) -> int:
    """The number of the next share, or -1 if none is left. The block may not be used after a -1."""
    i = fetch_add(block + 8 * _NEXT, 1)
    if i < words(block, _OPERANDS)[_SHARES]:
        return i
    _release(block)
    return -1


@njit(**OPTIONS)
def finish_share(block: int) -> int:
    """Counts the previous share as computed, and takes the next like `take_share`."""
    fetch_add(block + 8 * _DONE, 1)
    return take_share(block)


@njit(**OPTIONS)
def _release(block: int) -> None:
    if fetch_add(block + 8 * _HOLDERS, -1) == 1:
        free(words(block, _OPERANDS)[_PLAN])
        free(block)


@njit(**OPTIONS)
def _ask_helpers(helpers: int, block: int, wanted: int) -> None:
    """Offers the block to up to `wanted` helpers that have no block."""
    place = helpers
    for _ in range(words(helpers, 1)[0]):
        place += 8 * _HELPER
        if wanted > 0 and _load(place) == 0:
            fetch_add(block + 8 * _HOLDERS, 1)
            if _exchange(place, 0, block) != 0:  # it has another call's block
                fetch_add(block + 8 * _HOLDERS, -1)
                continue
            wanted -= 1
            if _exchange(place + 8 * _ASLEEP, 1, 0) == 1:
                _write(words(place, _HELPER)[_WRITE], place + 8 * _LETTER, 1)


@njit(**OPTIONS)
def _dismiss_helpers(helpers: int, block: int) -> None:
    """Takes the block back from helpers that have not come."""
    place = helpers
    for _ in range(words(helpers, 1)[0]):
        place += 8 * _HELPER
        if _load(place) == block and _exchange(place, block, 0) == block:
            fetch_add(block + 8 * _HOLDERS, -1)


def _help(place: int) -> int:
    """The loop of a helper. place: address of its memory."""
    _flush_denormals()
    looked = 0
    while True:
        block = _load(place)
        if block != 0 and _exchange(place, block, 0) == block:
            _call(words(block, _OPERANDS)[_TASK], block)
            looked = 0
        elif looked < _LOOKS:
            looked += 1
            sched_yield()
        else:
            _exchange(place + 8 * _ASLEEP, 0, 1)
            # A caller that leaves a block from here on sees that the helper has to be woken.
            if _load(place) == 0:
                got = _read(words(place, _HELPER)[_READ], place + 8 * (_LETTER + 1), 1)
                if got != 1:  # the pipe was closed: this helper ends
                    return 0
            _exchange(place + 8 * _ASLEEP, 1, 0)
            looked = 0
    return 0


@njit(**OPTIONS)
def begin(frame: int) -> int:
    """Begins a handler. Returns the address of the block that the call's threads share, or 0 with
    nothing to compute."""
    given = words(frame, _FRAME)
    if given[_EXTENSION] != 0:  # XLA asks for the version: answer with its own
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
    for i in range(ins):  # with slices, numba compiles for a second longer
        found[i] = arguments[i]
    for i in range(outs):
        found[ins + i] = results[i]
    return block


@njit(**OPTIONS)
def finish(frame: int, block: int, shares: int, address: int, task: int) -> int:
    """Ends a handler: computes all shares, by this thread and helpers.

    Args:
        frame: Address of XLA's call frame.
        block: From `begin`; 0 for nothing to compute.
        shares: Number of shares.
        address: Memory of `allocate` with the plan for all shares; freed with the block. 0 for
            none.
        task: Address of a function that computes shares of a block until none is left.

    Returns:
        0, for success.
    """
    if block == 0:
        return 0
    shared = words(block, _OPERANDS)
    # The block has two holders: this function, and the task that it calls itself.
    shared[_NEXT], shared[_DONE], shared[_HOLDERS] = 0, 0, 2
    shared[_SHARES], shared[_PLAN] = shares, address
    shared[_TASK] = task
    helpers = address_of(_HELPERS)
    if shares > 1:
        _ask_helpers(helpers, block, shares - 1)
    _call(task, block)
    if shares > 1:
        _dismiss_helpers(helpers, block)
    while fetch_add(block + 8 * _DONE, 0) < shares:
        sched_yield()
    _release(block)
    return 0


@njit(**OPTIONS)
def threads() -> int:
    """Number of threads of a call: helpers and the caller."""
    return words(address_of(_HELPERS), 1)[0] + 1


def _start_helpers() -> None:
    """Starts the helpers, once per process, before any kernel is compiled."""
    with _starting:
        if _helpers:
            return
        count = min(_cores() - 1, _MOST_HELPERS)
        room = np.zeros((count + 2) * _HELPER, np.int64)
        memory = room[-(room.ctypes.data // 8) % _HELPER :]
        memory[0] = count
        _helpers.append(room)
        # Never freed: helpers look there until the process ends, after its modules are gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(room))
        llvm.add_symbol(_HELPERS, memory.ctypes.data)
        life = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(_compiled(_help, "jaxserve_help"))
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:  # a signal would interrupt a helper's read
            for i in range(1, count + 1):
                part = memory[i * _HELPER :]
                part[[_READ, _WRITE]] = os.pipe()
                name, where = f"kernel-helper-{i}", (part.ctypes.data,)
                threading.Thread(target=life, args=where, name=name, daemon=True).start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _cores() -> int:
    """Number of cores that this process may use, by its affinity and its cgroup's quota."""
    whole = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


_helpers: list[np.ndarray] = []  # their memory
_starting = threading.Lock()


def compiled_once(target: Callable[..., str]) -> Callable[..., str]:
    """Makes a function that registers a kernel and returns its name run once for its arguments,
    since several threads compile steps."""
    lock, run = threading.Lock(), functools.cache(target)

    @functools.wraps(target)
    def locked(*args: Any, **kwargs: Any) -> str:
        with lock:
            return run(*args, **kwargs)

    return locked


def register(
    name: str,
    plan: Callable[[Any], Any],
    share: Callable[[Any, int, int], None],
    *files: str,
    parts: Iterable[Any] = (),
) -> str:
    """Makes a kernel the target of `jax.ffi.ffi_call` of this name on CPUs. It is compiled now, or
    read from numba's cache on disk.

    Args:
        name: Name of the target.
        plan: (operands) -> (number of shares, address of memory of `allocate` with the plan, or 0).
            Jitted; may only close over numbers.
        share: (operands, that address, number of the share), computes one share. Jitted; may only
            close over numbers.
        *files: Source files of the code.
        parts: Jitted functions that these two call and that are made for this kernel alone.

    Returns:
        The name.
    """
    symbol, code = f"{name}_task", digest(*files)
    named = {"plan": plan, "share": share, **{one.__name__: one for one in parts}}
    for function, part in named.items():
        _own_name(part, f"{name}_{function}")
    _start_helpers()

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


def _own_name(function: Any, name: str) -> None:
    """Gives a jitted function a unique name. numba distinguishes closures of one function by a
    number that counts from 1 in each process, so with the cache on disk one kernel could call
    another's code."""
    function.py_func.__qualname__ = name


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

    It is stored on disk by `name` and this processor. The name must be unique: if two processes
    wrote different code to the same files, one would leave its code under the other's key.
    """
    machine = repr(registry.cpu_target.target_context.codegen().magic_tuple())
    function.__qualname__ = f"{name}_{hashlib.sha256(machine.encode()).hexdigest()[:8]}"
    made: Any = CFunc(function, ((types.int64,), types.int64), {}, OPTIONS)
    made._cache = cache_of(function)
    made.compile()
    _kept.append(made)
    return int(made.address)


_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
