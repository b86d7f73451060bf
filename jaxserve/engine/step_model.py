"""What a compiled step depends on beside its layout."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from jaxserve.models.base import Family, ModelConfig


@dataclass(frozen=True)
class StepModel:
    """backend: of the kernels. kv_repeat: copies of each KV head in the pool, more than 1 when the
    mesh has more shards than the model has KV heads. hidden_read: how hidden caches are read,
    `hidden.ABSORBED` or `hidden.PROJECTED`, None without such caches. max_len: tokens of the
    longest context.
    """

    family: Family
    config: ModelConfig
    backend: str
    mesh: Mesh | None
    kv_repeat: int
    hidden_read: str | None = None
    max_len: int = 0
