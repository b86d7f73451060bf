"""What a compiled step depends on beside its layout."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from jaxserve.models.base import Family, ModelConfig


@dataclass(frozen=True)
class StepModel:
    """A model as one platform runs it. Hashable: steps are compiled, and shared, by it.

    Attributes:
        backend: name of the kernels, see `pallas_kernels.backends`.
        mesh: devices that share each layer's heads; None for one device.
        kv_repeat: copies of each KV head in the pool, more than 1 when the mesh has more shards
            than the model has KV heads.
        unroll: how the layers run, see `jaxserve.models.forward.over_layers` and `unrolls`.
        hidden_read: how hidden caches are read, `hidden.ABSORBED` or `hidden.PROJECTED`; None
            without such caches.
        max_len: tokens of the longest context.
    """

    family: Family
    config: ModelConfig
    backend: str
    mesh: Mesh | None
    kv_repeat: int
    unroll: bool
    hidden_read: str | None = None
    max_len: int = 0


def unrolls(platform: str, device_kind: str) -> bool:
    """Whether the layers run one by one there. platform: as `jax.Device.platform` or a target of
    `jaxserve.compile_check` has it; device_kind: the maker's name."""
    return platform != "tpu" or device_kind.startswith("TPU7")
