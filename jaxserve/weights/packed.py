"""Quantised weights as Hugging Face checkpoints store them: GPTQ, AWQ, compressed-tensors, fp8.

Each weight is unpacked shard by shard to the numbers of `Quantized`, from any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from jaxserve.models.quantized import Scheme
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.tensors import TensorFiles

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # order of the eight columns in a word, low bits first
_WORD = 32
_OTHER_ZEROS = "a symmetric weight has other zero points"
_SCALES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
# Scales of quantised activations and caches, which are not quantised here.
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "weight_shape")


class Numbers(NamedTuple):
    """Part of a weight, in its own orientation: inputs by outputs.

    Attributes:
        q: int8 or float8_e4m3fn [inputs, outputs].
        scale: [groups, outputs].
        zero: int8 [groups, outputs], or None.
        minimum: float32 [groups, outputs], or None.
    """

    q: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None
    minimum: np.ndarray | None = None


class Stored(Protocol):
    """The stored format of weights that stay quantised, see `Format`. files: the checkpoint's
    tensors."""

    def tensors(self, files: Any, name: str) -> list[str]:
        """See `Format`."""
        ...

    def scheme(self, files: Any, name: str, inputs: int, outputs: int) -> Scheme | None:
        """See `Format`."""
        ...

    def read(self, files: Any, name: str, inputs: slice, outputs: slice, scheme: Scheme) -> Numbers:
        """See `Format`."""
        ...


@dataclass(frozen=True)
class Format:
    """How the weights of a checkpoint are quantised, by its config.json.

    Attributes:
        method: "gptq", "awq" or "float" (compressed-tensors, and fp8 by itself).
        symmetric: all zero points are in the middle of the range.
        offset: added to the zero points of GPTQ.
        block: outputs and inputs that share a scale; None if not by block.
        activations: whether activations were meant to be quantised, too.
    """

    method: str
    symmetric: bool = True
    offset: int = 0
    block: tuple[int, int] | None = None
    activations: bool = False

    def tensors(self, files: TensorFiles, name: str) -> list[str]:
        """The stored names of the tensors of the weight called `name`."""
        suffixes = {"qweight", "qzeros", "scales", "g_idx"} if self.method != "float" else _FLOAT
        names = (files.stored(f"{name}.{suffix}") for suffix in (*suffixes, *UNUSED))
        return [stored_name for stored_name in names if stored_name is not None]

    def scheme(self, files: TensorFiles, name: str, inputs: int, outputs: int) -> Scheme | None:
        """How a weight is stored, by the shapes of its tensors. None if it is not quantised.

        Args:
            files: the checkpoint's tensors.
            name: the weight's name, without ".weight".
            inputs, outputs: its size.

        Raises:
            CheckpointError: If its format is not supported, or its tensors do not fit together.
        """
        return _KINDS[self.method][0](self, files, name, inputs, outputs)

    def read(
        self, files: TensorFiles, name: str, inputs: slice, outputs: slice, scheme: Scheme
    ) -> Numbers:
        """Part of a weight.

        Args:
            files: the checkpoint's tensors.
            name: the weight's name, without ".weight".
            inputs: range of inputs, in whole groups.
            outputs: range of outputs.
            scheme: the weight's scheme.

        Raises:
            CheckpointError: If a scale is 0 or not finite. Negative scales are made positive by
                negating the numbers.
        """
        numbers = _KINDS[self.method][1](self, files, name, inputs, outputs, scheme)
        wide = numbers.scale.astype(np.float32)
        if not (np.isfinite(wide) & (wide != 0)).all():
            raise CheckpointError(f"{name}: a scale of its quantisation is NaN, infinite or 0")
        return numbers


class Unpacked:
    """A quantised weight with the interface of safetensors' slices of float32: dequantised when it
    is read.

    Args:
        form: how it is stored.
        files: its tensors.
        name: the weight's name, without ".weight".
    """

    def __init__(self, form: Format, files: TensorFiles, name: str) -> None:
        self._form, self._files, self._name = form, files, name
        self._inputs, self._outputs = _size(form, files, name)
        scheme = form.scheme(files, name, self._inputs, self._outputs)
        assert scheme is not None
        self._scheme = scheme

    def get_shape(self) -> list[int]:
        """[out, in]."""
        return [self._outputs, self._inputs]

    def get_dtype(self) -> str:
        """The dtype, by safetensors' name."""
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        outputs, inputs = (
            slice(*axis.indices(size)) for axis, size in zip(index, self.get_shape(), strict=True)
        )
        group = self._scheme.group or self._inputs
        whole = slice(inputs.start // group * group, -(-inputs.stop // group) * group)
        numbers = self._form.read(self._files, self._name, whole, outputs, self._scheme)
        wide = numbers.q.astype(np.float32)
        if numbers.zero is not None:
            wide -= np.repeat(numbers.zero, group, axis=0)
        wide *= np.repeat(numbers.scale.astype(np.float32), group, axis=0)
        return wide[inputs.start - whole.start : inputs.stop - whole.start].T


def all_unpacked(form: Format, files: TensorFiles) -> dict[str, Any]:
    """The slices of a checkpoint by name, with one for each quantised weight in place of its
    tensors. Raises CheckpointError as `Format.scheme` does."""
    slices: dict[str, Any] = {}
    used: set[str] = set()
    marks = (".qweight",) if form.method != "float" else (".weight_packed", ".weight")
    for name in files.names:
        module = next((name.removesuffix(mark) for mark in marks if name.endswith(mark)), None)
        if module is None or (name.endswith(".weight") and files.dtype(name) not in _STORED):
            continue
        slices[f"{module}.weight"] = Unpacked(form, files, module)
        used.update(form.tensors(files, module))
    if not slices:
        raise CheckpointError("its config says that weights are quantized, but no tensor is")
    rest = {name: files.find(name) for name in files.names if name not in used}
    return rest | slices


def _size(form: Format, files: TensorFiles, name: str) -> tuple[int, int]:
    """Inputs and outputs of a quantised weight."""
    packed, shape = f"{name}.weight_packed", f"{name}.weight_shape"
    if form.method == "float" and files.stored(packed) is None:
        outputs, inputs = _two(files.shape(f"{name}.weight"))
        return inputs, outputs
    if form.method == "float":
        files.check(shape, (2,), ("I64", "I32"))
        outputs, inputs = files.read(shape, (slice(None),)).tolist()
        return inputs, outputs
    first, second = _two(files.shape(f"{name}.qweight"))
    if form.method == "awq":
        return first, second * _WORD // 4
    words = _two(files.shape(f"{name}.qzeros"))[1]
    bits = 8 if words * 4 == second else 4
    return first * _WORD // bits, second


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The 4- or 8-bit numbers in int32 words, uint8, along an axis, low bits first."""
    moved = np.ascontiguousarray(np.moveaxis(words, axis, -1)).astype("<i4", copy=False)
    numbers = moved.view(np.uint8)
    if bits == 4:
        pairs = np.stack([numbers & 15, numbers >> 4], axis=-1)
        numbers = pairs.reshape(*numbers.shape[:-1], -1)
    return np.moveaxis(numbers, -1, axis)


def pack(numbers: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The inverse of `unpack`; zeros fill the last word."""
    moved: np.ndarray = np.moveaxis(numbers.astype(np.uint8), axis, -1)
    missing = -moved.shape[-1] % (_WORD // bits)
    moved = np.pad(moved, [*[(0, 0)] * (moved.ndim - 1), (0, missing)])
    if bits == 4:
        moved = moved[..., 0::2] | moved[..., 1::2] << 4
    words = np.ascontiguousarray(moved).view("<i4")
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def _of_words(name: str, packed: tuple[int, ...], axis: int, inputs: int, outputs: int) -> int:
    """Bits of packed numbers, 4 or 8, by the shape of packed inputs along an axis. Raises
    CheckpointError for other shapes."""
    shape = [inputs, outputs] if axis == 0 else [outputs, inputs]
    for bits in (4, 8):
        shape[axis] = -(-inputs * bits // _WORD)
        if list(packed) == shape:
            return bits
    raise CheckpointError(
        f"{name}: its quantised weights have shape {list(packed)}, which is neither 4 nor 8 bits "
        f"of {inputs} inputs by {outputs} outputs"
    )


def _group(name: str, scales: int, inputs: int) -> int:
    """Inputs of each group for this many groups; 0 if there is one group."""
    if scales < 1 or inputs % scales:
        raise CheckpointError(f"{name}: {scales} groups do not divide its {inputs} inputs")
    return inputs // scales if scales > 1 else 0


def _scale_dtype(files: TensorFiles, name: str) -> str:
    stored = files.dtype(name)
    if stored not in _SCALES:
        raise CheckpointError(f"tensor {name!r}: scales stored as {stored} are not supported")
    return _SCALES[stored]


def _scheme_of_words(
    form: Format, files: TensorFiles, name: str, inputs: int, outputs: int
) -> Scheme | None:
    """The scheme of a weight of GPTQ or AWQ."""
    if files.stored(f"{name}.qweight") is None:
        return None
    packed, scales = files.shape(f"{name}.qweight"), files.shape(f"{name}.scales")
    if len(scales) != 2:
        raise CheckpointError(f"tensor '{name}.scales' has shape {list(scales)}, not two axes")
    if form.method == "gptq":
        bits = _of_words(name, packed, 0, inputs, outputs)
        if inputs * bits % _WORD:
            raise CheckpointError(f"{name}: {inputs} inputs of {bits} bits do not fill words")
    elif packed == (inputs, outputs // 8):
        bits = 4
    else:
        raise CheckpointError(
            f"{name}: its quantised weights have shape {list(packed)}, not 4 bits of {inputs} "
            f"inputs by {outputs} outputs"
        )
    group = _group(name, scales[0], inputs)
    files.check(f"{name}.qweight", packed, ("I32",))
    files.check(f"{name}.scales", (inputs // (group or inputs), outputs), tuple(_SCALES))
    files.check(f"{name}.qzeros", (scales[0], outputs * bits // _WORD), ("I32",))
    if group % 8:
        raise CheckpointError(f"{name}: groups of {group} are not a multiple of 8")
    _refuse_order(files, f"{name}.g_idx", group or inputs, inputs)
    kind = "int4" if bits == 4 else "int8"
    return Scheme(kind, group, not form.symmetric, _scale_dtype(files, f"{name}.scales"))


def _refuse_order(files: TensorFiles, name: str, group: int, inputs: int) -> None:
    """Raises CheckpointError if groups of inputs are not contiguous."""
    if files.stored(name) is None:
        return
    files.check(name, (inputs,), ("I32",))
    if (files.read(name, (slice(None),)) != np.arange(inputs) // group).any():
        raise CheckpointError(
            f"tensor {name!r}: inputs ordered by activation (desc_act, actorder) are not "
            "supported; use a checkpoint that was quantised without"
        )


def _read_words(
    form: Format, files: TensorFiles, name: str, inputs: slice, outputs: slice, scheme: Scheme
) -> Numbers:
    bits, per_word = scheme.bits, _WORD // scheme.bits
    group = scheme.group or inputs.stop
    groups = slice(inputs.start // group, inputs.stop // group)
    words = slice(outputs.start // per_word, -(-outputs.stop // per_word))
    mine = slice(outputs.start - words.start * per_word, outputs.stop - words.start * per_word)
    zeros = unpack(files.read(f"{name}.qzeros", (groups, words)), bits, 1)
    if form.method == "gptq":
        rows = slice(inputs.start // per_word, inputs.stop // per_word)
        q = unpack(files.read(f"{name}.qweight", (rows, outputs)), bits, 0)
    else:
        q = _reordered(unpack(files.read(f"{name}.qweight", (inputs, words)), bits, 1))[:, mine]
        zeros = _reordered(zeros)
    zeros = (zeros[:, mine] + form.offset) & ((1 << bits) - 1)
    middle = 1 << (bits - 1)
    if form.symmetric and (zeros != middle).any():
        raise CheckpointError(f"tensor '{name}.qzeros': {_OTHER_ZEROS}")
    return Numbers(
        (q ^ middle).astype(np.uint8).view(np.int8) if bits == 8 else q.astype(np.int8) - 8,
        files.read(f"{name}.scales", (groups, outputs)),
        None if form.symmetric else (zeros.astype(np.int16) - middle).astype(np.int8),
    )


def _reordered(numbers: np.ndarray) -> np.ndarray:
    """AWQ's columns in their natural order."""
    words = numbers.reshape(len(numbers), -1, len(AWQ_ORDER))
    return words[..., AWQ_ORDER].reshape(numbers.shape)


_FLOAT = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point"),
    "weight_g_idx",
)
_STORED = {"I8": "int8", "F8_E4M3": "fp8"}


def _scheme_of_floats(
    form: Format, files: TensorFiles, name: str, inputs: int, outputs: int
) -> Scheme | None:
    """The scheme of a weight of compressed-tensors, or of plain fp8."""
    packed = files.stored(f"{name}.weight_packed") is not None
    whole = f"{name}.weight"
    if not packed and (files.stored(whole) is None or files.dtype(whole) not in _STORED):
        return None
    if packed:
        shape = files.shape(f"{name}.weight_packed")
        bits = _of_words(name, shape, 1, inputs, outputs)
        files.check(f"{name}.weight_packed", shape, ("I32",))
        kind = "int4" if bits == 4 else "int8"
    else:
        files.check(whole, (outputs, inputs), tuple(_STORED))
        kind, bits = _STORED[files.dtype(whole)], 8
    scale = _scale_name(files, name)
    if len(files.shape(scale)) > 2:
        raise CheckpointError(f"tensor {scale!r} has shape {list(files.shape(scale))}")
    rows, groups = _two(files.shape(scale))
    if form.block is not None:
        _check_blocks(scale, form.block, (rows, groups), (outputs, inputs))
    elif rows not in (1, outputs):
        raise CheckpointError(f"tensor {scale!r}: {rows} scales for {outputs} outputs")
    group = _group(name, groups, inputs)
    _refuse_order(files, f"{name}.weight_g_idx", group or inputs, inputs)
    _check_zero_point(
        form, files, f"{name}.weight_zero_point", bits if packed else 0, groups, outputs
    )
    return Scheme(kind, group, not form.symmetric, _scale_dtype(files, scale))


def _check_blocks(
    name: str, block: tuple[int, int], scales: tuple[int, int], size: tuple[int, int]
) -> None:
    """Raises CheckpointError unless there is a scale for every block. Only the last one of outputs
    may be smaller.

    Args:
        name: the scales' tensor.
        block: size of a block, outputs by inputs, as in the other two.
        scales: their shape.
        size: that of the weight.
    """
    wanted = tuple(-(-size // each) for size, each in zip(size, block, strict=True))
    if scales != wanted:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(scales)}, not {list(wanted)} for blocks of "
            f"{block[0]} x {block[1]}"
        )
    if wanted[1] > 1 and size[1] % block[1]:
        raise CheckpointError(
            f"tensor {name!r}: blocks of {block[1]} do not divide {size[1]} inputs"
        )


def _check_zero_point(
    form: Format, files: TensorFiles, name: str, bits: int, groups: int, outputs: int
) -> None:
    """Raises CheckpointError if required zero points are missing, or a symmetric weight has zero
    points outside the middle. bits: bits of packed weights, else 0."""
    there = files.stored(name) is not None
    shape = (-(-outputs * bits // _WORD) if bits else outputs, groups)
    if not form.symmetric:
        if not there:
            raise CheckpointError(
                f"{name.rpartition('.')[0]}: it is not symmetric, and has no weight_zero_point"
            )
        files.check(name, shape, ("I32" if bits else "I8",))
    elif there:
        zero, middle = files.read(name, (slice(None),) * len(files.shape(name))), 0
        if bits and zero.shape == shape and zero.dtype == np.int32:
            zero, middle = unpack(zero, bits, 0)[:outputs], 1 << (bits - 1)
        if (zero.astype(np.float32) != middle).any():
            raise CheckpointError(f"tensor {name!r}: {_OTHER_ZEROS}")


def _scale_name(files: TensorFiles, name: str) -> str:
    inverse = f"{name}.weight_scale_inv"
    return inverse if files.stored(inverse) is not None else f"{name}.weight_scale"


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    """A scale's shape as outputs by groups."""
    rows, groups = (*shape, 1, 1)[:2] if len(shape) < 2 else shape
    return rows, groups


def _read_floats(
    form: Format, files: TensorFiles, name: str, inputs: slice, outputs: slice, scheme: Scheme
) -> Numbers:
    group = scheme.group or inputs.stop
    groups = slice(inputs.start // group, inputs.stop // group)
    scale_name = _scale_name(files, name)
    scale = files.read(scale_name, (slice(None),) * len(files.shape(scale_name)))
    scale = scale.reshape(_two(scale.shape))
    packed = files.stored(f"{name}.weight_packed") is not None
    total = files.shape(f"{name}.weight_packed" if packed else f"{name}.weight")[0]
    if len(scale) not in (1, total):
        assert form.block is not None
        scale = np.repeat(scale, form.block[0], axis=0)[:total]
    scale = np.broadcast_to(scale, (total, scale.shape[1]))[outputs, groups]
    zero = None
    if not packed:
        q = files.read(f"{name}.weight", (outputs, inputs))
        if scheme.zero:
            zero = files.read(f"{name}.weight_zero_point", (outputs, groups))
        if q.dtype == ml_dtypes.float8_e4m3fn and np.isnan(q.astype(np.float32)).any():
            raise CheckpointError(f"tensor '{name}.weight' has NaN")
    else:
        bits = scheme.bits
        per_word, middle = _WORD // bits, 1 << (bits - 1)
        words = slice(inputs.start // per_word, -(-inputs.stop // per_word))
        q = unpack(files.read(f"{name}.weight_packed", (outputs, words)), bits, 1)
        q = _signed(
            q[:, inputs.start - words.start * per_word :][:, : inputs.stop - inputs.start], middle
        )
        if scheme.zero:
            words = slice(outputs.start // per_word, -(-outputs.stop // per_word))
            zero = unpack(files.read(f"{name}.weight_zero_point", (words, groups)), bits, 0)
            first = outputs.start - words.start * per_word
            zero = _signed(zero[first : first + outputs.stop - outputs.start], middle)
    return Numbers(q.T, scale.T, None if zero is None else zero.T)


def _signed(numbers: np.ndarray, middle: int) -> np.ndarray:
    return (numbers.astype(np.int16) - middle).astype(np.int8)


_KINDS: Mapping[str, tuple[Callable[..., Scheme | None], Callable[..., Numbers]]] = {
    "gptq": (_scheme_of_words, _read_words),
    "awq": (_scheme_of_words, _read_words),
    "float": (_scheme_of_floats, _read_floats),
}
