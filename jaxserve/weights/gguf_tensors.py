"""The tensors of a GGUF file under the names, and in the order of rows, of Hugging Face."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Set
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.gguf.config import EMBEDDING, OUTPUT, ROPE_FACTORS
from jaxserve.gguf.header import TensorInfo, read_header
from jaxserve.models.base import ModelConfig
from jaxserve.weights.errors import CheckpointError

_STORED = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NAMES = {
    "model.embed_tokens": EMBEDDING.removesuffix(".weight"),
    "model.norm": "output_norm",
    "lm_head": OUTPUT.removesuffix(".weight"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LONG_ROWS = 1024  # that a tensor is made of at most, to dequantize it
_BEFORE_ROWS = re.compile(r"blk\.\d+\.attn_(q|k)\.")


class GGUFTensors:
    """Reads slices of named tensors, as `TensorFiles` does. The file is mapped, not loaded; what is
    read is dequantized, by itself.

    Args:
        path: the GGUF file.
        config: the model's.

    Raises:
        CheckpointError: it is damaged, or quantized and gguf is not installed.
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
        # llama.cpp rotates neighbours, and its converter has the rows of llama's q and k in that
        # order; here, as in transformers, elements of two halves are rotated.
        interleaved = header.metadata.get("general.architecture") == "llama"
        self._layer_names = _GEMMA_NAMES if config.norm_offset else _LAYER_NAMES
        self._norm_offset = config.norm_offset  # which the files' scales have in them
        self._heads = {"q": config.num_heads, "k": config.num_kv_heads} if interleaved else {}
        self._data = np.asarray(np.memmap(path, np.uint8, "r"))  # its slices are plain: cheaper

    def __enter__(self) -> GGUFTensors:
        return self

    def __exit__(self, *_: object) -> None:
        del self._data

    @property
    def names(self) -> Set[str]:
        """The tensors' names as stored, but for what is part of the config."""
        return self._tensors.keys() - {ROPE_FACTORS}

    def stored(self, name: str) -> str | None:
        """The name that a tensor of Hugging Face's name is stored under; None if it is not."""
        module, _, kind = name.rpartition(".")
        layer = _LAYER.fullmatch(module)
        if layer is None:
            found = _NAMES.get(module)
        else:
            part = self._layer_names.get(layer[2])
            found = None if part is None else f"blk.{layer[1]}.{part}"
        full = f"{found}.{kind}"
        return full if full in self._tensors else None

    def find(self, name: str) -> TensorInfo | None:
        """Where the tensor is, and how; or None."""
        stored = self.stored(name)
        return None if stored is None else self._tensors[stored]

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
        end = found.offset + found.rows * found.row_bytes
        stored = self._data[found.offset : end].reshape(found.rows, found.row_bytes)
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
        alone = len(found.shape) == 1
        stored = self.blocks(name, slice(None) if alone else index[0])
        values = _values(found, stored)
        if alone and found.name.endswith("norm.weight"):
            values = values - np.asarray(self._norm_offset, values.dtype)
        return values.reshape(-1)[index] if alone else values[:, index[1]]


def _values(info: TensorInfo, stored: np.ndarray) -> np.ndarray:
    """The elements of stored rows."""
    plain = _STORED.get(info.type.name)
    if plain is not None:
        return np.ascontiguousarray(stored).view(plain)
    import gguf  # late: a fifth of a second

    # It goes through sixteen rows at a time: with long ones in less than half the time.
    long = stored.reshape(math.gcd(len(stored), _LONG_ROWS), -1)
    values = gguf.dequantize(long, gguf.GGMLQuantizationType[info.type.name])
    return values.reshape(len(stored), -1)
