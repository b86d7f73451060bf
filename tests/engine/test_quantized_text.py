"""Quantised models say what their own weights say that have been made wide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer, models

from jaxserve.config import Config, ConfigError
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.startup.choices.model_options import load_shape
from jaxserve.models.base import with_quantization
from jaxserve.weights import load_config, load_params
from jaxserve.weights.export import save_safetensors
from tests.engine.harness import SAMPLING, SCARCE, engine, generate, prompts, write_shape
from tests.models.quantized.test_gguf_blocks import TIED, written
from tests.models.quantized.test_quantized import widened


def write_wide(folder: Path, shape: Path, how: str) -> Path:
    """A checkpoint of what random quantised weights of a shape stand for."""
    family, plain, hf = load_config(shape)
    config = with_quantization(family, plain, how)
    params = load_params(None, family, config, dtype="float32", load_format="random")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_safetensors(folder, widened(params, family.leaves(config)), family, plain, "float32")
    return folder


@pytest.mark.parametrize(
    ("family", "how"),
    [("opt", "int4:group=32,zero"), pytest.param("moe", "int8", marks=pytest.mark.slow)],
)
def test_text_is_that_of_its_wide_weights(tmp_path: Path, family: str, how: str) -> None:
    shape = write_shape(tmp_path, family)
    wide = write_wide(tmp_path / "wide", shape, how)
    given = {"model__dtype": "float32"}
    with engine(wide, model__load_format="safetensors", **given) as running:
        want = generate(running, prompts(), **SAMPLING)
    assert len({tuple(text) for text in want}) > 8
    with engine(shape, model__quantization=how, **given) as running:
        assert generate(running, prompts(), **SAMPLING) == want


@pytest.mark.slow
def test_text_of_kept_blocks_is_that_of_wide_ones(tmp_path: Path) -> None:
    kinds = {"ffn_up": Type.Q8_0, "blk": Type.Q4_1, "token_embd": Type.Q8_0}
    path = written(tmp_path / "m.gguf", kinds, TIED)
    asked = [[token % 61 for token in prompt] for prompt in prompts(12)]
    given = {"model__load_format": "auto", "model__dtype": "float32", **SCARCE}
    with engine(path, model__quantization="none", **given) as running:
        want = generate(running, asked, **SAMPLING)
    assert len({tuple(text) for text in want}) > 6
    with engine(path, **given) as running:
        assert running.info().dtype == "float32, weights int4"
        assert generate(running, asked, **SAMPLING) == want


def chosen(shape: Path, **fields: Any) -> Any:
    given = {"model__path": str(shape), "model__load_format": "random", "cache__num_blocks": 64}
    return choose(Config().with_fields(**given, **fields))


def test_hidden_caches_are_refused_by_name(tmp_path: Path) -> None:
    shape = write_shape(tmp_path, "opt")
    fields = {"scheduler__policy": "aptserve", "model__quantization": "int8"}
    assert chosen(shape, **fields).kernels.model.hidden_read is None
    with pytest.raises(ConfigError, match="hidden_read=absorbed: its weights are quantised"):
        chosen(shape, **fields, cache__hidden_read="absorbed")


def test_experts_of_few_bits_are_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"model__path": str(write_shape(tmp_path, "moe")), "model__quantization": "int8"}
    served = Config().with_fields(**fields).model
    assert load_shape(served)[1].quantization is not None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match=r"model\.quantization=int8: only CPUs have kernels"):
        load_shape(served)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("int3", "model.quantization: must be int8, int4 or fp8"),
        ("int4:group=64", r"model\.quantization: .*q_proj: groups of 64 do not divide 32 inputs"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, how: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen(write_shape(tmp_path, "opt"), model__quantization=how)
