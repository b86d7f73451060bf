"""Sarathi-Serve: stall-free batches of decodes and prompt chunks (InferMax section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.sched.policy import View, register
from jaxserve.sched.table import State
from jaxserve.sched.unified import Group, UnifiedPolicy


def _decode_first(view: View) -> Iterator[Group]:
    running = view.table.in_state(State.RUNNING)
    decoding = view.table.decoding(running)
    yield Group(running[decoding], evicts=True)
    yield Group(running[~decoding], evicts=False)
    yield Group(view.table.in_state(State.WAITING), evicts=False)


@register(
    "sarathi",
    summary="decode first, chunked prefill, mixed batches within a token budget",
    source="InferMax 3.1, Table 1",
)
def sarathi() -> UnifiedPolicy:
    return UnifiedPolicy(_decode_first, hybrid=True, chunked=True)
