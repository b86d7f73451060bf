"""How the functions of the compiled simulation are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import overload

from jaxserve.sched.cost import cost_model
from jaxserve.sched.unified import policy_spec

# Nothing is allocated, so references need not be counted: with a dozen arrays passed at each call
# this was fifteen times the work.
OPTIONS: dict[str, Any] = {"_nrt": False}


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles the function and the functions it calls. It may neither allocate nor return arrays
    to Python."""
    return njit(forceinline=True, **OPTIONS)(function)


@overload(policy_spec.where)
def _where(condition: Any, then: Any, otherwise: Any) -> Any:
    """`where` for numbers; NumPy's own would make an array."""

    def chosen(condition: Any, then: Any, otherwise: Any) -> Any:
        return then if condition else otherwise

    return chosen


@overload(cost_model.experts_read)
def _experts_read(num_experts: Any, experts_per_token: Any, tokens: Any) -> Any:
    """`experts_read` for a number of tokens, by the same products as the table used elsewhere."""
    no_matter = cost_model._NO_MATTER

    def read(num_experts: Any, experts_per_token: Any, tokens: Any) -> Any:
        unread, share = 1.0, 1.0 - experts_per_token / num_experts
        for _ in range(tokens):
            if unread <= no_matter:
                unread = 0.0
                break
            unread *= share
        return num_experts * (1.0 - unread)

    return read
