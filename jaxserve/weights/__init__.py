"""Configs and parameters: Hugging Face directories, Orbax checkpoints, random weights."""

from jaxserve.weights.config import (
    checkpoint_dtype,
    load_config,
    load_preset,
    load_sampling_defaults,
)
from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.huge_pages import advise_huge_pages
from jaxserve.weights.load import fuse_loaded, load_params, transpose_loaded

__all__ = [
    "CheckpointError",
    "advise_huge_pages",
    "checkpoint_dtype",
    "fuse_loaded",
    "load_config",
    "load_params",
    "load_preset",
    "load_sampling_defaults",
    "transpose_loaded",
]
