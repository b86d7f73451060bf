"""Blocks of tokens shared by a workload's requests, and how much a cache could find."""

from __future__ import annotations

import numpy as np

from jaxserve.simulator.workloads.prefixes import parents
from jaxserve.simulator.workloads.workload import Workload, WorkloadError


class BlockKeys:
    """Ids of the full blocks of each request's stream, its prompt and output. Two blocks have the
    same id exactly if their tokens and all tokens before them are the same.

    Memory is linear in the requests, not in the blocks: ids are made on demand.

    Args:
        workload: The n requests.
        block_size: Tokens of a block.

    Attributes:
        block_size: Tokens of a block.
        count: Number of different ids, from 0.
        parent: int64 [n], earlier request whose prefix each shares; NO_PREFIX for none.
        common: int64 [n], number of its first blocks that are its parent's.
        base: int64 [n]; its block i after those has the id base + i.

    Raises:
        WorkloadError: block_size is below 1.
    """

    def __init__(self, workload: Workload, block_size: int) -> None:
        if block_size < 1:
            raise WorkloadError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._tokens = workload.lengths.total
        # A block across the end of the shared prefix is not shared.
        self.common = workload.prefix_len // block_size
        self.parent = parents(workload.prefix_of, self.common)
        own = self._tokens // block_size - self.common
        self.count = int(own.sum())
        self.base = np.cumsum(own) - own - self.common

    def __len__(self) -> int:
        return len(self._tokens)

    def of(self, number: int, tokens: int) -> np.ndarray:
        """Ids of the first tokens // block_size blocks of request `number`, int64. Raises
        WorkloadError if its stream is shorter than `tokens`."""
        if not 0 <= tokens <= self._tokens[number]:
            total = self._tokens[number]
            raise WorkloadError(f"request {number + 1} has {total} tokens, not {tokens}")
        end = tokens // self.block_size
        ids = np.arange(end)
        while end:
            # Its own blocks, then those of its parent before them, and so on.
            start = self.common[number]
            if start < end:
                ids[start:end] += self.base[number]
                end = start
            number = self.parent[number]
        return ids


def block_keys(workload: Workload, block_size: int) -> BlockKeys:
    """The ids of a workload's blocks. Raises WorkloadError if block_size, in tokens, is below 1."""
    return BlockKeys(workload, block_size)


def reusable_tokens(workload: Workload, block_size: int) -> np.ndarray:
    """Tokens of each prompt in full blocks that an earlier request has, too, int64 [n]: what an
    unlimited cache would find if every earlier request had written its output by then. Raises
    WorkloadError if block_size, in tokens, is below 1."""
    if block_size < 1:
        raise WorkloadError(f"block_size must be at least 1, got {block_size}")
    return np.asarray(workload.prefix_len // block_size * block_size)
