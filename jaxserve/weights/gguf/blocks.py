"""Tensors of GGUF files that are kept as they are stored: groups of 32 numbers of 8 or 4 bits, each
with a scale, and some with a minimum."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxserve.models.base import Family, Leaf, ModelConfig
from jaxserve.models.quantized import BLOCKS, TABLE, Quantization, Scheme
from jaxserve.weights.gguf.tensors import GGUFTensors
from jaxserve.weights.packed import Numbers

log = logging.getLogger(__name__)

_MIDDLE = 8


class Blocks:
    """Reads the weights of a GGUF file that are kept as stored; as `Format`, for `GGUFTensors`."""

    def tensors(self, files: GGUFTensors, name: str) -> list[str]:
        """See `Format`."""
        stored = files.stored(f"{name}.weight")
        return [] if stored is None else [stored]

    def scheme(self, files: GGUFTensors, name: str, inputs: int, outputs: int) -> Scheme | None:
        """See `Format`."""
        files.check(f"{name}.weight", (outputs, inputs))
        return _scheme(files, name)

    def read(
        self, files: GGUFTensors, name: str, inputs: slice, outputs: slice, scheme: Scheme
    ) -> Numbers:
        """See `Format`. A group that is all 0 has scale 0."""
        info = files.find(f"{name}.weight")
        assert info is not None, name
        stored = files.blocks(f"{name}.weight", outputs)
        size = info.type.block
        blocks = stored.reshape(len(stored), -1, info.type.block_bytes)
        first = inputs.start // size
        numbers = split(info.type.name, blocks[:, first : -(-inputs.stop // size)])
        mine = slice(inputs.start - first * size, inputs.stop - first * size)
        groups = slice(mine.start // scheme.group, mine.stop // scheme.group)
        minimum = None if numbers.minimum is None else numbers.minimum[groups]
        return Numbers(numbers.q[mine], numbers.scale[groups], minimum=minimum)


def find_blocks(path: Path, family: Family, config: ModelConfig) -> Quantization | None:
    """Which weights of a GGUF file are kept as they are stored, and how: those with types in
    `BLOCKS`. q, k and v of a layer are only kept if all three have the same type. None if no
    weights are kept."""
    leaves: list[Leaf] = jax.tree.leaves(family.leaves(config))
    schemes: dict[str, Scheme | None] = {}
    with GGUFTensors(path, config) as files:
        for leaf in leaves:
            placed = dataclasses.replace(leaf, source=files.source(leaf))
            if leaf.of_experts or leaf.source.rows:  # parts of a tensor are read wide
                schemes |= {leaf.name: None, placed.name: None}
            elif leaf.is_table or leaf.source.transpose:
                schemes[leaf.name] = _scheme(files, leaf.name)
    tables = [leaf.name for leaf in leaves if leaf.is_table]
    _unlike_to_wide(schemes)
    kept = Counter(
        stored for name, stored in schemes.items() if stored is not None and name not in tables
    )
    if not any(schemes.values()):
        return None
    scheme = kept.most_common(1)[0][0] if kept else next(filter(None, schemes.values()))
    table = schemes[tables[0]] or TABLE
    usual = {name: table if name in tables else scheme for name in schemes}
    return Quantization(
        scheme,
        table,
        wide=tuple(name for name, stored in schemes.items() if stored is None),
        others=tuple(
            (name, stored)
            for name, stored in schemes.items()
            if stored is not None and stored != usual[name]
        ),
        dequantizable=True,
    )


def _scheme(files: GGUFTensors, name: str) -> Scheme | None:
    info = files.find(f"{name}.weight")
    return None if info is None else BLOCKS.get(info.type.name)


def _unlike_to_wide(schemes: dict[str, Scheme | None]) -> None:
    """Makes q, k and v of a layer wide unless all three have the same type, since they become one
    weight."""
    apart = []
    for name in [name for name in schemes if name.endswith(".q_proj")]:
        three = [f"{name.removesuffix('q_proj')}{part}_proj" for part in "qkv"]
        if all(one in schemes for one in three) and len({schemes[one] for one in three}) > 1:
            apart.append(name.rpartition(".")[0])
            schemes.update(dict.fromkeys(three))
    if apart:
        log.info(
            "%s and %d more: q, k and v are of several types, and are made wide",
            apart[0],
            len(apart) - 1,
        )


def split(kind: str, blocks: np.ndarray) -> Numbers:
    """Splits blocks into numbers and scales.

    Args:
        kind: one of `BLOCKS`.
        blocks: uint8 [outputs, blocks, bytes of a block].

    Returns:
        The numbers, inputs by outputs, and the scales and minimums of their groups. Minimums are
        for numbers that start at -8; GGUF's start at 0.
    """
    q, scale, minimum = _KINDS[kind](blocks)
    rows = len(blocks)
    if minimum is not None:
        with np.errstate(invalid="ignore"):  # NaN and infinite values are refused later
            minimum = minimum.astype(np.float32) + _MIDDLE * scale.astype(np.float32)
        minimum = minimum.reshape(rows, -1).T
    return Numbers(q.reshape(rows, -1).T, scale.reshape(rows, -1).T, minimum=minimum)


def _floats(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _signed(packed: np.ndarray) -> np.ndarray:
    """int8 values of packed bytes: first the low halves of all bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).view(np.int8) - np.int8(_MIDDLE)


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[..., 2:].view(np.int8), _floats(blocks, 0), None


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _signed(blocks[..., 2:]), _floats(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _signed(blocks[..., 4:]), _floats(blocks, 0), _floats(blocks, 2)


def _q4_k(blocks: np.ndarray) -> _Parts:
    """Eight groups. Their scales and minimums are 6-bit multiples of two float16 values: four of
    each are in the low bits of eight bytes, the others in four more bytes and the remaining
    bits."""
    scales, minimums, both = (blocks[..., at : at + 4] for at in (4, 8, 12))
    sixes = [
        np.concatenate([first & 63, part | (first >> 6) << 4], axis=-1).astype(np.float32)
        for first, part in ((scales, both & 15), (minimums, both >> 4))
    ]
    scale, least = (
        _floats(blocks, at)[..., None].astype(np.float32) * six
        for at, six in zip((0, 2), sixes, strict=True)
    )
    packed = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return _signed(packed), scale, -least


_KINDS: Mapping[str, Callable[[np.ndarray], _Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
