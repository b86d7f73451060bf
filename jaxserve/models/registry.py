"""The known model families, by name and by a checkpoint's `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.base import Family
from jaxserve.models.families import deepseek, gemma, gpt_oss, llama, opt, qwen3_next
from jaxserve.models.hf import shown

FAMILIES: tuple[Family, ...] = (
    opt.FAMILY,
    llama.FAMILY,
    gemma.FAMILY,
    gpt_oss.FAMILY,
    deepseek.FAMILY,
    qwen3_next.FAMILY,
)

MODEL_TYPES = tuple(sorted(known_type for family in FAMILIES for known_type in family.model_types))


def get_family(name: str) -> Family:
    """The family called `name`. Raises ValueError, which lists the known ones."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(
        f"unknown model family {name!r} (known: {', '.join(f.name for f in FAMILIES)})"
    )


def family_for(hf: Mapping[str, Any]) -> Family:
    """The family that runs a Hugging Face config.json.

    Raises:
        ValueError: If `model_type` is missing or not one of the known ones.
    """
    model_type = hf.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(MODEL_TYPES)
    if model_type is None:
        raise ValueError(f"config.json: model_type is missing (known: {known})")
    raise ValueError(
        f"config.json: model_type {shown(model_type)} is not supported (known: {known})"
    )
