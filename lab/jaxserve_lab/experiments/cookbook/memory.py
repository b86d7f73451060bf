"""What a model takes of memory, by its shape."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import Config
from jaxserve.engine.startup.choices.model_options import load_shape
from jaxserve.models.fused import param_bytes

WIDE = "bfloat16"
QUANTIZATIONS = ("", "int8", "int4:group=32")  # as the pages' columns
_GIB, _KIB = 2**30, 2**10


@dataclass(frozen=True)
class Memory:
    """What a preset takes.

    Attributes:
        weights: GiB, by `QUANTIZATIONS`; the first in bfloat16.
        token: KiB of K and V of a token, bfloat16.
        longest: Tokens of the longest context.
    """

    weights: tuple[float, ...]
    token: float
    longest: int


def memory(preset: str) -> Memory:
    """Of a preset of `jaxserve.models.presets`."""
    configs = []
    for quantization in QUANTIZATIONS:
        served = Config().with_fields(
            model__preset=preset, model__load_format="random", model__quantization=quantization
        )
        configs.append(load_shape(served.model)[1])
    wide = configs[0]
    layers = sum(not kind.state for kind in wide.layer_kinds)
    numbers = 2 * layers * wide.num_kv_heads * wide.head_dim
    return Memory(
        weights=tuple(param_bytes(config, WIDE) / _GIB for config in configs),
        token=2 * numbers / _KIB,
        longest=wide.max_position,
    )
