"""Writes parameters as Hugging Face safetensors; quantised ones in compressed-tensors' format,
which vLLM reads, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from jaxserve.models.base import Family, Leaf, ModelConfig, Params
from jaxserve.models.quantized import Quantized, Scheme, dequantize, unpack_pairs
from jaxserve.weights.packed import pack
from jaxserve.weights.tensors import INDEX

_MOST_BYTES = 4 << 30  # most bytes of a file


def save_safetensors(
    folder: Path, params: Params, family: Family, config: ModelConfig, dtype: DTypeLike
) -> None:
    """Writes model-*.safetensors and their index to a folder. Raises OSError if there is no room.

    Args:
        folder: an existing directory.
        params: as loaded. Tables of the vocabulary are written wide.
        family: the model's.
        config: its shape.
        dtype: dtype of parameters that are written wide.
    """
    part: dict[str, np.ndarray] = {}
    files: dict[str, str] = {}  # file of each tensor
    number = 0

    def write() -> None:
        nonlocal number
        number += 1
        name = f"model-{number:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(part, name))
        part.clear()

    pairs: list[tuple[Leaf, Any]] = []
    jax.tree.map(lambda leaf, array: pairs.append((leaf, array)), family.leaves(config), params)
    for leaf, array in pairs:
        part.update(_tensors(leaf, array, leaf.scheme(config.quantization), dtype))
        if sum(tensor.nbytes for tensor in part.values()) > _MOST_BYTES:
            write()
    write()
    index = {"metadata": {}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def compressed_config(scheme: Scheme, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of such a checkpoint. ignore: Linear modules that are not
    quantised."""
    weights = {
        "num_bits": 4 if scheme.kind == "int4" else 8,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": not scheme.zero,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group or None,
        "dynamic": False,
    }
    group = {"weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scheme.kind == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _tensors(
    leaf: Leaf, array: Any, scheme: Scheme | None, dtype: DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one parameter by their names. dtype: dtype in which quantised tables are
    written."""
    if leaf.is_table and isinstance(array, Quantized):
        array = dequantize(array, dtype, transposed=True)  # the format has no quantised embeddings
    if not isinstance(array, Quantized):
        value, source = np.asarray(array), leaf.source
        values = value if source.stacked else value[None]
        for name, part in zip(source.names, values, strict=True):
            yield name, np.ascontiguousarray(part.T if source.transpose else part)
        return
    assert scheme is not None
    q = np.asarray(array.q)
    q = (q if array.bits == 8 else unpack_pairs(q, 0)).T
    scale = np.ascontiguousarray(np.asarray(array.scale).T)
    yield f"{leaf.name}.weight_scale", scale
    if scheme.kind == "fp8":
        yield f"{leaf.name}.weight", np.ascontiguousarray(q)
        return
    bits = array.bits
    yield f"{leaf.name}.weight_packed", pack(_unsigned(q, bits), bits, 1)
    yield f"{leaf.name}.weight_shape", np.array(q.shape, np.int64)
    if array.zero is not None:
        zero = _unsigned(np.asarray(array.zero).T, bits)
        yield f"{leaf.name}.weight_zero_point", pack(zero, bits, 0)


def _unsigned(numbers: np.ndarray, bits: int) -> np.ndarray:
    return (numbers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
