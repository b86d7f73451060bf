"""The tensors of a GGUF file under the names, and in the order of rows, of Hugging Face."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Set
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.gguf.architectures import ARCHITECTURES, LAYER_NAMES
from jaxserve.gguf.config import (
    EMBEDDING,
    LONG_FACTORS,
    OUTPUT,
    ROPE_FACTORS,
    SHORT_FACTORS,
)
from jaxserve.gguf.header import TYPES, TensorInfo, read_header
from jaxserve.models.base import HFTensor, Leaf, ModelConfig
from jaxserve.weights.errors import CheckpointError

_STORED = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
}
_NAMES = {
    "model.embed_tokens": EMBEDDING.removesuffix(".weight"),
    "model.norm": "output_norm",
    "lm_head": OUTPUT.removesuffix(".weight"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_FUSED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_V_B = re.compile(r"blk\.\d+\.attn_v_b\.weight")
_KV_B = re.compile(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight")
_CONFIG = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
_LONG_ROWS = 1024  # that a tensor is made of at most, to dequantize it
_BEFORE_ROWS = re.compile(r"blk\.\d+\.attn_(q|k)\.")


class GGUFTensors:
    """Reads slices of named tensors, as `TensorFiles` does. The file is mapped, not loaded; what is
    read is dequantized, by itself.

    Args:
        path: the GGUF file.
        config: the model's.

    Raises:
        CheckpointError: If it is damaged, or quantized and gguf is not installed.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        try:
            header = read_header(path)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._tensors = header.tensors
        quantized = (each for each in self._tensors.values() if each.type.name not in _STORED)
        first = next(quantized, None)
        if first is not None and importlib.util.find_spec("gguf") is None:
            raise CheckpointError(
                f"{path}: tensor {first.name!r} is {first.type.name}, which the package gguf "
                "reads: pip install gguf"
            )
        known_as = ARCHITECTURES[str(header.metadata.get("general.architecture"))]
        self._layer_names = {**LAYER_NAMES, **known_as.names}
        self._norm_offset = config.norm_offset  # which the files' scales have in them
        self._heads = {"q": config.num_heads, "k": config.num_kv_heads}
        if not known_as.interleaved:
            self._heads = {}
        self._data = np.asarray(np.memmap(path, np.uint8, "r"))  # its slices are plain: cheaper

    def __enter__(self) -> GGUFTensors:
        return self

    def __exit__(self, *_: object) -> None:
        del self._data

    @property
    def names(self) -> Set[str]:
        """The tensors' names as stored, but for what is part of the config."""
        of_pairs = {name for name in self._tensors if _V_B.fullmatch(name)}  # see `_kv_b`
        return self._tensors.keys() - _CONFIG - of_pairs

    def source(self, leaf: Leaf) -> HFTensor:
        """Where the leaf's tensor is to be looked for: gate and up of experts are apart here."""
        source = leaf.source
        fused = _FUSED.fullmatch(source.name) if leaf.of_experts or source.columns else None
        if fused is None and not source.name.endswith(".experts.down_proj_bias"):
            return source
        fused = _FUSED.fullmatch(source.name)
        assert fused is not None
        part = "down" if source.columns is None else ("gate", "up")[source.columns[0]]
        if fused[3]:
            return HFTensor(f"{fused[1]}.{part}_proj.bias")
        count = leaf.spec.shape[0]
        return HFTensor(f"{fused[1]}.*.{part}_proj.weight", transpose=True, stacked=count)

    def stored(self, name: str) -> str | None:
        """The name that a tensor of Hugging Face's name is stored under; None if it is not."""
        if name.endswith(".self_attn.sinks"):
            layer = _LAYER.fullmatch(name)
            full = f"blk.{layer[1]}.attn_sinks.weight" if layer else ""
            return full if full in self._tensors else None
        module, _, kind = name.rpartition(".")
        layer = _LAYER.fullmatch(module)
        if layer is None:
            found = [_NAMES.get(module)]
        elif expert := _EXPERT.fullmatch(layer[2]):
            part = self._layer_names[f"mlp.experts.{_MIXTRAL.get(expert[2], expert[2])}"]
            one = f"{part.removesuffix('_exps')}.{expert[1]}"  # as the first Mixtral's had them
            found = [f"blk.{layer[1]}.{each}" for each in (part, one)]
        else:
            part = self._layer_names.get(layer[2].replace("block_sparse_moe.", "mlp."), "")
            found = [f"blk.{layer[1]}.{part}"]
        names = [f"{one}.{kind}" for one in found]
        if latent := _KV_B.fullmatch(name):
            names.append(f"blk.{latent[1]}.attn_k_b.weight")
        return next((one for one in names if one in self._tensors), None)

    def find(self, name: str) -> TensorInfo | None:
        """Where the tensor is, and how; or None. Of an expert, its part of the tensor of all."""
        stored = self.stored(name)
        if stored is None:
            return None
        found = self._tensors[stored]
        if stored.endswith("attn_k_b.weight"):
            k, v = self._k_and_v_b(stored)
            shape = (k.shape[0] * (k.shape[2] + v.shape[1]), k.shape[1])
            return TensorInfo(stored, shape, TYPES[0], found.offset)  # not kept as it is stored
        layer = _LAYER.fullmatch(name.rpartition(".")[0])
        expert = None if layer is None else _EXPERT.fullmatch(layer[2])
        if expert is not None and len(found.shape) == 3 and int(expert[1]) < found.shape[0]:
            begin = int(expert[1]) * found.shape[1] * found.row_bytes
            return dataclasses.replace(found, shape=found.shape[1:], offset=found.offset + begin)
        if stored.endswith("ffn_gate_inp_shexp.weight") and len(found.shape) == 1:
            return dataclasses.replace(found, shape=(1, *found.shape))  # its one row is squeezed
        return found

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """CheckpointError unless the tensor is there with this shape."""
        found = self.find(name)
        if found is None:
            raise CheckpointError(f"the checkpoint has no tensor for {name!r}")
        if len(shape) == 1 and found.type.name not in _STORED:
            raise CheckpointError(f"tensor {found.name!r}: {found.type.name} is for matrices only")
        if found.shape != shape:
            raise CheckpointError(
                f"tensor {found.name!r}: expected shape {list(shape)}, found {list(found.shape)}"
            )

    def blocks(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a checked tensor as they are stored: uint8 [rows, bytes of a row]."""
        found = self.find(name)
        assert found is not None, name
        stored = self._rows_of(found)
        of = _BEFORE_ROWS.match(found.name)
        heads = None if of is None else self._heads.get(of[1])
        if heads is None or len(found.shape) > 2:
            return stored[rows]
        if len(found.shape) == 1:  # a bias: its rows are elements
            stored = stored.reshape(found.shape[0], -1)
        order = np.arange(len(stored)).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        return stored[order[rows]]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a checked tensor, in its stored dtype, or float32 where that is quantized."""
        found = self.find(name)
        assert found is not None, name
        if found.name.endswith("attn_k_b.weight"):
            return self._kv_b(found.name)[index]
        alone = len(found.shape) == 1
        stored = self.blocks(name, slice(None) if alone else index[0])
        values = _values(found, stored)
        if alone and found.name.endswith("norm.weight"):
            values = values - np.asarray(self._norm_offset, values.dtype)
        return values.reshape(-1)[index] if alone else values[:, index[1]]

    def _k_and_v_b(self, name: str) -> tuple[TensorInfo, TensorInfo]:
        k, v = self._tensors[name], self._tensors.get(name.replace("attn_k_b", "attn_v_b"))
        if v is None or len(k.shape) != 3 or len(v.shape) != 3 or k.shape[1] != v.shape[2]:
            raise CheckpointError(f"tensor {name!r} has no attn_v_b of its size beside it")
        return k, v

    def _kv_b(self, name: str) -> np.ndarray:
        """What makes K and V of few numbers, [heads * (plain + values), rank], where it is stored
        as two: attn_k_b [heads, rank, plain] and attn_v_b [heads, values, rank]."""
        k, v = (
            _values(one, self._rows_of(one)).reshape(one.shape) for one in self._k_and_v_b(name)
        )
        return np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, v.shape[2])

    def _rows_of(self, info: TensorInfo) -> np.ndarray:
        """All rows as they are stored: uint8 [rows, bytes of a row]."""
        end = info.offset + info.rows * info.row_bytes
        return self._data[info.offset : end].reshape(info.rows, info.row_bytes)


def _values(info: TensorInfo, stored: np.ndarray) -> np.ndarray:
    """The elements of stored rows."""
    plain = _STORED.get(info.type.name)
    if plain is not None:
        return np.ascontiguousarray(stored).view(plain)
    import gguf  # late: a fifth of a second

    # It goes through sixteen rows at a time: with long ones in less than half the time.
    long = stored.reshape(math.gcd(len(stored), _LONG_ROWS), -1)
    kind = getattr(gguf.GGMLQuantizationType, info.type.name, None)
    if kind is None:
        raise CheckpointError(
            f"tensor {info.name!r} is {info.type.name}, for which gguf is too old"
        )
    values = gguf.dequantize(long, kind)
    return values.reshape(len(stored), -1)
