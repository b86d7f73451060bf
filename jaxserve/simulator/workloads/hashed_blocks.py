"""Finds shared prefixes of prompts by ids of their blocks, as in Mooncake's traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.simulator.workloads.prefixes import NO_PREFIX
from jaxserve.simulator.workloads.workload import WorkloadError

BLOCK = 512  # tokens per id; the last block of a prompt may have fewer
_MOST_ID = 2**63 - 1  # a hash fits into 64 bits


def hash_ids_of(where: str, value: Any, prompt_len: int) -> Sequence[int]:
    """Checks the ids of a prompt of this many tokens. The WorkloadError begins with `where`."""
    if not isinstance(value, list):
        raise WorkloadError(f"{where}: hash_ids must be a list, got {value!r:.40}")
    blocks = -(-prompt_len // BLOCK)
    if len(value) != blocks:
        raise WorkloadError(
            f"{where}: hash_ids must be {blocks}, one for each {BLOCK} tokens of input_length, got "
            f"{len(value)}"
        )
    for one in value:
        if type(one) is not int or not 0 <= one <= _MOST_ID:
            raise WorkloadError(
                f"{where}: hash_ids must be whole numbers from 0 to {_MOST_ID}, got {one!r:.40}"
            )
    return value


class HashedPrompts:
    """The prompts so far, as a tree of their blocks: equal ids after equal ids are equal tokens."""

    def __init__(self) -> None:
        self._count = 0
        self._nodes: dict[tuple[int, int], int] = {}  # (node of the block before, id) -> node
        # For each node: the last prompt among those with the most tokens there, and its tokens up
        # to the node. The first node is before all blocks.
        self._last, self._tokens = [NO_PREFIX], [0]

    def add(self, ids: Sequence[int], prompt_len: int) -> tuple[int, int]:
        """Adds the next prompt, in time linear in its ids. Without ids it shares nothing.

        Returns:
            Its `prefix_of` and `prefix_len`.
        """
        number, self._count = self._count, self._count + 1
        path, node = [0], 0
        for one in ids:
            found = self._nodes.get((node, one))
            if found is None:
                break
            node = found
            path.append(node)
        source, shared = self._last[node], min(self._tokens[node], prompt_len)
        for one in ids[len(path) - 1 :]:
            new = len(self._last)
            self._nodes[node, one] = new
            node = new
            self._last.append(NO_PREFIX)
            self._tokens.append(0)
            path.append(node)
        for blocks, node in enumerate(path[1:], 1):
            tokens = min(blocks * BLOCK, prompt_len)
            if tokens >= self._tokens[node]:
                self._last[node], self._tokens[node] = number, tokens
        return source, shared
