"""Loading Hugging Face safetensors, or a GGUF file, straight onto the target devices.

One shard of one parameter is in host memory at a time: its part of the tensor is read, transposed
and converted, and put on the devices that hold it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint_files import find_gguf
from jaxserve.models.base import Family, HFTensor, ModelConfig, Params, ParamSpec
from jaxserve.models.sharding import padded_shape, param_sharding
from jaxserve.progress import Show, shown
from jaxserve.weights.config import CheckpointError
from jaxserve.weights.gguf_tensors import GGUFTensors
from jaxserve.weights.tensors import TensorFiles

log = logging.getLogger(__name__)

Index = tuple[slice, ...]
Tensors = TensorFiles | GGUFTensors
_LAYER = re.compile(r"\b(?:layers|blk)\.([0-9]{1,9})\.")
_QUANTIZED = re.compile(r"(scale|scale_inv|scales|qweight|qzeros|g_idx|absmax|zero_point)$")


def load_safetensors(
    folder: Path,
    family: Family,
    config: ModelConfig,
    *,
    dtype: np.dtype,
    mesh: Mesh | None,
    progress: Show = Show.NOTHING,
) -> Params:
    """Loads the parameters in a Hugging Face directory, or a GGUF file.

    Args:
        folder: the directory, or the file.
        family: the model's.
        config: its shape.
        dtype: to convert to.
        mesh: the devices to shard over; None for one.
        progress: shows the bytes loaded.

    Raises:
        CheckpointError: a file is missing or damaged, a tensor is missing, or has the wrong shape.
            The message gives its name, the expected and the found shape. All checks come before
            anything is loaded.
    """
    specs, treedef = jax.tree.flatten(family.param_specs(config))
    sources: list[HFTensor] = jax.tree.leaves(family.hf_layout(config))
    total = sum(spec.size for spec in specs) * dtype.itemsize
    gguf = find_gguf(folder)
    with GGUFTensors(gguf, config) if gguf else TensorFiles(folder, family.prefix) as files:
        for spec, source in zip(specs, sources, strict=True):
            _check(files, spec, source)
        _check_rest(files, sources, config, folder)
        leaves = []
        with shown(progress, "weights", "B", total=total) as bar:
            for spec, source in zip(specs, sources, strict=True):
                leaves.append(_load_leaf(files, spec, source, dtype, mesh))
                bar.update(spec.size * dtype.itemsize)
    return jax.tree.unflatten(treedef, leaves)


def place(
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    read: Callable[[Index], np.ndarray],
) -> jax.Array:
    """An array whose shards come from `read(index)`, called once for each distinct shard."""
    devices_of: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in devices_of.items():
        block = read(tuple(slice(*ends) for ends in bounds))
        shards += [jax.device_put(block, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _check(files: Tensors, spec: ParamSpec, source: HFTensor) -> None:
    if source.name == "lm_head.weight" and files.find(source.name) is None:
        raise CheckpointError(
            "the checkpoint has no tensor 'lm_head.weight' "
            "(config.json: set tie_word_embeddings to true if it is tied to the embedding)"
        )
    files.check(source.name, spec.shape[::-1] if source.transpose else spec.shape)


def _check_rest(files: Tensors, sources: list[HFTensor], config: ModelConfig, folder: Path) -> None:
    """Checks the checkpoint's other tensors. A model that is cut off generates nonsense, and so do
    weights without their scales."""
    used = {files.stored(source.name) for source in sources}
    rest = sorted(
        name
        for name in files.names - used
        if not name.endswith("rotary_emb.inv_freq")  # computed
        and not (config.tied and name == "lm_head.weight")
    )
    for name in rest:
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) >= config.num_layers:
            raise CheckpointError(
                f"config.json: num_hidden_layers is {config.num_layers}, but the checkpoint has a "
                f"tensor {name!r}"
            )
        if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in used:
            raise CheckpointError(
                f"the checkpoint has a tensor {name!r}, but by its config there are no such biases"
            )
        if _QUANTIZED.search(name):
            raise CheckpointError(
                f"tensor {name!r} is of quantized weights, which are not supported; use a "
                "checkpoint with float32, float16 or bfloat16 weights"
            )
    if rest:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        log.warning("%s: nothing uses tensor %r%s", folder, rest[0], more)


def _load_leaf(
    files: Tensors, spec: ParamSpec, source: HFTensor, dtype: np.dtype, mesh: Mesh | None
) -> jax.Array:
    def read(index: Index) -> np.ndarray:
        block = np.zeros([part.stop - part.start for part in index], dtype)
        # Rows that pad the vocabulary are not in the file and stay zero.
        stored = tuple(
            slice(part.start, max(part.start, min(part.stop, size)))
            for part, size in zip(index, spec.shape, strict=True)
        )
        if math.prod(part.stop - part.start for part in stored) == 0:
            return block
        part = files.read(source.name, stored[::-1] if source.transpose else stored)
        part = part.T if source.transpose else part
        block[tuple(slice(size) for size in part.shape)] = part
        return block

    return place(padded_shape(mesh, spec), param_sharding(mesh, spec), read)
