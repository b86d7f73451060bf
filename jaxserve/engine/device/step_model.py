"""What a compiled step depends on, besides its layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.models.base import Family, ModelConfig
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.models.lora import LoraSlots
from jaxserve.pallas_kernels import deterministic_backend, get_backend

GPUS = frozenset({"cuda", "gpu"})
MOST_DETERMINISTIC = 2  # devices: the sum of two numbers does not depend on their order
DETERMINISTIC = {
    "xla_gpu_deterministic_ops": True,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,  # its tiles are tiny if none were measured
}


@dataclass(frozen=True)
class StepModel:
    """A model as one platform runs it. Hashable: steps are compiled and shared by this key.

    Attributes:
        backend: name of the kernels, see `pallas_kernels.backends`.
        mesh: devices that share each layer's heads; None for one device.
        hidden_read: how hidden caches are read, `hidden.ABSORBED` or `hidden.PROJECTED`; None
        without such caches.
        max_len: tokens of the longest context.
        activations: dtype of activations, see `activations_in`; None: that of the weights.
        lora: room for adapters; None for none.
        groups: which layers share block lists; None if all do.
    """

    family: Family
    config: ModelConfig
    backend: str
    mesh: Mesh | None
    hidden_read: str | None = None
    max_len: int = 0
    activations: DTypeLike | None = None
    lora: LoraSlots | None = None
    groups: LayerGroups | None = None

    @property
    def shards(self) -> int:
        """Number of devices that share each layer."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def fused(self) -> bool:
        """Whether the parameters have q, k and v fused, see `jaxserve.models.fused`."""
        return self.hidden_read is None


def activations_in(platform: str, weights: DTypeLike) -> jnp.dtype:
    """The dtype of activations for weights of this dtype. Always float32 on CPUs: there, a matmul
    of 16 bits by 16 bits is faster only if its sums are float32, and everything else is faster in
    float32."""
    return jnp.dtype(jnp.float32 if platform == "cpu" else weights)


def cached_in(platform: str, weights: DTypeLike, backend: str, *, hidden: bool) -> jnp.dtype:
    """The dtype of the pool: that of activations, with one exception. On CPUs bfloat16 weights have
    a bfloat16 cache, half the bytes, if numba's kernels read it. XLA's operations, which also read
    hidden caches, would convert it in each step.

    Args:
        platform: as in JAX, such as "cpu".
        weights: dtype of the weights.
        backend: name of the attention kernels.
        hidden: whether there are hidden caches.
    """
    if platform == "cpu" and backend == "numba" and not hidden and weights == jnp.bfloat16:
        return jnp.dtype(jnp.bfloat16)
    return activations_in(platform, weights)


def compiler_options(pool_format: Any, *, deterministic: bool = False) -> dict[str, Any]:
    """XLA's options for a step over a pool of this format, or over hidden states placed like it.

    On GPUs XLA counts the pool twice, as argument and as output, although it is donated. If the
        pool takes half of the memory, XLA assumes that none is left, and recomputes matmuls to save
        memory. deterministic: no kernels chosen by measured speed, and none whose order of
        additions varies.
    """
    placed: Any = jax.tree.leaves(pool_format)[0].sharding
    platforms = {device.platform for device in placed.device_set}
    if not platforms & GPUS:
        return {}
    found: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}
    return found | (DETERMINISTIC if deterministic else {})


def why_not_deterministic(backend: str, model: ModelConfig, tensor: int, read: str | None) -> str:
    """Why there can be no deterministic step, in which each row's bits depend on that row only.

    Args:
        backend: name of the attention kernels.
        model: its shape.
        tensor: devices that share each layer.
        read: how hidden caches are read; None without them.

    Returns:
        The reason; "" if there can be one, or none is needed.
    """
    if get_backend(backend).batch_invariant:
        return ""
    if deterministic_backend(backend) is None:
        return f"the attention kernels {backend} add up in an order that depends on the batch"
    if not model.causal:
        return "tokens of this model see those behind them, by operations that depend on the batch"
    if tensor > MOST_DETERMINISTIC:
        return f"more devices than {MOST_DETERMINISTIC} (mesh.tensor) add up in varying orders"
    if read is not None:
        return "hidden caches are read in an order that depends on the batch (cache.hidden_read)"
    return ""
