"""The pieces that `program.py` is made of: who is in which state in which batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUNS = ("prefill", "decode", "chunk")
WHOLE = ("prefill", "decode", "hold")  # after these, all tokens but the newest are in the cache
PARTIAL = ("chunk", "rest")


@dataclass
class Cell:
    """Request i in batch j. states: literal by (kind, k). part: tokens in the cache in `chunk` and
    `rest`, else 0. reused: what of the one before it builds on; rested: the same in `rest`."""

    states: dict[tuple[str, int], Any]
    part: Any = 0
    reused: Any = 0
    part_squared: Any = 0
    reused_squared: Any = 0
    rested: Any = 0
    part_blocks: Any = 0

    def of_kinds(self, *kinds: str) -> list[tuple[int, Any]]:
        """(k, literal) of those states."""
        return [(k, lit) for (kind, k), lit in self.states.items() if kind in kinds]


@dataclass
class Sums:
    """The features of a batch (`cost_model.BatchFeatures`) as linear expressions."""

    tokens: Any = 0
    decodes: Any = 0
    kv: Any = 0
    prefills: Any = 0
    quad: Any = 0
    before: Any = 0

    def add(self, cell: Cell, cached: list[int]) -> None:
        """Adds what one request has in the batch. cached[k]: tokens in its cache once token k is
        written."""
        decodes, prefills = cell.of_kinds("decode"), cell.of_kinds("prefill")
        self.decodes += sum(lit for _, lit in decodes)
        self.kv += sum(cached[k] * lit for k, lit in decodes)
        self.prefills += sum(lit for _, lit in cell.of_kinds("prefill", "chunk"))
        self.tokens += cell.part - cell.reused + sum(lit for _, lit in decodes)
        self.tokens += sum(cached[k] * lit for k, lit in prefills)
        self.quad += cell.part_squared - cell.reused_squared
        self.quad += sum(cached[k] ** 2 * lit for k, lit in prefills)
        self.before += cell.reused - cell.rested
