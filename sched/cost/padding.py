"""How an engine's static shapes round batches up."""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Padding:
    """How an engine's static shapes round a batch up.

    A batch of single tokens runs with the next larger of `rows`, any other with the next larger of
    `tokens`, or of `hidden_tokens` if some row has a hidden cache.

    Attributes:
        rows: Bucket sizes of batches with one token a row, ascending.
        tokens: Bucket sizes of all other batches, ascending.
        decode_group: Rows that decode together, sorted by length (the XLA backend). Each row of a
        group costs as much as its longest, and the last group counts as full.
        decode_chunk: Tokens that a group reads at once; its length is rounded up to a multiple.

    Raises:
        ValueError: Buckets are not positive and ascending, or a size is below 1.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    decode_group: int = 1
    decode_chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "tokens"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"padding.{name} must be positive and ascending, got {sizes}")
        for name in ("decode_group", "decode_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"padding.{name} must be at least 1, got {getattr(self, name)}")

    @property
    def hidden_tokens(self) -> tuple[int, ...]:
        """Every second one of `tokens`: steps with hidden rows take long to compile."""
        return self.tokens[::-2][::-1]

    def padded(self, num_tokens: Any, singles: Any, hidden: Any = False) -> Any:
        """Padded size of batches with `num_tokens` tokens; numbers or arrays. Sizes beyond the last
        bucket give the last bucket. singles: whether every row has one token. hidden: whether any
        row has a hidden cache."""
        if isinstance(num_tokens, int):
            mixed = self.hidden_tokens if hidden else self.tokens
            return _next(self.rows if singles else mixed, num_tokens)
        padded = np.where(singles, _nexts(self.rows, num_tokens), _nexts(self.tokens, num_tokens))
        if np.any(hidden):
            return np.where(~singles & hidden, _nexts(self.hidden_tokens, num_tokens), padded)
        return padded

    def rows_of(self, padded_tokens: int) -> int:
        """Rows of a step of that padded size."""
        return _next(self.rows, padded_tokens)

    def read(self, lengths: np.ndarray, padded_tokens: int) -> int:
        """Tokens that decodes with these cache lengths, int64 [n], read in a step of that padded
        size."""
        group = min(self.decode_group, self.rows_of(padded_tokens))
        if group == 1:
            return int(np.add.reduce(lengths))
        chunks = -(-np.sort(lengths)[::-1][::group] // self.decode_chunk)
        return group * self.decode_chunk * int(np.add.reduce(chunks))


def _next(sizes: tuple[int, ...], size: int) -> int:
    return sizes[min(bisect.bisect_left(sizes, size), len(sizes) - 1)]


def _nexts(sizes: tuple[int, ...], wanted: Any) -> Any:
    known = _array(sizes)
    return known[np.minimum(known.searchsorted(wanted), len(sizes) - 1)]


@functools.lru_cache(maxsize=64)
def _array(sizes: tuple[int, ...]) -> np.ndarray:
    return np.asarray(sizes)
