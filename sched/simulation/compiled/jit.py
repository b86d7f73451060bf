"""How the functions of the compiled simulation are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import overload

from jaxserve.sched.unified import policy_spec

# Nothing is allocated, so no references are counted: with a dozen arrays handed on at each call
# that was fifteen times the work.
OPTIONS: dict[str, Any] = {"_nrt": False}


def kernel(function: Callable[..., Any]) -> Any:
    """The function compiled with what calls it. It may neither allocate nor return arrays to
    Python."""
    return njit(forceinline=True, **OPTIONS)(function)


@overload(policy_spec.where)
def _where(condition: Any, then: Any, otherwise: Any) -> Any:
    """Of numbers; NumPy's own would make an array."""

    def chosen(condition: Any, then: Any, otherwise: Any) -> Any:
        return then if condition else otherwise

    return chosen
