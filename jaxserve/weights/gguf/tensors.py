"""The tensors of a GGUF file, with Hugging Face's names and order of rows."""

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
_LONG_ROWS = 1024  # most rows that a tensor is dequantized as
_BEFORE_ROWS = re.compile(r"blk\.\d+\.attn_(q|k)\.")


class GGUFTensors:
    """Reads slices of named tensors, as `TensorFiles` does. The file is mapped, not loaded; only
    the part that is read is dequantized.

    Args:
        path: the GGUF file.
        config: the model's.

    Raises:
        CheckpointError: If the file is damaged, or quantized and gguf is not installed.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        try:
            header = read_header(path)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._tensors = header.tensors
        quantized = (tensor for tensor in self._tensors.values() if tensor.type.name not in _STORED)
        first = next(quantized, None)
        if first is not None and importlib.util.find_spec("gguf") is None:
            raise CheckpointError(
                f"{path}: tensor {first.name!r} is {first.type.name}, which the package gguf "
                "reads: pip install gguf"
            )
        known_as = ARCHITECTURES[str(header.metadata.get("general.architecture"))]
        self._layer_names = {**LAYER_NAMES, **known_as.names}
        self._norm_offset = config.norm_offset  # the files' scales include it
        self._heads = {"q": config.num_heads, "k": config.num_kv_heads}
        if not known_as.interleaved:
            self._heads = {}
        self._data = np.asarray(np.memmap(path, np.uint8, "r"))  # plain slices are cheaper

    def __enter__(self) -> GGUFTensors:
        return self

    def __exit__(self, *_: object) -> None:
        del self._data

    @property
    def names(self) -> Set[str]:
        """The tensors' stored names, except tensors that are part of the config."""
        of_pairs = {name for name in self._tensors if _V_B.fullmatch(name)}  # see `_kv_b`
        return self._tensors.keys() - _CONFIG - of_pairs

    def source(self, leaf: Leaf) -> HFTensor:
        """Where to look for the leaf's tensor: gate and up of experts are separate here."""
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
        """The stored name of a tensor with this Hugging Face name; None if it is not stored."""
        if name.endswith(".self_attn.sinks"):
            layer = _LAYER.fullmatch(name)
            full = f"blk.{layer[1]}.attn_sinks.weight" if layer else ""
            return full if full in self._tensors else None
        module, _, kind = name.rpartition(".")
        layer = _LAYER.fullmatch(module)
        if layer is None:
            parts = [_NAMES.get(module)]
        elif expert := _EXPERT.fullmatch(layer[2]):
            part = self._layer_names[f"mlp.experts.{_MIXTRAL.get(expert[2], expert[2])}"]
            one = f"{part.removesuffix('_exps')}.{expert[1]}"  # as in the first Mixtral files
            parts = [f"blk.{layer[1]}.{part_name}" for part_name in (part, one)]
        else:
            part = self._layer_names.get(layer[2].replace("block_sparse_moe.", "mlp."), "")
            parts = [f"blk.{layer[1]}.{part}"]
        names = [f"{one}.{kind}" for one in parts]
        if latent := _KV_B.fullmatch(name):
            names.append(f"blk.{latent[1]}.attn_k_b.weight")
        return next((one for one in names if one in self._tensors), None)

    def find(self, name: str) -> TensorInfo | None:
        """Where and how the tensor is stored, or None. For an expert, its part of the tensor of all
        experts."""
        stored = self.stored(name)
        if stored is None:
            return None
        info = self._tensors[stored]
        if stored.endswith("attn_k_b.weight"):
            k, v = self._k_and_v_b(stored)
            shape = (k.shape[0] * (k.shape[2] + v.shape[1]), k.shape[1])
            return TensorInfo(stored, shape, TYPES[0], info.offset)  # not kept as stored
        layer = _LAYER.fullmatch(name.rpartition(".")[0])
        expert = None if layer is None else _EXPERT.fullmatch(layer[2])
        if expert is not None and len(info.shape) == 3 and int(expert[1]) < info.shape[0]:
            begin = int(expert[1]) * info.shape[1] * info.row_bytes
            return dataclasses.replace(info, shape=info.shape[1:], offset=info.offset + begin)
        if stored.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1:
            return dataclasses.replace(info, shape=(1, *info.shape))  # its one row is squeezed
        return info

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError unless the tensor is stored with this shape."""
        info = self.find(name)
        if info is None:
            raise CheckpointError(f"the checkpoint has no tensor for {name!r}")
        if len(shape) == 1 and info.type.name not in _STORED:
            raise CheckpointError(f"tensor {info.name!r}: {info.type.name} is for matrices only")
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {info.name!r}: expected shape {list(shape)}, found {list(info.shape)}"
            )

    def blocks(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a checked tensor as they are stored: uint8 [rows, bytes of a row]."""
        info = self.find(name)
        assert info is not None, name
        stored = self._rows_of(info)
        of = _BEFORE_ROWS.match(info.name)
        heads = None if of is None else self._heads.get(of[1])
        if heads is None or len(info.shape) > 2:
            return stored[rows]
        if len(info.shape) == 1:  # a bias: its rows are elements
            stored = stored.reshape(info.shape[0], -1)
        order = np.arange(len(stored)).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        return stored[order[rows]]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a checked tensor, in its stored dtype, or float32 if it is quantized."""
        info = self.find(name)
        assert info is not None, name
        if info.name.endswith("attn_k_b.weight"):
            return self._kv_b(info.name)[index]
        alone = len(info.shape) == 1
        stored = self.blocks(name, slice(None) if alone else index[0])
        values = _values(info, stored)
        if alone and info.name.endswith("norm.weight"):
            values = values - np.asarray(self._norm_offset, values.dtype)
        return values.reshape(-1)[index] if alone else values[:, index[1]]

    def _k_and_v_b(self, name: str) -> tuple[TensorInfo, TensorInfo]:
        k, v = self._tensors[name], self._tensors.get(name.replace("attn_k_b", "attn_v_b"))
        if v is None or len(k.shape) != 3 or len(v.shape) != 3 or k.shape[1] != v.shape[2]:
            raise CheckpointError(f"tensor {name!r} has no attn_v_b of its size beside it")
        return k, v

    def _kv_b(self, name: str) -> np.ndarray:
        """The projection from latent numbers to K and V, [heads * (plain + values), rank], if it is
        stored as two tensors: attn_k_b [heads, rank, plain] and attn_v_b [heads, values, rank]."""
        k, v = (
            _values(half, self._rows_of(half)).reshape(half.shape) for half in self._k_and_v_b(name)
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
    import gguf  # late: takes 0.2 s

    # The package goes through sixteen rows at a time: long rows take less than half the time.
    long = stored.reshape(math.gcd(len(stored), _LONG_ROWS), -1)
    kind = getattr(gguf.GGMLQuantizationType, info.type.name, None)
    if kind is None:
        raise CheckpointError(
            f"tensor {info.name!r} is {info.type.name}, for which gguf is too old"
        )
    values = gguf.dequantize(long, kind)
    return values.reshape(len(stored), -1)
