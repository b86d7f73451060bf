"""What other threads tell the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.engine.grammars import CompiledGrammar
from jaxserve.engine.output import Output
from jaxserve.sched.reachability import SloProblem
from jaxserve.sched.request import Request


@dataclass(frozen=True)
class Submit:
    """A request to serve. problems: with its targets. grammar: its own, compiled."""

    request: Request
    on_output: Callable[[Output], None]
    problems: tuple[SloProblem, ...] = ()
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True)
class Cancel:
    """A request to end."""

    request_id: str
