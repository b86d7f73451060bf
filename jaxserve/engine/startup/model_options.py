"""What is decided about the model before anything is loaded: its shape, dtype, tokenizer and the
longest request."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import ConfigError, ServedModelConfig
from jaxserve.engine.startup.cpu_bfloat16 import has_instructions
from jaxserve.engine.text.detokenizer import FILE_NAME
from jaxserve.models.base import Family, ModelConfig
from jaxserve.weights import checkpoint_dtype, load_config, load_preset


def load_shape(served: ServedModelConfig) -> tuple[Family, ModelConfig, dict[str, Any]]:
    """The family, the model's shape and its Hugging Face config: of the checkpoint, or for random
    weights of a preset. Raises ConfigError where neither is named, CheckpointError where it cannot
    be read."""
    if served.path:
        return load_config(served.path)
    if served.load_format != "random":
        raise ConfigError(
            "model.path is empty: give a checkpoint directory, or model.preset with "
            "model.load_format=random"
        )
    if not served.preset:
        raise ConfigError("model.preset is empty: random weights need a shape, such as opt-125m")
    return load_preset(served.preset)


def tokenizer_path(served: ServedModelConfig) -> str | None:
    """The directory to load a tokenizer from. None for random weights that have none: they write
    noise anyway."""
    path = os.path.expanduser(served.path)
    optional = served.load_format == "random"
    return None if optional and not os.path.isfile(os.path.join(path, FILE_NAME)) else path


def choose_dtype(name: str, hf: dict[str, Any], *, hidden: bool = False) -> jnp.dtype:
    """The dtype of parameters. name: as `model.dtype` gives it; hf: the checkpoint's config;
    hidden: there are hidden caches.

    auto: the checkpoint's own, but on TPUs, which do not compute in float16, bfloat16 for that. On
    CPUs bfloat16 if the checkpoint says that it is, so that nothing of it is lost, the processor
    has instructions for it, and no hidden caches are to be read, whose parts of the weights would
    be converted at every call; else float32.
    """
    if name == "auto":
        stored = checkpoint_dtype(hf)
        if jax.default_backend() == "cpu":
            narrow = stored == jnp.bfloat16 and not hidden and has_instructions()
            return jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)
        stored = stored or jnp.dtype(jnp.bfloat16)
        on_tpu = jax.default_backend() == "tpu"
        return jnp.dtype(jnp.bfloat16) if on_tpu and stored == jnp.float16 else stored
    return jnp.dtype(name)


def choose_max_len(wanted: int, model: ModelConfig) -> int:
    """The most tokens of a request, prompt and output, from `engine.max_model_len`: 0 stands for
    all positions of the model. Raises ConfigError beyond them."""
    if wanted != 0 and not 2 <= wanted <= model.max_position:
        raise ConfigError(
            f"engine.max_model_len must be 2 to the model's {model.max_position} positions (0 for "
            f"all of them), got {wanted}"
        )
    return wanted or model.max_position
