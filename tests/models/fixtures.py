"""The reference cases of tests/reference as models, and small checkpoints on disk."""

from __future__ import annotations

import functools
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.models.base import Family, HFTensor, ModelConfig, Params, ParamSpec
from jaxserve.models.fused import fuse
from jaxserve.models.registry import family_for
from jaxserve.weights import CheckpointError, load_config, load_params

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "tests" / "reference"
NAMES = sorted(path.stem for path in REFERENCE.glob("*.npz"))


class Reference(NamedTuple):
    """A small model with what transformers computes: tokens int32 [S, T], logits [S, T, V]. stored:
    the parameters as a checkpoint has them; params: with q, k and v fused."""

    family: Family
    config: ModelConfig
    stored: Params
    params: Params
    tokens: np.ndarray
    logits: np.ndarray


def hf_config(name: str) -> dict[str, Any]:
    """The config.json of a reference case, as a new dict."""
    return json.loads((REFERENCE / f"{name}.json").read_text())["config"]


def saved_config(name: str) -> dict[str, Any]:
    """The same as transformers saves it."""
    return json.loads((REFERENCE / f"{name}.json").read_text())["saved"]


@functools.cache
def load_reference(name: str) -> Reference:
    """The case `name`, float32, its weights read through the safetensors loader."""
    hf = hf_config(name)
    family = family_for(hf)
    found = np.load(REFERENCE / f"{name}.npz")
    config = family.config_from_hf(hf).for_length(found["tokens"].shape[1])
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), hf)
        stored = load_params(folder, family, config, dtype="float32")
        jax.block_until_ready(stored)
    params = fuse(stored, config)
    return Reference(family, config, stored, params, found["tokens"], found["logits"])


def hf_tensors(hf: dict[str, Any]) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by Hugging Face name, in the layout of the file."""
    family = family_for(hf)
    config = family.config_from_hf(hf)
    specs: list[ParamSpec] = jax.tree.leaves(family.param_specs(config))
    sources: list[HFTensor] = jax.tree.leaves(family.hf_layout(config))
    values = _reference_tensor()
    tensors = {}
    for spec, source in zip(specs, sources, strict=True):
        for name in source.names:
            tensors[name] = values(name, source.stored_shape(spec.shape))
    return tensors


def write_checkpoint(
    folder: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray] | None = None
) -> None:
    """Writes config.json and one model.safetensors (by default the reference weights)."""
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(hf_tensors(hf) if tensors is None else tensors, folder / "model.safetensors")


def load(path: Path, dtype: str = "float32", **options: Any) -> Params:
    """The parameters of a checkpoint, by its own config."""
    family, config, _ = load_config(path)
    return load_params(path, family, config, dtype=dtype, **options)


def refusal(path: Path) -> str:
    """Why a checkpoint cannot be loaded, in one line."""
    with pytest.raises(CheckpointError) as caught:
        load(path)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600
    return said


def assert_same(found: Params, wanted: Params) -> None:
    """Whether both have the same arrays, of the same dtypes."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@functools.cache
def _reference_tensor() -> Callable[[str, tuple[int, ...]], np.ndarray]:
    path = ROOT / "tools" / "reference" / "weights.py"
    spec = importlib.util.spec_from_file_location("reference_weights", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tensor
