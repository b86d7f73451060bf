"""The elements of `program.py`: the state of each request in each batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RUNS = ("prefill", "decode", "chunk")
WHOLE = ("prefill", "decode", "hold")  # after these, all tokens but the newest are in the cache
PARTIAL = ("chunk", "rest")


@dataclass
class Cell:
    """Variables of request i in batch j; see `program.py` for the states.

    Attributes:
        states: Literals by (kind, k), exactly one of which is true.
        part: Tokens in the cache after a `chunk` or `rest`, else 0.
        reused: Tokens in the cache that a prefill, chunk or rest builds on, else 0.
        part_squared, reused_squared: Their squares.
        rested: `reused` in a `rest`, else 0.
        part_blocks: Blocks that `part` takes.
    """

    states: dict[tuple[str, int], Any]
    part: Any = 0
    reused: Any = 0
    part_squared: Any = 0
    reused_squared: Any = 0
    rested: Any = 0
    part_blocks: Any = 0

    def of_kinds(self, *kinds: str) -> list[tuple[int, Any]]:
        """(k, literal) for the states of these kinds."""
        return [(k, lit) for (kind, k), lit in self.states.items() if kind in kinds]


@dataclass
class Sums:
    """The features of a batch (`cost_model.BatchFeatures`) as linear expressions.

    Attributes:
        tokens: num_tokens.
        decodes: num_decodes.
        kv: decode_kv.
        prefills: num_prefills.
        quad: prefill_quad.
        before: prefill_m.
    """

    tokens: Any = 0
    decodes: Any = 0
    kv: Any = 0
    prefills: Any = 0
    quad: Any = 0
    before: Any = 0

    def add(self, cell: Cell, cached: list[int]) -> None:
        """Adds a request's share of the batch. cached[k] is the number of its cached tokens once
        token k is written."""
        decodes, prefills = cell.of_kinds("decode"), cell.of_kinds("prefill")
        self.decodes += sum(lit for _, lit in decodes)
        self.kv += sum(cached[k] * lit for k, lit in decodes)
        self.prefills += sum(lit for _, lit in cell.of_kinds("prefill", "chunk"))
        self.tokens += cell.part - cell.reused + sum(lit for _, lit in decodes)
        self.tokens += sum(cached[k] * lit for k, lit in prefills)
        self.quad += cell.part_squared - cell.reused_squared
        self.quad += sum(cached[k] ** 2 * lit for k, lit in prefills)
        self.before += cell.reused - cell.rested
