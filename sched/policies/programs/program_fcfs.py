"""Program-level first come, first served: the calls of the program that began first come first.

The baseline of Autellix (arXiv 2502.13965), and the order within Continuum (arXiv 2511.02230). A
call of no program counts by its own arrival. Batches are Sarathi's; the last program in the order
loses its memory first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxserve.sched.policies.sarathi import DECODE_FIRST
from jaxserve.sched.registry import register
from jaxserve.sched.unified.policy_spec import CompiledSpec, Key
from jaxserve.sched.unified.unified_policy import Group, UnifiedPolicy


def program_start(r: Any) -> Any:
    """When the first call of the request's program came."""
    return r.program_start


@register(
    "program_fcfs",
    summary="sarathi in the order in which programs began, whichever call it is",
    source="Autellix; Continuum",
    for_programs=True,
)
@dataclass(frozen=True)
class ProgramFcfs(UnifiedPolicy):
    """Chunked prefill in mixed batches, decodes first, each by the start of its program."""

    groups: tuple[Group, ...] = field(default=DECODE_FIRST)
    mixed_batches: bool = True
    chunked: bool = True
    key: Key | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "key", program_start)

    def compiled_spec(self) -> CompiledSpec | None:
        """Without programs it is the order of arrival."""
        return CompiledSpec(None)
