"""Adapters as PEFT saves them, and what they make of their base."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxserve.models.base import Family, Leaf, ModelConfig, Params, StepInputs
from jaxserve.models.dense import causal_attend, sequence_logits
from jaxserve.models.forward import forward
from jaxserve.models.lora import projections
from jaxserve.weights import load_config
from jaxserve.weights.random_init import random_params

Tensors = dict[str, np.ndarray]
PREFIX = "base_model.model."


def fields(rank: int, **more: Any) -> dict[str, Any]:
    """adapter_config.json."""
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **more}


def tensors(
    family: Family, config: ModelConfig, rank: int, seed: int, targets: Sequence[str] = ()
) -> Tensors:
    """Random A and B, large enough that texts differ."""
    rng, found = np.random.default_rng(seed), Tensors()
    for one in projections(family, config, fused=False):
        leaf = one.leaf
        if f"{PREFIX}{leaf.name}.lora_A.weight" in found or (targets and one.target not in targets):
            continue
        out, inputs = leaf.source.stored_shape(leaf.spec.shape)
        a, b = rng.normal(size=(rank, inputs)), rng.normal(size=(out, rank))
        found[f"{PREFIX}{leaf.name}.lora_A.weight"] = (a * inputs**-0.5).astype(np.float32)
        found[f"{PREFIX}{leaf.name}.lora_B.weight"] = (b * 0.15).astype(np.float32)
    return found


def save(folder: Path, config: dict[str, Any], found: Tensors) -> Path:
    """Both files. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(found, folder / "adapter_model.safetensors")
    return folder


def write(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    seed: int = 1,
    targets: Sequence[str] = (),
    **more: Any,
) -> Path:
    """A random adapter for the model of this shape."""
    family, config, _ = load_config(str(base))
    return save(folder, fields(rank, **more), tensors(family, config, rank, seed, targets))


def merged_texts(
    base: Path, adapter: Path | None, asked: Sequence[Sequence[int]], count: int, *, seed: int = 0
) -> list[list[int]]:
    """What the random base of this seed, float32, says greedily with the adapter's product added to
    its weights: `count` tokens to each prompt, by the dense model."""
    family, config, params = _merged_model(base, adapter, seed)
    logits = jax.jit(lambda tokens: sequence_logits(family, params, config, tokens))
    return [_greedy(logits, prompt, count, config.max_position) for prompt in asked]


def merged_hidden(base: Path, adapter: Path | None, asked: Sequence[int]) -> np.ndarray:
    """[T, d_model] of a prompt, behind the last norm, of the same model."""
    family, config, params = _merged_model(base, adapter)
    tokens = np.array(asked, np.int32)
    inputs = StepInputs(tokens, np.arange(len(tokens)), np.zeros_like(tokens))
    _, states = forward(family, params, config, inputs, causal_attend(config), ())
    return np.asarray(family.finish(params, config, states, mesh=None))


def _merged_model(base: Path, adapter: Path | None, seed: int = 0) -> tuple[Family, Any, Params]:
    family, config, _ = load_config(str(base))
    params = random_params(family, config, dtype=np.dtype(np.float32), mesh=None, seed=seed)
    if adapter is not None:
        params = jax.tree.map(_merging(adapter), family.leaves(config), params)
    return family, config, params


def _merging(adapter: Path) -> Callable[[Leaf, Any], Any]:
    said = json.loads((adapter / "adapter_config.json").read_text())
    root = said["r"] ** 0.5 if said.get("use_rslora") else said["r"]
    found = load_file(adapter / "adapter_model.safetensors")

    def merged(leaf: Leaf, weight: Any) -> Any:
        a = found.get(f"{PREFIX}{leaf.name}.lora_A.weight")
        if a is None or not leaf.source.transpose or leaf.source.name.endswith("bias"):
            return weight
        b = found[f"{PREFIX}{leaf.name}.lora_B.weight"]
        return weight + (said["lora_alpha"] / root * (b @ a)).T

    return merged


def _greedy(logits: Any, prompt: Sequence[int], count: int, longest: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros(longest, np.int32)
        padded[: len(tokens)] = tokens
        tokens.append(int(logits(padded)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]
