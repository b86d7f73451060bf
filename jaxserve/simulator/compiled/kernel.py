"""The event loop as a compiled function, kept on disk."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.core.event import Listener, install_listener

from jaxserve.numba_cache.checked_cache import cache_of
from jaxserve.sched import progress
from jaxserve.sched.cache import block_sizes
from jaxserve.sched.cost import cost_model, host_overhead
from jaxserve.sched.routing import estimate, fleet, random_draws, routers, snapshot, take_snapshot
from jaxserve.sched.slo import slo_columns
from jaxserve.sched.state import output_lengths, request_table
from jaxserve.sched.unified import policy_spec, unified_policy
from jaxserve.sched.unified.policy_spec import Key, Lapse
from jaxserve.simulator.compiled import code_cache
from jaxserve.simulator.compiled.cost import Costs
from jaxserve.simulator.compiled.jit import OPTIONS
from jaxserve.simulator.compiled.loop import serve
from jaxserve.simulator.compiled.order import LATER, LEAD
from jaxserve.simulator.compiled.state import REQUEST, Rules, World

_CONFIG: Any = numba.config
KEY = types.float64(numba.from_dtype(REQUEST), types.int64)
_DIRECTORY = "~/.cache/jaxserve/numba"  # unless NUMBA_CACHE_DIR is set


_serves: dict[types.Type, Any] = {}  # by the type of the costs


def compiled_serve(
    world: World, rules: Rules, costs: Costs, compiling: Callable[[], None] | None
) -> Any:
    """`loop.serve`, compiled for these arguments; the machine code is kept on disk.

    numba considers its cache valid as long as the function's own file is unchanged. This function's
    code is in several files, so each state of them has its own cache directory. If that cannot be
    written, nothing is kept.

    Args:
        world: The whole state.
        rules: Constants of the simulation.
        costs: The cost model.
        compiling: Called when numba begins to compile.
    """
    # All worlds and rules have one type, and numba takes as long to determine it as to serve
    # several hundred requests.
    kind = numba.typeof(costs)
    if kind not in _serves:
        kinds = (numba.typeof(world), numba.typeof(rules), kind)
        directory = Path(_CONFIG.CACHE_DIR or _DIRECTORY).expanduser() / _digest()
        keeps = code_cache.use(directory)
        # One of several processes compiles, and the others load the result.
        alone = code_cache.only_one(directory) if keeps and code_cache.is_empty(directory) else None
        watch = _Watch(compiling)
        with install_listener("numba:compile", watch):
            _serves[kind] = _compile(kinds, directory, keeps)
        if alone is not None:
            alone.close()
        if keeps and watch.compiled:
            code_cache.remove_old(directory)
    return _serves[kind]


class _Watch(Listener):
    """Notices whether anything is compiled, rather than loaded."""

    def __init__(self, compiling: Callable[[], None] | None) -> None:
        self.compiled = False
        self._compiling = compiling

    def on_start(self, event: Any) -> None:
        if not self.compiled and self._compiling is not None:
            self._compiling()
        self.compiled = True

    def on_end(self, event: Any) -> None:
        pass


def _compile(kinds: tuple[types.Type, ...], directory: Path, keeps: bool) -> Any:
    signature = types.int64(*kinds, types.FunctionType(KEY), types.int64)
    before = _CONFIG.CACHE_DIR
    _CONFIG.CACHE_DIR = str(directory)
    try:
        made: Any = njit(**OPTIONS)(serve)
        if keeps:
            made._cache = cache_of(serve)
        made.compile(signature)
        made.disable_compile()
        return made
    finally:
        _CONFIG.CACHE_DIR = before


def compiled_key(key: Key, lapse: Lapse | None = None) -> Any:
    """The key, and its lapse if any, as one compiled function of a request's record and a selector
    (`order.DUE`, `LEAD` or `LATER`). Raises numba.core.errors.NumbaError or TypeError if numba does
    not support them."""
    parts = (key,) if lapse is None else (key, lapse.lead, lapse.later)
    if not all(map(inspect.isfunction, parts)):
        raise TypeError("it is no plain function")
    # Values of outer names are compiled into them, and may differ in the next run.
    values = tuple(
        (name, type(value), value)
        for found in map(inspect.getclosurevars, parts)
        for name, value in {**found.globals, **found.nonlocals}.items()
    )
    try:
        return _compiled_key(parts, values)
    except TypeError:  # an unhashable value, such as an array
        return _compiled_key.__wrapped__(parts, values)


@lru_cache
def _compiled_key(parts: tuple[Key, ...], values: tuple[Any, ...]) -> Any:
    # A division by 0 gives inf or nan, as in NumPy.
    numbers = [njit(error_model="numpy")(part) for part in parts]
    due, lead, later = numbers if len(numbers) > 1 else numbers * 3

    def not_nan(request: Any, which: int) -> float:
        if which == LEAD:
            return float(np.fmin(lead(request), np.inf))
        if which == LATER:
            return float(np.fmin(later(request), np.inf))
        return float(np.fmin(due(request), np.inf))

    return njit(KEY, error_model="numpy")(not_nan)


def _digest() -> str:
    modules = (
        *(block_sizes, cost_model, host_overhead, policy_spec, output_lengths, progress),
        *(request_table, slo_columns, unified_policy),
        *(random_draws, estimate, fleet, take_snapshot, routers, snapshot),
    )
    outside = [module.__file__ or "" for module in modules]
    files = [*map(Path, outside), *sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
