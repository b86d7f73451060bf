"""The contract of a scheduling policy, and the registry of them.

A policy is a class in a file of its own in `sched/policies/`, decorated with `register`; nothing
else has to change for the engine, the launcher and the tests to know it.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.table import RequestTable


@dataclass(frozen=True)
class Limits:
    """Names and letters as in InferMax section 3.1. max_batch_tokens: C, tokens of one batch.
    max_prefill_tokens: P <= C; a prefill joins a batch only as far as the batch, decodes included,
    stays within it. max_rows: requests of one batch, and requests holding cache."""

    max_batch_tokens: int
    max_prefill_tokens: int
    max_rows: int

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_prefill_tokens", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_prefill_tokens > self.max_batch_tokens:
            raise ValueError(
                f"max_prefill_tokens ({self.max_prefill_tokens}) must not exceed "
                f"max_batch_tokens ({self.max_batch_tokens})"
            )


@dataclass(frozen=True)
class View:
    """All that a policy sees. It changes none of it."""

    table: RequestTable
    pool: BlockPool
    limits: Limits


class Policy(Protocol):
    """One scheduling system. It keeps no clock and touches no device."""

    @property
    def chunked(self) -> bool:
        """Whether a prompt may be computed in parts; if not, max_batch_tokens must hold a whole
        one."""
        ...

    def plan(self, view: View, now: float) -> BatchPlan:
        """The next iteration. now: seconds, on the clock of `RequestTable.arrival`."""
        ...


@dataclass(frozen=True)
class PolicyEntry:
    name: str
    make: Callable[[], Policy]
    summary: str
    source: str


_Make = TypeVar("_Make", bound=Callable[[], Policy])
_REGISTRY: dict[str, PolicyEntry] = {}


def register(name: str, summary: str, source: str) -> Callable[[_Make], _Make]:
    """Decorator: makes a policy class, or a function returning a policy, known by `name`."""

    def add(make: _Make) -> _Make:
        if name in _REGISTRY:
            raise ValueError(f"two policies are named {name!r}")
        _REGISTRY[name] = PolicyEntry(name, make, summary, source)
        return make

    return add


def policies() -> dict[str, PolicyEntry]:
    """Every registered policy by name; imports the files in `sched/policies/`."""
    package = importlib.import_module("jaxserve.sched.policies")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def make_policy(name: str) -> Policy:
    """A new policy. ValueError names the known ones."""
    known = policies()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no policy {name!r}{hint} Known: {', '.join(known)}")
    return known[name].make()
