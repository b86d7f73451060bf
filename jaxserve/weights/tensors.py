"""The tensors of a Hugging Face directory: one or several safetensors files behind one name map."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.checkpoint_files import regular_file, without_safetensors
from jaxserve.weights.errors import CheckpointError, read_json
from jaxserve.weights.fused_experts import apart
from jaxserve.weights.mxfp4 import Mxfp4, joined

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OF_LANGUAGE = "language_model."
"""Part of the names of text tensors in models that also take images."""
STORED_DTYPES = ("F32", "F16", "BF16", "F64")
FLOAT8 = "F8_E4M3"

_EXPERTS_RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)


class TensorFiles:
    """Reads slices of named tensors; use as a context manager. Files are mapped, not loaded.

    Args:
        folder: directory with *.safetensors files and, if sharded, their index.
        prefix: prefix of tensor names that the checkpoint may have left out, or added, beside
            `OF_LANGUAGE`.
        mxfp4: whether MXFP4 weights are dequantised when read, see `jaxserve.weights.mxfp4`.
        experts: whether fused experts are read one by one, see `jaxserve.weights.fused_experts`.

    Raises:
        CheckpointError: If there are no safetensors files, a file of the index is missing, a file
            is damaged, or two files have the same tensor and no index says which counts.
    """

    def __init__(
        self, folder: Path, prefix: str, *, mxfp4: bool = False, experts: bool = False
    ) -> None:
        self._prefix = prefix
        self._stack = contextlib.ExitStack()
        self._slices: dict[str, Any] = {}
        whose: dict[str, str] = {}
        paths, weight_map = _files(folder)
        for path in paths:
            try:
                regular_file(path)
                # framework "np" gives bfloat16 as ml_dtypes.bfloat16, which jax has registered.
                file = self._stack.enter_context(safe_open(path, framework="np"))
                slices = {
                    name: file.get_slice(name)
                    for name in file.keys()  # noqa: SIM118
                    if weight_map.get(name, path.name) == path.name
                }
                for name in slices:
                    if (first := whose.setdefault(name, path.name)) != path.name:
                        raise ValueError(
                            f"it has the tensor {name!r}, and so has {first}; without "
                            f"{ONE_FILE} or an index it is not clear which of them counts"
                        )
                if any(tensor.get_dtype() == FLOAT8 for tensor in slices.values()):
                    slices |= {
                        name: part for name, part in _float8_slices(path).items() if name in slices
                    }
                self._slices.update(slices)
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise CheckpointError(f"cannot read {path}: {error}") from error
        if experts:
            self._slices = apart(self._slices)
        if mxfp4:
            try:
                self._slices = joined(self._slices)
            except CheckpointError:
                self._stack.close()
                raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._stack.close()

    def replace(self, made: Callable[[TensorFiles], dict[str, Any]]) -> None:
        """Replaces its slices. made: makes the new slices of the files as they are."""
        before = copy.copy(self)
        self._slices = made(before)

    @property
    def names(self) -> Set[str]:
        """The tensors' names as stored."""
        return self._slices.keys()

    @property
    def mxfp4(self) -> dict[str, int]:
        """Stored bytes of MXFP4 weights, by name."""
        items = self._slices.items()
        return {name: part.nbytes for name, part in items if isinstance(part, Mxfp4)}

    def stored(self, name: str) -> str | None:
        """The stored name of a tensor, with or without prefixes; None if it is not stored."""
        for known_name in dict.fromkeys((name, _renamed(name))):
            short = known_name.removeprefix(self._prefix)
            candidates = (
                *(known_name, short, self._prefix + known_name),
                *(
                    OF_LANGUAGE + known_name,
                    f"{self._prefix}{OF_LANGUAGE}{short}",
                    OF_LANGUAGE + short,
                ),
            )
            for candidate in candidates:
                if candidate in self._slices:
                    return candidate
        return None

    def find(self, name: str) -> Any | None:
        """The tensor's slice object, or None."""
        stored = self.stored(name)
        return None if stored is None else self._slices[stored]

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape. Raises CheckpointError if it is missing."""
        return tuple(self._found(name).get_shape())

    def dtype(self, name: str) -> str:
        """The tensor's dtype, by safetensors' name. Raises CheckpointError if it is missing."""
        return str(self._found(name).get_dtype())

    def check(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = STORED_DTYPES
    ) -> None:
        """Raises CheckpointError unless the tensor is there with this shape and one of these
        dtypes."""
        if self.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name!r}: expected shape {list(shape)}, found {list(self.shape(name))}"
            )
        if self.dtype(name) not in dtypes:
            raise CheckpointError(
                f"tensor {name!r}: stored as {self.dtype(name)}, "
                f"which is not supported (known: {', '.join(dtypes)})"
            )

    def _found(self, name: str) -> Any:
        tensor = self.find(name)
        if tensor is None:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return tensor

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A copy of part of a checked tensor, in its stored dtype. index: may have steps."""
        tensor = self.find(name)
        assert tensor is not None, name
        if isinstance(tensor, Mxfp4) or all(axis.step is None for axis in index):
            return tensor[index]
        steps = tuple(slice(None, None, axis.step) for axis in index)
        return tensor[tuple(slice(axis.start, axis.stop) for axis in index)][steps]


def _renamed(name: str) -> str:
    """transformers 5's name for a tensor of Mixtral's experts; other names as they are."""
    for old, new in _EXPERTS_RENAMED if _EXPERTS_RENAMED[0][0] in name else ():
        name = name.replace(old, new)
    return name


class _Float8:
    """A slice of float8 values, for which safetensors' slices have no NumPy dtype."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def get_shape(self) -> list[int]:
        return list(self._values.shape)

    def get_dtype(self) -> str:
        return FLOAT8

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._values[index].copy()


def _float8_slices(path: Path) -> dict[str, _Float8]:
    """The float8 slices of a file that `safe_open` has accepted."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, mode="r", offset=8 + size)
    return {
        name: _Float8(
            data[slice(*about["data_offsets"])]
            .view(ml_dtypes.float8_e4m3fn)
            .reshape(about["shape"])
        )
        for name, about in header.items()
        if name != "__metadata__" and about.get("dtype") == FLOAT8
    }


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """A checkpoint's files, and which of them has each tensor, by its index. As in transformers,
    `ONE_FILE` takes precedence over an index that does not name it, and then is the only file."""
    index, one_file = folder / INDEX, folder / ONE_FILE
    if not os.path.lexists(index):
        files = [one_file] if os.path.lexists(one_file) else sorted(folder.glob("*.safetensors"))
        if not files:
            instead = without_safetensors(folder)
            raise CheckpointError(f"no *.safetensors files in {folder}: {instead}")
        return files, {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointError(f"{index}: weight_map: {tensor!r} is in no file, but in {name!r}")
    if ONE_FILE not in weight_map.values() and os.path.lexists(one_file):
        return [one_file], {}
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise CheckpointError(f"{index} names {missing[0]}, which is not in {folder}")
    return files, weight_map
