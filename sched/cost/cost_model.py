"""How long a batch takes: linear cost models of its shape, with non-negative coefficients.

The features are those of InferMax section 3.2 (tokens, KV read by decodes, c^2 + 2cm of prefill
chunks, biases, and the terms that grow with the number of requests), extended by those of hidden
caches and pool operations, and by the experts that a mixture of experts reads (`experts_read`).
Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxserve.sched.cost.padding import Padding


class BatchFeatures(NamedTuple):
    """The shape of a batch, which determines its cost. Fields are numbers, or arrays over batches.

    Attributes:
        num_tokens: Tokens computed.
        padded_tokens: num_tokens rounded up to the size of the step that runs.
        decode_kv: Cached tokens that decodes read as K and V, including the tokens they compute.
        num_decodes: Rows that decode.
        prefill_quad: Sum of c^2 + 2cm over chunks of c tokens after m cached ones.
        num_prefills: Rows that compute a chunk of a prompt.
        prefill_m: Sum of m, K and V only.
        hidden_tokens: Cached tokens that the decodes read from hidden caches.
        projected_tokens: Tokens of hidden caches that become K and V before the step.
        copied_slots: Slots, each in one plane, copied to other blocks.
        saved_slots: Slots copied to host memory.
        loaded_slots: Slots copied from host memory.
        hidden_prefill: Sum of m over chunks that read hidden caches.
        sampled_rows: All rows of the step, padding included, if any request samples non-greedily;
            otherwise 0.
        adapted_tokens: padded_tokens if any row has an adapter (LoRA); otherwise 0.
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
    saved_slots: Any = 0
    loaded_slots: Any = 0
    hidden_prefill: Any = 0
    sampled_rows: Any = 0
    adapted_tokens: Any = 0

    @classmethod
    def from_rows(
        cls,
        counts: np.ndarray,
        contexts: np.ndarray,
        decoding: np.ndarray,
        *,
        padding: Padding | None = None,
        hidden: np.ndarray | None = None,
        sampling: bool = False,
        adapted: bool = False,
        **moved: int,
    ) -> BatchFeatures:
        """The features of one batch, from its rows.

        Args:
            counts: int64 [n], tokens computed now.
            contexts: int64 [n], tokens cached before.
            decoding: bool [n], which rows decode, drafts included; the others are prefill chunks.
            padding: How the batch is rounded up; None for no padding.
            hidden: bool [n], which rows have hidden caches; None if none has.
            sampling: Whether any request samples non-greedily.
            adapted: Whether any row has an adapter.
            **moved: projected_tokens, copied_slots, saved_slots, loaded_slots: see `BatchFeatures`.
        """
        rows = len(counts)
        decodes = int(np.count_nonzero(decoding))
        cached = int(np.add.reduce(contexts))
        if decodes == rows:
            # With drafts, a decode reads its cache once for all of its tokens.
            tokens, kv, quad, before = int(np.add.reduce(counts)), cached + rows, 0, 0
        else:
            tokens = int(np.add.reduce(counts))
            read = int(contexts @ decoding)
            kv, before = read + decodes, cached - read
            prompts = np.where(decoding, 0, counts)
            quad = int(prompts @ (prompts + 2 * contexts))
        some_hidden = hidden is not None and bool(np.count_nonzero(hidden))
        padded = tokens if padding is None else padding.padded(tokens, tokens == rows, some_hidden)
        hidden_read = hidden_before = 0
        read_as = _plain if padding is None else padding.read
        if hidden is not None and some_hidden:
            lengths = contexts + 1
            kv = read_as(lengths[decoding & ~hidden], padded)
            hidden_read = read_as(lengths[decoding & hidden], padded)
            hidden_before = int(contexts @ (hidden & ~decoding))
        elif decodes and padding is not None and padding.decode_group > 1:
            kv = padding.read((contexts + 1)[decoding], padded)
        sampled = 0
        if sampling:
            sampled = rows if padding is None else padding.rows_of(padded)
        return cls(
            num_tokens=tokens,
            padded_tokens=padded,
            decode_kv=kv,
            num_decodes=decodes,
            prefill_quad=quad,
            num_prefills=rows - decodes,
            prefill_m=before - hidden_before,
            hidden_tokens=hidden_read,
            hidden_prefill=hidden_before,
            sampled_rows=sampled,
            adapted_tokens=padded if adapted else 0,
            **moved,
        )

    @classmethod
    def of_decodes(
        cls, num_decodes: np.ndarray, decode_kv: np.ndarray, padding: Padding | None = None
    ) -> BatchFeatures:
        """Batches of decodes only. num_decodes, decode_kv: arrays over the batches, the latter of
        cached tokens read, including the tokens being computed."""
        padded = num_decodes if padding is None else padding.padded(num_decodes, True)
        return cls(num_decodes, padded, decode_kv, num_decodes, 0, 0, 0)

    def padded(self, padding: Padding) -> BatchFeatures:
        """The same batches, rounded up."""
        singles = self.num_tokens == self.num_decodes + self.num_prefills
        hidden = (self.hidden_tokens > 0) | (self.hidden_prefill > 0)
        return self._replace(padded_tokens=padding.padded(self.num_tokens, singles, hidden))


def _plain(lengths: np.ndarray, padded_tokens: int) -> int:
    return int(np.add.reduce(lengths))


class CostModel(Protocol):
    """Predicts the time of a step."""

    def batch_time(self, features: BatchFeatures) -> Any:
        """Seconds that the batch keeps the device busy. Arrays in the features give an array."""
        ...


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What each feature of `BatchFeatures` costs, in seconds a layer (InferMax section 3.2).

    Attributes:
        per_token: Each of padded_tokens.
        token_bias: Every batch.
        decode_kv: Each of decode_kv.
        decode_bias: A batch with decodes.
        per_decode: Each decode.
        prefill_quad: Each unit of prefill_quad.
        prefill_bias: A batch with prefills.
        per_prefill: Each prefill chunk.
        prefill_m: Each of prefill_m.
        hidden_token: Each of hidden_tokens.
        projected_token: Each of projected_tokens.
        copied_slot: Each of copied_slots.
        swapped_slot: Each of saved_slots and loaded_slots.
        hidden_prefill: Each of hidden_prefill.
        sampled_row: Each of sampled_rows.
        batch_bias: A batch of more than one padded token, which multiplies matrices instead of a
            matrix and a vector.
        adapted_token: Each of adapted_tokens.
        per_expert: Each expert that a batch reads (`experts_read`), for mixtures of experts.

    Raises:
        ValueError: A coefficient is negative or not finite.
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
    hidden_prefill: float = 0.0
    sampled_row: float = 0.0
    batch_bias: float = 0.0
    adapted_token: float = 0.0
    per_expert: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"coefficient {field.name} must be 0 or more, got {value}")

    def as_dict(self) -> dict[str, float]:
        """The coefficients by name, as in a profile's file."""
        return asdict(self)


_NO_MATTER = 2.0**-60  # a share of the experts that counts as none


@functools.lru_cache(maxsize=64)
def _unread(num_experts: int, experts_per_token: int) -> np.ndarray:
    """The share of the experts that 0, 1, 2... tokens do not read; 0 for more tokens than that.
    Uses repeated products, because powers of arrays and of numbers differ in their last bit."""
    share, found = 1.0 - experts_per_token / num_experts, [1.0]
    while found[-1] > _NO_MATTER:
        found.append(found[-1] * share)
    return np.array([*found, 0.0])


def experts_read(num_experts: int, experts_per_token: int, tokens: Any) -> Any:
    """Expected number of experts of a layer that a batch reads, E (1 - (1 - k / E)^T): each of T
    tokens goes to k of E experts, all equally likely.

    Args:
        num_experts: E.
        experts_per_token: k.
        tokens: T, a number or an array.

    Returns:
        Numbers of experts, floats.
    """
    unread = _unread(num_experts, experts_per_token)
    if isinstance(tokens, int):
        return num_experts * (1.0 - float(unread[min(tokens, len(unread) - 1)]))
    at = np.minimum(tokens, len(unread) - 1).astype(np.int64)
    return num_experts * (1.0 - unread[at])


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """batch time = num_layers x (token part + decode part + prefill part + copies).

    Attributes:
        coefficients: Seconds a layer.
        num_layers: Layers of the model.
        overlapped: Whether copies to and from the host overlap with the batch and with each other,
            so that a step takes as long as the longest of the three (BROS section 4.1, T = max(f(L,
            S), g(K))).
        num_experts: Experts per layer; 0 for a dense feed-forward.
        experts_per_token: Experts that each token goes to.

    Raises:
        ValueError: There are no layers, or the number of experts per token is 0 or more than there
            are experts.
    """

    coefficients: Coefficients
    num_layers: int
    overlapped: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {self.num_layers}")
        least = min(1, self.num_experts)
        if not least <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token must be {least} to num_experts, {self.num_experts}, got "
                f"{self.experts_per_token}"
            )

    @property
    def experts(self) -> tuple[int, int]:
        """Experts of a layer, and how many of them each token goes to."""
        return self.num_experts, self.experts_per_token

    def batch_time(self, features: BatchFeatures) -> Any:
        """InferMax section 3.2, with padding, hidden caches, swaps and experts; see `CostModel`."""
        k, f = self.coefficients, features
        layer = k.token_bias + k.per_token * f.padded_tokens
        if k.batch_bias:
            layer = layer + (f.padded_tokens > 1) * k.batch_bias
        if self.num_experts:
            read = experts_read(self.num_experts, self.experts_per_token, f.num_tokens)
            layer = layer + k.per_expert * read
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
        other = (
            k.hidden_token * f.hidden_tokens
            + k.hidden_prefill * f.hidden_prefill
            + k.sampled_row * f.sampled_rows
            + k.adapted_token * f.adapted_tokens
            + k.projected_token * f.projected_tokens
            + k.copied_slot * f.copied_slots
        )
        if self.overlapped:
            longer = np.maximum(f.saved_slots, f.loaded_slots)
            return self.num_layers * np.maximum(layer + other, k.swapped_slot * longer)
        other = other + k.swapped_slot * (f.saved_slots + f.loaded_slots)
        return self.num_layers * (layer + other)


@dataclass(frozen=True, slots=True)
class InferMaxCostModel:
    """The batch time as InferMax's published simulator computes it from the same constants. It
    rounds down the mean KV of a batch's decodes.

    Attributes:
        linear: The constants.
        residual: The residual connection (a, b, c): a + b n + c n^2 seconds a layer for n tokens
            rounded up to a multiple of 8.
        attention_factor: Multiplies the attention terms, except those per request, if the batch has
            more than one request of that kind.
    """

    linear: LinearCostModel
    residual: tuple[float, float, float]
    attention_factor: float = 1.0

    def batch_time(self, features: BatchFeatures) -> Any:
        """Hidden caches and padding cost nothing here; moves cost what they cost in
        `LinearCostModel`. See `CostModel`."""
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
        batch = tokens + decode + prefill + k.copied_slot * f.copied_slots
        if self.linear.overlapped:
            longer = np.maximum(f.saved_slots, f.loaded_slots)
            return self.linear.num_layers * np.maximum(batch, k.swapped_slot * longer)
        swapped = k.swapped_slot * (f.saved_slots + f.loaded_slots)
        return self.linear.num_layers * (batch + swapped)
