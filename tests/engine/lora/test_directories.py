"""Adapters that cannot be used are refused in a line that names what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.models.lora import LoraSlots
from jaxserve.weights import CheckpointError, load_config
from jaxserve.weights.lora import MAX_CONFIG, LoadedAdapter, load_adapter
from tests.engine.lora import peft
from tests.engine.lora.peft import Tensors

SLOTS = LoraSlots(2, 8)
A = "base_model.model.model.decoder.layers.1.fc1.lora_A.weight"
B = A.replace("lora_A", "lora_B")
Spoil = Callable[[dict[str, Any], Tensors], Any]


def load(
    base: Path, folder: Path, *, root: Path | None = None, slots: LoraSlots = SLOTS
) -> LoadedAdapter:
    family, config, _ = load_config(str(base))
    return load_adapter(folder, family, config, slots, fused=True, dtype=np.float32, root=root)


def setting(**fields: Any) -> Spoil:
    return lambda config, tensors: config.update(fields)


def without(name: str) -> Spoil:
    return lambda config, tensors: tensors.pop(name)


def tensor(name: str, value: np.ndarray) -> Spoil:
    return lambda config, tensors: tensors.update({name: value})


def filled(name: str, value: float) -> Spoil:
    return lambda config, tensors: tensors[name].fill(value)


SPOILT: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "another kind": (setting(peft_type="IA3"), ("peft_type", "'IA3'")),
    "rank 0": (setting(r=0), ("r must", "0")),
    "rank true": (setting(r=True), ("r must", "True")),
    "rank too large": (setting(r=9), ("r 9", "lora.max_rank (8)")),
    "huge rank": (setting(r=10**400), ("lora.max_rank",)),
    "alpha 0": (setting(lora_alpha=0), ("lora_alpha", "0")),
    "alpha NaN": (setting(lora_alpha=float("nan")), ("lora_alpha", "nan")),
    "rslora of text": (setting(use_rslora="yes"), ("use_rslora", "'yes'")),
    "dora": (setting(use_dora=True), ("use_dora", "True")),
    "bias": (setting(bias="all"), ("bias", "'all'")),
    "modules to save": (setting(modules_to_save=["lm_head"]), ("modules_to_save", "lm_head")),
    "ranks by module": (setting(rank_pattern={"fc1": 2}), ("rank_pattern", "fc1")),
    "transposed": (setting(fan_in_fan_out=True), ("fan_in_fan_out",)),
    "a base of its own": (setting(init_lora_weights="pissa_niter_4"), ("init_lora_weights",)),
    "singular values": (setting(kasa_config={"beta": 1e-4}), ("kasa_config", "beta")),
    "unknown target": (setting(target_modules=["conv1"]), ("target_modules", "'conv1'")),
    "exclusion of no text": (setting(exclude_modules=[7]), ("exclude_modules", "7")),
    "excluded and there": (setting(exclude_modules=["fc1"]), ("exclude_modules", "layers.0.fc1")),
    "a missing half": (without(B), (B,)),
    "a missing layer": (
        lambda config, tensors: (
            [config.update(target_modules=["fc1"]), tensors.pop(A)] and [tensors.pop(B)]
        ),
        (A, "target_modules"),
    ),
    "NaN": (filled(B, np.nan), (B, "NaN")),
    "infinite": (filled(A, np.inf), (A, "infinite")),
    "infinite once scaled": (filled(B, 3e38), (B, "infinite")),
    "another base": (tensor(A, np.zeros((4, 33), np.float32)), (A, "[4, 32]", "[4, 33]")),
    "no matrix": (tensor(A, np.zeros((), np.float32)), (A, "[4, 32]", "[]")),
    "integers": (tensor(A, np.zeros((4, 32), np.int8)), (A, "I8")),
    "a deeper base": (
        tensor(A.replace("layers.1.", "layers.2."), np.zeros((4, 32), np.float32)),
        ("layers.2.fc1.lora_A", "not of a projection"),
    ),
    "embedding": (
        tensor("base_model.model.lm_head.lora_A.weight", np.zeros((4, 32), np.float32)),
        ("lm_head", "not of a projection"),
    ),
    "magnitudes": (
        tensor(A.replace("lora_A.weight", "lora_magnitude_vector"), np.zeros(64, np.float32)),
        ("lora_magnitude_vector", "not of a projection"),
    ),
    "twice": (
        tensor("base_model.model.decoder.layers.1.fc1.lora_A.weight", np.zeros((4, 32))),
        ("twice",),
    ),
    "no tensors": (lambda config, tensors: tensors.clear(), ("no tensors",)),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_spoilt(shapes: dict[str, Path], tmp_path: Path, spoilt: str) -> None:
    spoil, words = SPOILT[spoilt]
    family, config, _ = load_config(str(shapes["opt"]))
    given, tensors = peft.fields(4), peft.tensors(family, config, 4, 1)
    spoil(given, tensors)
    peft.save(tmp_path, given, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(shapes["opt"], tmp_path)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text and len(text) < 500


@pytest.mark.parametrize("excluded", [["layers.1.fc1", "conv9"], r".*1\.fc1"])
def test_excluded_modules_have_no_tensors(
    shapes: dict[str, Path], tmp_path: Path, excluded: list[str] | str
) -> None:
    family, config, _ = load_config(str(shapes["opt"]))
    given, tensors = peft.fields(4), peft.tensors(family, config, 4, 1)
    whole = peft.save(tmp_path / "whole", given, tensors)
    given |= {"target_modules": ["q_proj", "fc1"], "exclude_modules": excluded}
    kept = {
        name: value
        for name, value in tensors.items()
        if any(f".{part}." in name for part in ("q_proj", "fc1")) and "layers.1.fc1" not in name
    }
    found = load(shapes["opt"], peft.save(tmp_path / "part", given, kept))
    want = load(shapes["opt"], whole)
    np.testing.assert_array_equal(found.arrays[0]["up"].a, want.arrays[0]["up"].a)
    assert not found.arrays[1]["up"].a.any() and found.arrays[0]["up"].a.any()


def test_other_targets(shapes: dict[str, Path], tmp_path: Path) -> None:
    folder = peft.write(tmp_path / "one", shapes["opt"], targets=("q_proj", "fc1"))
    few = LoraSlots(2, 8, ("q_proj",))
    with pytest.raises(CheckpointError, match=r"fc1.* is not of lora.target_modules"):
        load(shapes["opt"], folder, slots=few)
    only = peft.write(tmp_path / "two", shapes["opt"], targets=("q_proj",))
    assert set(load(shapes["opt"], only, slots=few).arrays[0]) == {"attn"}


@pytest.fixture
def folder(shapes: dict[str, Path], tmp_path: Path) -> Path:
    return peft.write(tmp_path / "root" / "good", shapes["opt"])


def refusal(base: Path, folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(base, folder, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


def test_files(shapes: dict[str, Path], folder: Path) -> None:
    base, weights = shapes["opt"], folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "cannot read adapter_model.safetensors" in refusal(base, folder)
    weights.write_bytes(whole[:4])
    assert "cannot read adapter_model.safetensors" in refusal(base, folder)
    with weights.open("r+b") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert "are allowed" in refusal(base, folder)
    weights.unlink()
    assert "has no adapter_model.safetensors" in refusal(base, folder)
    os.mkfifo(weights)
    assert "adapter_model.safetensors" in refusal(base, folder)
    assert "no regular file" in refusal(base, folder)
    for text in ("[1]", "{", "[" * 100_000, "\ud800"):
        (folder / "adapter_config.json").write_text(text, errors="surrogatepass")
        assert "adapter_config.json" in refusal(base, folder)
    (folder / "adapter_config.json").write_text(" " * (MAX_CONFIG + 1))
    assert "are allowed" in refusal(base, folder)


@pytest.mark.parametrize("path", ["/nowhere", "a\0b", "\ud800", "x" * 1_000_000])
def test_paths(shapes: dict[str, Path], path: str) -> None:
    refusal(shapes["opt"], Path(path)).encode()


def test_root(shapes: dict[str, Path], tmp_path: Path, folder: Path) -> None:
    base, root = shapes["opt"], tmp_path / "root"
    outside = peft.write(tmp_path / "outside", base)
    assert load(base, folder, root=root).rank == 4
    (root / "within").symlink_to(folder)
    assert load(base, root / "within", root=root).rank == 4
    (root / "link").symlink_to(outside)
    linked = root / "linked"
    linked.mkdir()
    (linked / "adapter_config.json").write_text(json.dumps(peft.fields(4)))
    (linked / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (outside, root / ".." / "outside", root / "link", linked):
        assert "is not under lora.root" in refusal(base, path, root=root)
    (root / "round").symlink_to(root / "round")
    refusal(base, root / "round", root=root)
    assert "lora.root" not in refusal(base, root / "nowhere", root=root)


def test_digest(shapes: dict[str, Path], tmp_path: Path) -> None:
    """It is the same for the same adapter, and tells others apart, even by a number."""
    base = shapes["opt"]
    family, config, _ = load_config(str(base))
    found = peft.tensors(family, config, 4, 1)
    one = load(base, peft.save(tmp_path / "one", peft.fields(4), found)).digest
    assert one == load(base, peft.save(tmp_path / "two", peft.fields(4), found)).digest
    scaled = peft.save(tmp_path / "three", peft.fields(4, lora_alpha=9), found)
    assert one != load(base, scaled).digest
    found[B][3, 1] += 1e-3
    save_file(found, tmp_path / "two" / "adapter_model.safetensors")
    assert one != load(base, tmp_path / "two").digest
