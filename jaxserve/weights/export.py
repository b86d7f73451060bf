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

_MOST_BYTES = 4 << 30  # of a file


def save_safetensors(
    folder: Path, params: Params, family: Family, config: ModelConfig, dtype: DTypeLike
) -> None:
    """Writes model-*.safetensors and their index to a folder. OSError if there is no room.

    Args:
        folder: an existing directory.
        params: as loaded. Tables of the vocabulary are written wide.
        family: the model's.
        config: its shape.
        dtype: of what is written wide.
    """
    part: dict[str, np.ndarray] = {}
    files: dict[str, str] = {}  # by tensor
    number = 0

    def write() -> None:
        nonlocal number
        number += 1
        name = f"model-{number:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(part, name))
        part.clear()

    pairs: list[tuple[Leaf, Any]] = []
    jax.tree.map(lambda leaf, one: pairs.append((leaf, one)), family.leaves(config), params)
    for leaf, one in pairs:
        part.update(_tensors(leaf, one, leaf.scheme(config.quantization), dtype))
        if sum(tensor.nbytes for tensor in part.values()) > _MOST_BYTES:
            write()
    write()
    index = {"metadata": {}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def compressed_config(scheme: Scheme, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config of such a checkpoint. ignore: Linear modules that are wide."""
    weights = {
        "num_bits": 4 if scheme.kind == "int4" else 8,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": not scheme.zero,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group or None,
        "dynamic": False,
    }
    given = {"weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scheme.kind == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **given}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _tensors(
    leaf: Leaf, one: Any, scheme: Scheme | None, dtype: DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one parameter by their names. dtype: of tables that are quantised here."""
    if leaf.is_table and isinstance(one, Quantized):
        one = dequantize(one, dtype, transposed=True)  # the format has none of embeddings
    if not isinstance(one, Quantized):
        value, source = np.asarray(one), leaf.source
        values = value if source.stacked else value[None]
        for name, each in zip(source.names, values, strict=True):
            yield name, np.ascontiguousarray(each.T if source.transpose else each)
        return
    assert scheme is not None
    q = np.asarray(one.q)
    q = (q if one.bits == 8 else unpack_pairs(q, 0)).T
    scale = np.ascontiguousarray(np.asarray(one.scale).T)
    yield f"{leaf.name}.weight_scale", scale
    if scheme.kind == "fp8":
        yield f"{leaf.name}.weight", np.ascontiguousarray(q)
        return
    bits = one.bits
    yield f"{leaf.name}.weight_packed", pack(_unsigned(q, bits), bits, 1)
    yield f"{leaf.name}.weight_shape", np.array(q.shape, np.int64)
    if one.zero is not None:
        zero = _unsigned(np.asarray(one.zero).T, bits)
        yield f"{leaf.name}.weight_zero_point", pack(zero, bits, 0)


def _unsigned(numbers: np.ndarray, bits: int) -> np.ndarray:
    return (numbers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
