"""Reads single experts of a layer whose experts are stored as two tensors, as in transformers 5:
gate and up [experts, 2 * width, d_model], gate's rows first, and down [experts, d_model, width]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


class Part:
    """One expert's matrix, with the interface of safetensors' slices.

    Args:
        whole: slice of the tensor that contains it.
        expert: number of the expert.
        first: index of its first row.
        rows: number of its rows.
    """

    def __init__(self, whole: Any, expert: int, first: int, rows: int) -> None:
        self._whole, self._expert, self._first, self._rows = whole, expert, first, rows

    def get_shape(self) -> list[int]:
        """[out, in]."""
        return [self._rows, self._whole.get_shape()[2]]

    def get_dtype(self) -> str:
        """The dtype, by safetensors' name."""
        return str(self._whole.get_dtype())

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        begin, end, _ = index[0].indices(self._rows)
        rows = slice(self._first + begin, self._first + end)
        part: np.ndarray = self._whole[slice(self._expert, self._expert + 1), rows, index[1]]
        return part[0]


def apart(slices: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's slices by name, with a slice for each expert's matrix in place of such
    tensors."""
    result: dict[str, Any] = {}
    for name, whole in slices.items():
        fused, shape = _FUSED.fullmatch(name), list(whole.get_shape())
        if fused is None or len(shape) != 3:
            result[name] = whole
            continue
        parts = ("down",) if fused[2] == "down_proj" else ("gate", "up")
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            for number, part in enumerate(parts):
                expert_name = f"{fused[1]}.{expert}.{part}_proj.weight"
                result[expert_name] = Part(whole, expert, number * rows, rows)
    return result
