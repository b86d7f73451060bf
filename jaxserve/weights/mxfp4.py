"""MXFP4 weights of experts, dequantised when they are read (OCP Microscaling Formats 1.0, section
5; gpt-oss's checkpoints).

A weight W of E experts, each [in, out], is two tensors of bytes: W_blocks [E, out, in / 32, 16],
two numbers of 4 bits (e2m1) in each, the first in its low half, and W_scales [E, out, in / 32],
powers of two with an offset of 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.weights.errors import CheckpointError

BLOCK = 32  # numbers that share a scale
METHOD = "mxfp4"  # the quant_method
_BLOCKS, _SCALES = "_blocks", "_scales"
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_SIZES, *(-size for size in _SIZES)], np.float32)
# Both numbers of a byte as one word: NumPy looks up words several times faster than pairs.
_PAIRS = np.stack([_NUMBERS[np.arange(256) & 15], _NUMBERS[np.arange(256) >> 4]], axis=1)
_WORDS = _PAIRS.view(np.uint64)[:, 0].copy()
_OFFSET, _NAN = 127, 255


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The numbers of blocks, float32 [..., in]. NaN if the scale is NaN.

    Args:
        blocks: uint8 [..., in / 32, 16].
        scales: uint8 [..., in / 32].
    """
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _OFFSET)
    powers[scales == _NAN] = np.nan
    numbers = _WORDS[blocks].view(np.float32)
    numbers *= powers[..., None]
    return numbers.reshape(*scales.shape[:-1], -1)


class Mxfp4:
    """An MXFP4 weight, with the interface of safetensors' slices, as BF16, which represents all its
    numbers exactly.

    Args:
        name: the weight's name.
        blocks, scales: slices of its tensors.

    Raises:
        CheckpointError: If they have other shapes or types.
    """

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        self._name, self._blocks, self._scales = name, blocks, scales
        for suffix, tensor in ((_BLOCKS, blocks), (_SCALES, scales)):
            if tensor.get_dtype() != "U8":
                raise CheckpointError(
                    f"tensor '{name}{suffix}': stored as {tensor.get_dtype()}, not as bytes (U8)"
                )
        shape = list(blocks.get_shape())
        if len(shape) != 4 or shape[3] != BLOCK // 2:
            raise CheckpointError(
                f"tensor '{name}{_BLOCKS}': expected shape [experts, out, in / 32, 16], found "
                f"{shape}"
            )
        if list(scales.get_shape()) != shape[:3]:
            raise CheckpointError(
                f"tensor '{name}{_SCALES}': expected shape {shape[:3]}, found "
                f"{list(scales.get_shape())}"
            )
        self._shape = [shape[0], shape[2] * BLOCK, shape[1]]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        experts, inputs, outputs = self._shape
        return experts * outputs * inputs * (BLOCK // 2 + 1) // BLOCK

    def get_shape(self) -> list[int]:
        """[E, in, out]."""
        return self._shape

    def get_dtype(self) -> str:
        """The dtype, by safetensors' name."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Part of the weight, float32. Raises CheckpointError if a scale is NaN."""
        experts, inputs, outputs = (
            slice(*axis.indices(size)) for axis, size in zip(index, self._shape, strict=True)
        )
        assert experts.step == inputs.step == 1
        groups = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        rows, every = slice(outputs.start, outputs.stop), slice(None, None, outputs.step)
        scales = self._scales[experts, rows, groups][:, every]
        if (scales == _NAN).any():
            raise CheckpointError(f"tensor '{self._name}{_SCALES}': a scale is NaN")
        numbers = decode(self._blocks[experts, rows, groups][:, every], scales)
        first = inputs.start - groups.start * BLOCK
        mine = numbers[..., first : first + inputs.stop - inputs.start]
        return np.swapaxes(mine, 1, 2)


def joined(slices: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's slices by name, with one slice for each such weight in place of its two
    tensors.

    Args:
        slices: the slices of all tensors.

    Raises:
        CheckpointError: If one of the two tensors is missing, or they do not fit together.
    """
    result = dict(slices)
    for suffix, other in ((_BLOCKS, _SCALES), (_SCALES, _BLOCKS)):
        for name in slices:
            weight = name.removesuffix(suffix)
            if weight != name and weight + other not in slices:
                raise CheckpointError(
                    f"the checkpoint has no tensor '{weight}{other}', but {name!r}"
                )
    for weight in [n.removesuffix(_BLOCKS) for n in slices if n.endswith(_BLOCKS)]:
        blocks, scales = result.pop(weight + _BLOCKS), result.pop(weight + _SCALES)
        result[weight] = Mxfp4(weight, blocks, scales)
    return result
