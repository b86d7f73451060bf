"""Gated delta nets: layers that keep a state of fixed size in place of K and V (Yang et al. 2024,
"Gated Delta Networks", section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The shape of a gated delta net. Hashable.

    Attributes:
        key_heads: Heads of Q and K.
        value_heads: Heads of V, equally many for each key head.
        key_dim: Elements of a head of Q or K.
        value_dim: Elements of a head of V.
        taps: Tokens that the short convolution over Q, K and V sees, the own one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def per_key(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Elements of Q, K and V of a key head and its value heads: what is convolved."""
        return 2 * self.key_dim + self.per_key * self.value_dim

    @property
    def matrix(self) -> int:
        """Numbers of a key head's recurrent state, [per_key, key_dim, value_dim]."""
        return self.per_key * self.key_dim * self.value_dim

    @property
    def kept(self) -> int:
        """Numbers, float32, of a key head's state: the recurrent state, and the last inputs of the
        convolution, [taps - 1, channels]."""
        return self.matrix + (self.taps - 1) * self.channels

    def blocks(self, pool_heads: int, block_size: int, head_dim: int, dtype: DTypeLike) -> int:
        """Blocks of one layer that a state takes.

        Args:
            pool_heads: KV heads of the pool, each of which holds as many key heads.
            block_size, head_dim, dtype: Of the pool.
        """
        block = block_size * head_dim * jnp.dtype(dtype).itemsize
        return -(-4 * self.kept * (self.key_heads // pool_heads) // block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaInput:
    """What a layer hands to the recurrence, for T flat tokens.

    Attributes:
        mixed: [T, key_heads, channels], Q, K and V of each key head before the convolution.
        gates: [T, key_heads, 2 * per_key], for each value head how much is written, then how much
            is forgotten, before their nonlinearities.
        conv: float32 [key_heads, channels, taps], the convolution's weights, the own token's last.
        rate, shift: float32 [key_heads, per_key]: a state decays by exp(-exp(rate) * softplus(gate
            + shift)).
        net: The shape.
        group: The layer's group, see `models.layer_groups`.
    """

    mixed: jax.Array
    gates: jax.Array
    conv: jax.Array
    rate: jax.Array
    shift: jax.Array
    net: DeltaNet = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(default=0, metadata={"static": True})

    def of_shard(self, shards: int) -> DeltaInput:
        """The shape as one of so many shards sees it."""
        heads = {"key_heads": self.net.key_heads // shards}
        heads["value_heads"] = self.net.value_heads // shards
        return dataclasses.replace(self, net=dataclasses.replace(self.net, **heads))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateRows:
    """Where the states of a step's R rows are, and their tokens.

    Attributes:
        tables: int32 [R, 2, blocks], the blocks that hold each row's state before the step, and
            those that get the one behind it. They may be the same.
        context_lens, query_start, query_lens, token_row: See `AttentionBatch`. A row whose context
            is this step's tokens begins with a state of zeros.
        decode_only: T == R, and token i is row i.
    """

    tables: Any
    context_lens: Any
    query_start: Any
    query_lens: Any
    token_row: Any
    decode_only: bool = dataclasses.field(default=False, metadata={"static": True})
