"""The event loop as a compiled function, kept on disk."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba import njit, types

from jaxserve.sched import blocks, cost_model, table, unified
from jaxserve.sched.keys import Key
from jaxserve.sched.simulation.compiled.jit import OPTIONS
from jaxserve.sched.simulation.compiled.loop import serve
from jaxserve.sched.simulation.compiled.state import REQUEST

_CONFIG: Any = numba.config
KEY = types.float64(numba.from_dtype(REQUEST))
_DIRECTORY = "~/.cache/jaxserve/numba"  # where NUMBA_CACHE_DIR does not say otherwise


@lru_cache
def compiled_serve(world: types.Type, rules: types.Type, costs: types.Type) -> Any:
    """`loop.serve` for arguments of these types, which takes a while to compile, but only once.

    What numba keeps is good for as long as the file of the function itself is the same. This one's
    code is in several, so there is a directory for each state of them.
    """
    signature = types.int64(world, rules, costs, types.FunctionType(KEY), types.int64)
    before = _CONFIG.CACHE_DIR
    root = Path(before or _DIRECTORY).expanduser()
    _CONFIG.CACHE_DIR = str(root / _digest())
    try:
        return njit(signature, cache=True, **OPTIONS)(serve)
    except RuntimeError:  # nothing can be written anywhere
        return njit(signature, **OPTIONS)(serve)
    finally:
        _CONFIG.CACHE_DIR = before


@lru_cache
def compiled_key(key: Key) -> Any:
    """The key as a function of one request's record. numba.core.errors.NumbaError if it uses what
    numba does not know."""
    return njit(KEY)(key)


def _digest() -> str:
    outside = [module.__file__ or "" for module in (blocks, cost_model, table, unified)]
    files = [*map(Path, outside), *sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
