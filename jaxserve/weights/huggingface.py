"""Loading Hugging Face safetensors, or a GGUF file, straight onto the target devices.

One shard of one parameter is in host memory at a time: its part of the tensor is read, transposed
and converted, and put on the devices that hold it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.checkpoint_files import find_gguf
from jaxserve.models.base import Family, HFTensor, Leaf, ModelConfig, Params, ParamSpec
from jaxserve.models.quantized import Quantization, Quantized, pack_pairs
from jaxserve.models.sharding import padded_shape, param_sharding
from jaxserve.progress import Show, shown
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.gguf.blocks import Blocks
from jaxserve.weights.gguf.tensors import GGUFTensors
from jaxserve.weights.packed import Numbers, Stored, all_unpacked
from jaxserve.weights.quantize import quantize_leaf
from jaxserve.weights.quantized_config import packed_format, reads_mxfp4, reads_wide
from jaxserve.weights.tensors import OF_LANGUAGE, TensorFiles
from jaxserve.weights.tied import HEAD

log = logging.getLogger(__name__)

Index = tuple[slice, ...]
Tensors = TensorFiles | GGUFTensors
_EXPERT = re.compile(r"\bexperts\.([0-9]{1,9})\.")
_LAYER = re.compile(r"\b(?:layers|blk)\.([0-9]{1,9})\.")
_MIXER = re.compile(r"\b(linear|self)_attn\.")
_MTP = re.compile(r"^(model\.)?mtp\.")
_SIZES = ", of the sizes of linear_num_key_heads and other fields with linear_"
_WEIGHTS = ("weight", "qweight", "weight_packed")
_CACHE_SCALE = re.compile(r"self_attn(\.attn)?\.[qkv]_scale$")  # scales of 8-bit K and V caches
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
        dtype: dtype of parameters that are not quantised.
        mesh: the devices to shard over; None for one.
        progress: shows the bytes loaded.

    Raises:
        CheckpointError: If a file is missing or damaged, a tensor is missing, or has the wrong
            shape. The message gives its name, the expected and the stored shape. All checks come
            before anything is loaded.
    """
    leaves: list[Leaf]
    leaves, treedef = jax.tree.flatten(family.leaves(config))
    quantization = config.quantization
    total = sum(leaf.spec.size for leaf in leaves) * dtype.itemsize
    params: list[jax.Array | Quantized] = []
    gguf = find_gguf(folder)
    stored: Stored | None = None
    unpacks = not gguf and reads_wide(family, config)
    unpacked = packed_format(folder) if unpacks else None
    if quantization is not None and not unpacks:
        stored = Blocks() if gguf and quantization.dequantizable else packed_format(folder)
    tensors = (
        GGUFTensors(gguf, config)
        if gguf
        else TensorFiles(
            folder,
            family.prefix,
            mxfp4=reads_mxfp4(folder),
            experts=family.stacked_tensor(config) is not None,
        )
    )
    with tensors as files:
        if unpacked is not None and isinstance(files, TensorFiles):
            files.replace(functools.partial(all_unpacked, unpacked))
            log.info("%s: its quantised weights are made %s as they are read", folder, dtype.name)
        used: set[str | None] = set()
        leaves = [_where_stored(files, leaf, config) for leaf in leaves]
        for leaf in leaves:
            if stored is not None and leaf.scheme(quantization):
                used.update(stored.tensors(files, leaf.name))
            else:
                _check(files, leaf.spec, leaf.source, config)
                used.update(map(files.stored, leaf.source.names))
        used |= _further(files, config, folder)
        _check_rest(files, used, config, folder, stored)
        if isinstance(files, TensorFiles) and files.mxfp4:
            _log_mxfp4(folder, files, leaves, quantization, dtype)
        with shown(progress, "weights", "B", total=total) as bar:
            for leaf in leaves:
                if stored is not None and leaf.scheme(quantization):
                    params.append(_load_packed(files, leaf, stored, quantization, mesh))
                else:
                    of_leaf = jnp.dtype(leaf.spec.dtype or dtype)
                    wide = _load_leaf(files, leaf.spec, leaf.source, of_leaf, mesh)
                    params.append(quantize_leaf(wide, leaf, quantization, mesh))
                bar.update(leaf.spec.size * dtype.itemsize)
    return jax.tree.unflatten(treedef, params)


def _where_stored(files: Tensors, leaf: Leaf, config: ModelConfig) -> Leaf:
    """The leaf with its place in these files: a table may only be stored as the head."""
    if isinstance(files, GGUFTensors):
        return dataclasses.replace(leaf, source=files.source(leaf))
    if not config.tied or not leaf.is_table or files.find(leaf.source.name) is not None:
        return leaf
    if files.find(HEAD) is None:
        return leaf
    return dataclasses.replace(leaf, source=dataclasses.replace(leaf.source, name=HEAD))


def _log_mxfp4(
    folder: Path,
    files: TensorFiles,
    leaves: list[Leaf],
    quantization: Quantization | None,
    dtype: np.dtype,
) -> None:
    """Logs the memory of weights that are not kept as they are stored."""
    kept: list[ParamSpec] = []
    for leaf in leaves:
        if files.stored(leaf.source.name) in files.mxfp4:
            kept += jax.tree.leaves(leaf.stored(quantization))
    size = sum(spec.size * jnp.dtype(spec.dtype or dtype).itemsize for spec in kept)
    what = dtype.name if quantization is None else f"as model.quantization says, {dtype.name} first"
    log.info(
        "%s: its MXFP4 weights, %.2f GiB, are made wide (%s) and take %.2f GiB",
        folder,
        sum(files.mxfp4.values()) / 2**30,
        what,
        size / 2**30,
    )


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


def _check(files: Tensors, spec: ParamSpec, source: HFTensor, config: ModelConfig) -> None:
    if source.name == HEAD and files.find(source.name) is None:
        raise CheckpointError(
            "the checkpoint has no tensor 'lm_head.weight' "
            "(config.json: set tie_word_embeddings to true if it is tied to the embedding)"
        )
    for name in source.names:
        try:
            files.check(name, source.stored_shape(spec.shape))
        except CheckpointError as error:
            layer = _LAYER.search(name)
            if config.delta is None or layer is None or not _MIXER.search(name):
                raise
            state = config.layer_kinds[int(layer[1])].state
            kind = "linear_attention" if state else "full_attention"
            raise CheckpointError(
                f"{error} (by layer_types of its config.json, layer {layer[1]} has {kind}"
                f"{_SIZES if state else ''})"
            ) from None


def _is_zero(files: Tensors, name: str) -> bool:
    """Whether a tensor is all zeros: GPTQ's tools write such biases for models without biases."""
    if not isinstance(files, TensorFiles) or len(files.shape(name)) != 1:
        return False
    return not files.read(name, (slice(None),)).any()


def _further(files: Tensors, config: ModelConfig, folder: Path) -> Set[str]:
    """The tensors of layers for multi-token prediction, which nothing uses."""
    numbers = range(config.num_layers, config.num_layers + config.mtp_layers)
    found = {name: _LAYER.search(name) for name in files.names}
    names = {name for name, layer in found.items() if layer and int(layer[1]) in numbers}
    if names:
        log.info(
            "%s: its %d tensors of layers from %d on, for multi-token prediction, are not used",
            folder,
            len(names),
            config.num_layers,
        )
    named = {name for name in files.names if _MTP.match(name)}
    if named:
        what = "%s: its %d tensors mtp.*, for multi-token prediction, are not used"
        log.info(what, folder, len(named))
    return names | named


def _check_rest(
    files: Tensors,
    used: Set[str | None],
    config: ModelConfig,
    folder: Path,
    stored: Stored | None,
) -> None:
    """Checks the checkpoint's other tensors: without some layers or scales, the model would
    generate nonsense."""
    texts_only = any(name is not None and OF_LANGUAGE in name for name in used)
    rest = sorted(
        name
        for name in files.names - used
        if not (texts_only and OF_LANGUAGE not in name)  # for images
        and not name.endswith("rotary_emb.inv_freq")  # computed
        and not (config.tied and name == files.stored(HEAD))  # the same table again
        and not (stored is not None and name.endswith(".bias") and _is_zero(files, name))
    )
    for name in rest:
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) >= config.num_layers:
            raise CheckpointError(
                f"config.json: num_hidden_layers is {config.num_layers}, but the checkpoint has a "
                f"tensor {name!r}"
            )
        expert, experts = _EXPERT.search(name), config.experts
        if expert is not None and (experts is None or int(expert[1]) >= experts.num_experts):
            raise CheckpointError(
                f"by its config.json layers have {experts.num_experts if experts else 'no'} "
                f"experts, but the checkpoint has a tensor {name!r}"
            )
        module = name.removesuffix("bias")
        if name.endswith(".bias") and any(f"{module}{weight}" in used for weight in _WEIGHTS):
            raise CheckpointError(
                f"the checkpoint has a tensor {name!r}, but by its config there are no such biases"
            )
        of_cache = config.quantization is not None and _CACHE_SCALE.search(name)
        if _QUANTIZED.search(name) and not of_cache:
            raise CheckpointError(
                f"tensor {name!r} is of quantized weights, of which config.json says nothing; use "
                "a checkpoint with float32, float16 or bfloat16 weights, or its own config.json"
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
        if not source.stacked and len(stored) == 3:
            for place, axis in enumerate(range(stored[0].start, stored[0].stop)):
                block[place] = _read(
                    files, source, source.name, (slice(axis, axis + 1), *stored[1:])
                )[0]
            return block
        if not source.stacked:
            part = _read(files, source, source.name, stored)
            block[tuple(slice(size) for size in part.shape)] = part
            return block
        for place, name in enumerate(source.names[stored[0]]):
            block[place] = _read(files, source, name, stored[1:])
        return block

    return place(padded_shape(mesh, spec), param_sharding(mesh, spec), read)


def _read(files: Tensors, source: HFTensor, name: str, index: Index) -> np.ndarray:
    """Part of a tensor, by an index into the parameter."""
    index = index[::-1] if source.transpose else index
    if source.rows is not None:
        first = source.rows[0]
        index = (slice(index[0].start + first, index[0].stop + first), *index[1:])
    if source.columns is not None:
        first, step = source.columns
        index = (*index[:-1], slice(index[-1].start * step + first, index[-1].stop * step, step))
    part = files.read(name, index)
    return part.T if source.transpose else part


def _load_packed(
    files: Tensors,
    leaf: Leaf,
    stored: Stored,
    quantization: Quantization | None,
    mesh: Mesh | None,
) -> Quantized:
    """A weight that is stored quantised, shard by shard."""
    scheme, specs = leaf.scheme(quantization), leaf.stored(quantization)
    assert scheme is not None and isinstance(specs, Quantized)
    inputs, outputs = leaf.spec.shape[::-1] if leaf.is_table else leaf.spec.shape
    stored_scheme = stored.scheme(files, leaf.name, inputs, outputs)
    if stored_scheme is None or not stored_scheme.alike(scheme, inputs):
        raise CheckpointError(f"{leaf.name} is quantised otherwise than the model's config says")
    group = scheme.group or inputs

    # The numbers, scales and zero points of a shard are read one after another.
    @functools.lru_cache(maxsize=1)
    def numbers(first: int, last: int, begin: int, end: int) -> Numbers:
        return stored.read(files, leaf.name, slice(first, last), slice(begin, end), scheme)

    def reading(part: int, spec: ParamSpec) -> Callable[[Index], np.ndarray]:
        def read(index: Index) -> np.ndarray:
            block = np.zeros([axis.stop - axis.start for axis in index], jnp.dtype(spec.dtype))
            rows, columns = index[::-1] if leaf.is_table else index
            per_unit = group if part else 8 // scheme.bits  # inputs of each word or group
            first, last = rows.start * per_unit, rows.stop * per_unit
            columns = slice(columns.start, max(columns.start, min(columns.stop, outputs)))
            if columns.start == columns.stop:  # padding of the vocabulary
                return block
            whole = slice(first // group * group, -(-last // group) * group)
            values = numbers(whole.start, whole.stop, columns.start, columns.stop)[part]
            assert values is not None
            if not part:
                values = values[first - whole.start : last - whole.start]
                values = values if scheme.bits == 8 else pack_pairs(values, 0)
            values = values.T if leaf.is_table else values
            block[tuple(slice(size) for size in values.shape)] = values
            return block

        return read

    def placed(part: int, spec: ParamSpec) -> jax.Array:
        return place(padded_shape(mesh, spec), param_sharding(mesh, spec), reading(part, spec))

    parts: dict[str, Any] = {
        name: placed(part, getattr(specs, name))
        for part, name in enumerate(Numbers._fields)
        if getattr(specs, name) is not None
    }
    return dataclasses.replace(specs, **parts)
