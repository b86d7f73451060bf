"""How long a batch takes, from its shape alone: linear cost models with non-negative coefficients.

The features are those of InferMax section 3.2 (tokens, KV read by decodes, c^2 + 2cm of prefill
chunks, biases, and the terms that grow with the number of requests), with the hidden cache's and
the pool operations' beside them. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Padding:
    """The static shapes that an engine rounds its batches up to: a batch of single tokens to the
    next of `rows`, any other to the next of `tokens`, both ascending."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    def of(self, num_tokens: Any, singles: Any) -> Any:
        """Padded size of batches with `num_tokens` tokens; singles: whether each row has one.
        Numbers or arrays. What is over the last bucket counts as the last."""
        rows, tokens = np.asarray(self.rows), np.asarray(self.tokens)
        as_rows = rows[np.minimum(np.searchsorted(rows, num_tokens), len(rows) - 1)]
        as_tokens = tokens[np.minimum(np.searchsorted(tokens, num_tokens), len(tokens) - 1)]
        return np.where(singles, as_rows, as_tokens)


@dataclass(frozen=True, slots=True)
class BatchFeatures:
    """What a batch costs depends on these. Each is a number, or an array over several batches.

    padded_tokens: what runs, num_tokens rounded up. decode_kv: cached tokens that the decodes read,
    the one being fed included. prefill_quad: sum of c^2 + 2cm over the chunks of c tokens after m
    cached ones; prefill_m: sum of m. hidden_tokens: cached tokens read from hidden caches, which
    count neither in decode_kv nor in prefill_m. projected_tokens: those of hidden caches that
    become KV before the step. copied_slots, swapped_slots: slots, of
    one plane each, copied to other blocks, and to or from host memory.
    """

    num_tokens: Any
    padded_tokens: Any
    decode_kv: Any
    num_decodes: Any
    prefill_quad: Any
    num_prefills: Any
    prefill_m: Any
    hidden_tokens: Any = 0
    projected_tokens: Any = 0
    copied_slots: Any = 0
    swapped_slots: Any = 0

    @classmethod
    def of(
        cls,
        counts: np.ndarray,
        contexts: np.ndarray,
        decoding: np.ndarray,
        *,
        padding: Padding | None = None,
        hidden: np.ndarray | None = None,
        projected_tokens: int = 0,
        copied_slots: int = 0,
        swapped_slots: int = 0,
    ) -> BatchFeatures:
        """One batch. counts [n]: tokens computed; contexts [n]: tokens cached before; decoding
        [n]: which rows are decodes, the others are prefill chunks; hidden [n]: which rows have
        hidden caches, none if not given."""
        rows = len(counts)
        decodes = int(np.count_nonzero(decoding))
        cached = int(np.add.reduce(contexts))
        if decodes == rows:
            tokens, kv, quad, before = rows, cached + rows, 0, 0
        else:
            tokens = int(np.add.reduce(counts))
            read = int(contexts @ decoding)
            kv, before = read + decodes, cached - read
            # Over all rows, less the decodes, whose c is 1.
            quad = int(counts @ (counts + 2 * contexts)) - decodes - 2 * read
        padded = tokens if padding is None else int(padding.of(tokens, tokens == rows))
        hidden_tokens = 0
        if hidden is not None and np.count_nonzero(hidden):
            decodes_hidden = hidden & decoding
            of_decodes = int(contexts @ decodes_hidden) + int(np.count_nonzero(decodes_hidden))
            of_chunks = int(contexts @ (hidden & ~decoding))
            kv, before = kv - of_decodes, before - of_chunks
            hidden_tokens = of_decodes + of_chunks
        return cls(
            num_tokens=tokens,
            padded_tokens=padded,
            decode_kv=kv,
            num_decodes=decodes,
            prefill_quad=quad,
            num_prefills=rows - decodes,
            prefill_m=before,
            hidden_tokens=hidden_tokens,
            projected_tokens=projected_tokens,
            copied_slots=copied_slots,
            swapped_slots=swapped_slots,
        )

    @classmethod
    def of_decodes(
        cls, num_decodes: np.ndarray, decode_kv: np.ndarray, padding: Padding | None = None
    ) -> BatchFeatures:
        """Several batches of nothing but decodes. num_decodes, decode_kv: arrays over the batches,
        the latter of cached tokens read, those being fed included."""
        padded = num_decodes if padding is None else padding.of(num_decodes, True)
        return cls(num_decodes, padded, decode_kv, num_decodes, 0, 0, 0)


class CostModel(Protocol):
    """Predicts the time of a step."""

    def batch_time(self, features: BatchFeatures) -> Any:
        """Seconds by which the batch delays what runs after it, the gap between steps included.
        Arrays in the features give an array."""
        ...


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds a layer, none negative; each is the price of one feature of `BatchFeatures` (InferMax
    section 3.2).

    per_token: of padded_tokens; per_decode, per_prefill: of their numbers; the others: of the
    feature of their name. token_bias: of every batch; decode_bias, prefill_bias: of one that has
    decodes, or prefills. Raises ValueError for a negative or infinite one.
    """

    per_token: float
    token_bias: float
    decode_kv: float
    decode_bias: float
    per_decode: float
    prefill_quad: float
    prefill_bias: float
    per_prefill: float
    prefill_m: float
    hidden_token: float = 0.0
    projected_token: float = 0.0
    copied_slot: float = 0.0
    swapped_slot: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"coefficient {field.name} must be 0 or more, got {value}")

    def as_dict(self) -> dict[str, float]:
        """By name, as a profile's file has them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """batch time = num_layers x (token part + decode part + prefill part) + gap.

    gap: seconds between two steps in which the device waits for the host; the part of the host's
    work that the overlap does not hide. Raises ValueError for no layers or a negative gap.
    """

    coefficients: Coefficients
    num_layers: int
    gap: float = 0.0

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {self.num_layers}")
        if not (np.isfinite(self.gap) and self.gap >= 0):
            raise ValueError(f"gap must be 0 or more seconds, got {self.gap}")

    def batch_time(self, features: BatchFeatures) -> Any:
        """InferMax section 3.2, with padding, hidden caches and swaps; see `CostModel`."""
        k, f = self.coefficients, features
        layer = k.token_bias + k.per_token * f.padded_tokens
        layer = layer + (
            (f.num_decodes > 0) * k.decode_bias
            + k.decode_kv * f.decode_kv
            + k.per_decode * f.num_decodes
        )
        layer = layer + (
            (f.num_prefills > 0) * k.prefill_bias
            + k.prefill_quad * f.prefill_quad
            + k.per_prefill * f.num_prefills
            + k.prefill_m * f.prefill_m
        )
        layer = layer + (
            k.hidden_token * f.hidden_tokens
            + k.projected_token * f.projected_tokens
            + k.copied_slot * f.copied_slots
            + k.swapped_slot * f.swapped_slots
        )
        return self.num_layers * layer + self.gap


@dataclass(frozen=True, slots=True)
class InferMaxCostModel:
    """The batch time as InferMax's published simulator computes it from the same constants.

    It adds the residual connection, `residual = (a, b, c)`: a + b n + c n^2 seconds a layer for n
    tokens rounded up to a multiple of 8; takes the mean KV of a batch's decodes rounded down; and
    multiplies the attention terms, but not those per request, by `attention_factor` when the batch
    has more than one request of the kind.
    """

    linear: LinearCostModel
    residual: tuple[float, float, float]
    attention_factor: float = 1.0

    def batch_time(self, features: BatchFeatures) -> Any:
        """Hidden caches, swaps and padding cost nothing here; see `CostModel`."""
        k, f = self.linear.coefficients, features
        decodes, prefills = f.num_decodes, f.num_prefills
        kv = f.decode_kv // (decodes + (decodes == 0)) * decodes
        extra = self.attention_factor - 1.0
        decode = (1.0 + extra * (decodes > 1)) * (
            (decodes > 0) * k.decode_bias + k.decode_kv * kv
        ) + k.per_decode * decodes
        prefill = (1.0 + extra * (prefills > 1)) * (
            (prefills > 0) * k.prefill_bias
            + k.prefill_quad * f.prefill_quad
            + k.prefill_m * f.prefill_m
        ) + k.per_prefill * prefills
        a, b, c = self.residual
        eights = (f.num_tokens + 7) // 8 * 8
        tokens = k.token_bias + k.per_token * f.num_tokens + (a + b * eights + c * eights**2)
        return self.linear.num_layers * (tokens + decode + prefill) + self.linear.gap
