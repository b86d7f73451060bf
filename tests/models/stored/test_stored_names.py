"""Weights load from whatever tensors a checkpoint has them in: heads that should be tied, models of
images, experts together, several files."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.commands.convert import convert
from jaxserve.weights import load_config
from jaxserve.weights.tensors import INDEX
from tests.models.fixtures import (
    assert_same,
    hf_config,
    hf_tensors,
    load,
    load_reference,
    refusal,
    write_checkpoint,
)

HEAD = "lm_head.weight"


def untied(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """A case with its own head, and the name of its other table."""
    hf = hf_config(name) | {"tie_word_embeddings": False}
    tensors = hf_tensors(hf)
    (table,) = (one for one in tensors if one.endswith("embed_tokens.weight"))
    return hf, tensors, table


@pytest.mark.promise(43)
@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("llama2", False),
        ("gemma2", True),
        ("opt", True),
        ("opt_post_norm", False),
        ("gpt_oss", True),
    ],
)
def test_a_head_that_is_another_table_is_used(
    name: str, prefix: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf, tensors, table = untied(name)
    write_checkpoint(tmp_path, hf, tensors)
    whole = load(tmp_path)
    stored = tensors if prefix else {key.removeprefix("model."): v for key, v in tensors.items()}
    write_checkpoint(tmp_path, {**hf, "tie_word_embeddings": True}, stored)
    with caplog.at_level(logging.WARNING):
        assert not load_config(tmp_path)[1].tied
    assert "has another one, lm_head.weight, which is used" in caplog.text
    assert_same(load(tmp_path), whole)
    # As transformers ties them: where they are equal, and where one of the two is stored.
    write_checkpoint(
        tmp_path, {**hf, "tie_word_embeddings": True}, {**tensors, HEAD: tensors[table]}
    )
    tied = load(tmp_path)
    assert tied.lm_head is None
    np.testing.assert_array_equal(tied.embed_tokens, whole.embed_tokens)
    del tensors[table]
    write_checkpoint(tmp_path, {**hf, "tie_word_embeddings": True}, tensors)
    alone = load(tmp_path)
    assert alone.lm_head is None
    np.testing.assert_array_equal(alone.embed_tokens, whole.lm_head)


def test_a_head_of_another_shape_or_type_is_no_copy(tmp_path: Path) -> None:
    hf, tensors, table = untied("llama2")
    hf["tie_word_embeddings"] = True
    write_checkpoint(tmp_path, hf, {**tensors, HEAD: tensors[table].astype(np.float16)})
    assert not load_config(tmp_path)[1].tied
    write_checkpoint(tmp_path, hf, {**tensors, HEAD: tensors[table][:-1]})
    assert "lm_head.weight': expected shape" in refusal(tmp_path)


def test_a_head_in_orbax_is_used(tmp_path: Path) -> None:
    hf, tensors, _ = untied("llama2")
    source, target = tmp_path / "hf", tmp_path / "orbax"
    source.mkdir()
    write_checkpoint(source, hf, tensors)
    convert(source, target, dtype="float32")
    config = json.loads((target / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert_same(load(target), load(source))


@pytest.mark.parametrize(
    ("layout", "outer", "name"),
    [
        ("language_model.{}", "gemma3", "gemma3"),
        ("model.language_model.{short}", "mistral3", "mistral"),
    ],
)
def test_models_of_images_serve_texts(
    layout: str, outer: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = hf_config(name)
    tensors = {
        key if key == HEAD and "short" in layout else layout.format(
            key, short=key.removeprefix("model.")
        ): value
        for key, value in hf_tensors(text).items()
    }  # fmt: skip
    vision = {
        "vision_tower.encoder.layers.26.mlp.weight": np.ones((2, 2), np.float32),
        "model.vision_tower.experts.9.weight_scale": np.ones(2, np.float32),
        "multi_modal_projector.bias": np.ones(2, np.float32),
    }
    del text["model_type"]  # as in the first of these configs
    tie = text.pop("tie_word_embeddings", name == "gemma3")
    hf = {"model_type": outer, "text_config": text, "tie_word_embeddings": tie}
    write_checkpoint(tmp_path, hf, tensors | vision)
    with caplog.at_level(logging.WARNING):
        assert_same(load(tmp_path), load_reference(name).stored)
    assert f"of this '{outer}' only texts are served; images are refused" in caplog.text
    assert "nothing uses" not in caplog.text


def test_a_text_config_that_is_not_served_is_named(tmp_path: Path) -> None:
    hf = {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}
    write_checkpoint(tmp_path, hf, {})
    assert "model_type 'ministral3' is not supported" in refusal(tmp_path)


EXPERT = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate", "w3": "up", "w2": "down",
         "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}  # fmt: skip


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers 5 has a layer's experts."""
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, value in tensors.items():
        expert = EXPERT.fullmatch(name)
        if expert is None:
            found[name.replace("block_sparse_moe", "mlp")] = value
        else:
            parts = stacks.setdefault(expert[1], {"gate": [], "up": [], "down": []})
            parts[PARTS[expert[3]]].append(value)
            assert len(parts[PARTS[expert[3]]]) == int(expert[2]) + 1
    for layer, parts in stacks.items():
        gate, up, down = (np.stack(parts[part]) for part in ("gate", "up", "down"))
        found[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        found[f"{layer}.mlp.experts.down_proj"] = down
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_that_are_stored_together(name: str, tmp_path: Path) -> None:
    hf = hf_config(name)
    tensors = fused(hf_tensors(hf))
    assert any(key.endswith("experts.gate_up_proj") for key in tensors)
    write_checkpoint(tmp_path, hf, tensors)
    assert_same(load(tmp_path), load_reference(name).stored)


def test_experts_that_are_stored_together_and_are_too_many(tmp_path: Path) -> None:
    hf = hf_config("mixtral")
    tensors = fused(hf_tensors(hf))
    fewer = hf["num_local_experts"] - 1
    write_checkpoint(tmp_path, {**hf, "num_local_experts": fewer}, tensors)
    assert "gate.weight': expected shape [7, " in refusal(tmp_path)


def test_of_several_files_one_counts_or_all_are_needed(tmp_path: Path) -> None:
    hf = hf_config("llama2")
    tensors, expected = hf_tensors(hf), load_reference("llama2").stored
    other = {key: value + 1 for key, value in tensors.items()}
    write_checkpoint(tmp_path, hf, tensors)
    save_file(other, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "z.safetensors")
    assert_same(load(tmp_path), expected)  # model.safetensors, as transformers has it
    whose = dict.fromkeys(tensors, "z.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": whose}))
    assert_same(load(tmp_path), expected)
    (tmp_path / "model.safetensors").rename(tmp_path / "m.safetensors")
    first = next(iter(tensors))
    whose = dict.fromkeys(tensors, "m.safetensors") | {first: "z.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": whose}))
    mixed = load(tmp_path)
    changed = [not np.array_equal(a, b) for a, b in
               zip(jax.tree.leaves(mixed), jax.tree.leaves(expected), strict=True)]  # fmt: skip
    assert sum(changed) == 1
    (tmp_path / INDEX).unlink()
    said = refusal(tmp_path)
    assert "m.safetensors" in said and "a.safetensors" in said and "the tensor " in said
    half = len(tensors) // 2
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    save_file(dict(list(tensors.items())[:half]), tmp_path / "a.safetensors")
    save_file(dict(list(tensors.items())[half:]), tmp_path / "b.safetensors")
    assert_same(load(tmp_path), expected)
