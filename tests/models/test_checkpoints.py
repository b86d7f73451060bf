"""The loaders: what they accept, and the one-line errors for what they do not."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.commands import convert
from jaxserve.models.fused import param_bytes
from jaxserve.models.registry import get_family
from jaxserve.weights import (
    CheckpointError,
    checkpoint_dtype,
    load_config,
    load_params,
    load_preset,
    load_sampling_defaults,
)
from tests.models.fixtures import (
    assert_same,
    hf_config,
    hf_tensors,
    load,
    load_reference,
    refusal,
    write_checkpoint,
)


@pytest.fixture
def opt(tmp_path):
    write_checkpoint(tmp_path, hf_config("opt"))
    return tmp_path


def test_sharded_safetensors(tmp_path):
    hf, tensors = hf_config("llama3"), hf_tensors(hf_config("llama3"))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    weight_map = {}
    for part in range(3):
        chosen = {name: t for i, (name, t) in enumerate(tensors.items()) if i % 3 == part}
        file = f"model-{part + 1:05}-of-00003.safetensors"
        save_file(chosen, tmp_path / file)
        weight_map.update(dict.fromkeys(chosen, file))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same(load(tmp_path), load_reference("llama3").stored)

    (tmp_path / file).unlink()
    assert f"names {file}, which is not in" in refusal(tmp_path)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_dtypes(tmp_path, stored, dtype):
    tensors = {name: t.astype(stored) for name, t in hf_tensors(hf_config("opt")).items()}
    write_checkpoint(tmp_path, hf_config("opt"), tensors)
    want = jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf).astype(stored).astype(jnp.dtype(dtype))),
        load_reference("opt").stored,
    )
    assert_same(load(tmp_path, dtype), want)


@pytest.mark.parametrize("name", ["opt", "llama3"])
def test_names_without_the_prefix(tmp_path, name):
    tensors = {n.removeprefix("model."): t for n, t in hf_tensors(hf_config(name)).items()}
    assert any(n.startswith(("decoder.", "layers.")) for n in tensors)
    write_checkpoint(tmp_path, hf_config(name), tensors)
    assert_same(load(tmp_path), load_reference(name).stored)


def test_tensors_the_model_does_not_use_are_left(tmp_path):
    tensors = hf_tensors(hf_config("opt"))
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"]
    write_checkpoint(tmp_path, hf_config("opt"), tensors)
    assert_same(load(tmp_path), load_reference("opt").stored)


@pytest.mark.parametrize(
    ("name", "joined"), [("phi3", "qkv_proj.weight"), ("gpt_oss", "gate_up_proj")]
)
def test_joined_tensors_are_not_written_as_safetensors(tmp_path, name, joined):
    write_checkpoint(tmp_path, hf_config(name))
    with pytest.raises(CheckpointError, match=f"{joined} would have to be joined"):
        convert.convert(tmp_path, tmp_path / "out", into=convert.SAFETENSORS)


def test_a_path_may_begin_with_the_home_folder(opt, monkeypatch):
    """Shells leave it as it is behind `--model=`."""
    monkeypatch.setenv("HOME", str(opt.parent))
    assert_same(load(Path("~") / opt.name), load(opt))


def test_missing_paths(tmp_path):
    assert "no such checkpoint directory" in refusal(tmp_path / "nowhere")
    assert "config.json is missing" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: it is not valid JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config("opt")))
    assert "no *.safetensors files" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    assert refusal(tmp_path).startswith(f"cannot read {tmp_path / 'model.safetensors'}")


def test_load_params_arguments(opt):
    family, config, _ = load_config(opt)
    with pytest.raises(CheckpointError, match=r"load_format 'pickle' is not known"):
        load_params(opt, family, config, dtype="float32", load_format="pickle")
    with pytest.raises(CheckpointError, match=r"model\.path is needed"):
        load_params("", family, config, dtype="float32")
    with pytest.raises(CheckpointError, match="no Orbax checkpoint in"):
        load_params(opt, family, config, dtype="float32", load_format="orbax")


def test_end_of_sequence_ids_of_both_files(opt):
    (opt / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    _, config, hf = load_config(opt)
    assert config.eos_token_ids == (2, 7, 9)
    assert hf["eos_token_id"] == [2, 7, 9]


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config": {"eos_token": "<e>", "added_tokens_decoder": {"5": "<e>"}}}, (5,)),
        ({"tokenizer_config": {"eos_token": {"content": "<e>"}}, "added_tokens": {"<e>": 6}}, (6,)),
        ({"special_tokens_map": {"eos_token": "<e>"}, "added_tokens": {"<e>": 6}}, (6,)),
        (
            {
                "tokenizer_config": {"eos_token": "<e>"},
                "tokenizer": {"added_tokens": [{"id": 9, "content": "<e>"}]},
            },
            (9,),
        ),
        (
            {
                "tokenizer_config": {"eos_token": "<e>"},
                "tokenizer": {"model": {"vocab": {"a": 0, "<e>": 3}}},
            },
            (3,),
        ),
        (
            {
                "tokenizer_config": {"eos_token": "<e>"},
                "tokenizer": {"model": {"vocab": [["a", 0.0], ["<e>", -1.0]]}},
            },
            (1,),
        ),
        ({"tokenizer_config": {"eos_token": "<e>"}, "tokenizer": {"model": {"vocab": {}}}}, ()),
        ({"tokenizer_config": {"eos_token": None}}, ()),
        ({"tokenizer_config": [], "tokenizer": []}, ()),
    ],
)
def test_the_end_that_the_tokenizer_names(opt, files, end):
    for name, content in files.items():
        (opt / f"{name}.json").write_text(json.dumps(content))
    _, config, hf = load_config(opt)
    assert config.eos_token_ids == (2, *end)
    assert hf["eos_token_id"] == [2, *end]


@pytest.mark.parametrize("given", [-1, 1 << 40])
def test_an_end_that_is_no_token_leaves_that_of_the_tokenizer(opt, caplog, given):
    (opt / "config.json").write_text(json.dumps({**hf_config("opt"), "eos_token_id": given}))
    assert load_config(opt)[1].eos_token_ids == ()
    assert f"eos_token_id {given} is outside of the vocabulary" in caplog.text
    assert "and there is no other: answers end at max_tokens" in caplog.text
    (opt / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<e>"}))
    (opt / "added_tokens.json").write_text(json.dumps({"<e>": 5}))
    assert load_config(opt)[1].eos_token_ids == (5,)


def test_sampling_that_a_checkpoint_gives(opt):
    assert load_sampling_defaults(opt) == {}
    given = {"do_sample": False, "temperature": 0.6, "top_p": 0.95, "top_k": -1, "min_p": 0,
             "repetition_penalty": 1.05, "max_new_tokens": 7, "eos_token_id": 2}  # fmt: skip
    (opt / "generation_config.json").write_text(json.dumps(given))
    assert load_sampling_defaults(opt) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0,
        "repetition_penalty": 1.05,
    }
    (opt / "generation_config.json").write_text('{"temperature": null, "do_sample": true}')
    assert load_sampling_defaults(opt) == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"),
        ({"temperature": -1}, "temperature: must be at least 0 and at most 100, got -1"),
        ({"temperature": float("nan")}, "temperature: must be at least 0"),
        ({"top_p": 1.5}, "top_p: must be at least 0 and at most 1, got 1.5"),
        ({"top_k": 0.5}, "top_k: must be a number, got 0.5"),
        ({"min_p": True}, "min_p: must be a number, got True"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be at least"),
    ],
)
def test_sampling_that_is_none(opt, given, says):
    (opt / "generation_config.json").write_text(json.dumps(given))
    with pytest.raises(CheckpointError) as caught:
        load_sampling_defaults(opt)
    assert f"generation_config.json: {says}" in str(caught.value)
    assert str(caught.value).endswith("; model.generation_config=none leaves it out")


def test_checkpoint_dtype():
    assert checkpoint_dtype({}) is None
    assert checkpoint_dtype({"torch_dtype": "float16"}) == jnp.float16
    assert checkpoint_dtype({"dtype": "bfloat16", "torch_dtype": "float16"}) == jnp.bfloat16
    with pytest.raises(CheckpointError, match="int8"):
        checkpoint_dtype({"dtype": "int8"})


def test_random_params():
    family, config, _ = load_preset("opt-125m")
    config = family.config_from_hf({**hf_config("opt"), "vocab_size": 4001})
    first, again, other = (
        load_params(None, family, config, dtype="float32", load_format="random", seed=seed)
        for seed in (0, 0, 1)
    )
    assert_same(first, again)
    assert np.abs(np.asarray(first.embed_tokens - other.embed_tokens)).max() > 0
    assert np.std(np.asarray(first.embed_tokens)) == pytest.approx(0.02, rel=0.02)
    projections = [p.kernel for layer in first.layers for p in (layer.attn.q, layer.attn.k)]
    assert len({np.asarray(kernel).tobytes() for kernel in projections}) == 2 * config.num_layers
    np.testing.assert_array_equal(first.layers[0].mlp_norm.scale, 1.0)
    np.testing.assert_array_equal(first.layers[0].up.bias, 0.0)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    assert nbytes == param_bytes(config, "float32") == 4 * family.num_params(config)


@pytest.mark.parametrize("name", ["opt", "phi3"])
def test_convert_and_restore(tmp_path, name, capsys):
    source, target = tmp_path / "hf", tmp_path / "orbax"
    source.mkdir()
    write_checkpoint(source, {**hf_config(name), "torch_dtype": "bfloat16"})
    (source / "tokenizer.json").write_text("{}")
    assert convert.main([str(source), str(target), "--dtype=float32"]) == 0
    assert str(target) in capsys.readouterr().out
    assert (target / "tokenizer.json").read_text() == "{}"
    family, config, hf = load_config(target)
    assert hf["dtype"] == "float32"
    assert config == load_config(source)[1]
    assert_same(load(target), load_reference(name).stored)
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), load_reference(name).stored)
    assert_same(load(target, "bfloat16", load_format="orbax"), half)

    # A second run does not overwrite, and another model's config is refused.
    assert convert.main([str(source), str(target)]) == 2
    assert "not an empty directory" in capsys.readouterr().err
    wider = {**hf_config(name), "vocab_size": 62}
    with pytest.raises(CheckpointError, match=r"'embed_tokens': expected shape \[62, 32\]"):
        load_params(target, family, family.config_from_hf(wider), dtype="float32")
    deeper = {**hf_config("llama3"), "num_hidden_layers": 1}
    llama = get_family("llama")
    with pytest.raises(CheckpointError, match="parameter"):
        load_params(target, llama, llama.config_from_hf(deeper), dtype="float32")


def test_convert_keeps_the_checkpoint_dtype(tmp_path):
    (tmp_path / "hf").mkdir()
    write_checkpoint(tmp_path / "hf", {**hf_config("opt"), "torch_dtype": "bfloat16"})
    convert.convert(tmp_path / "hf", tmp_path / "orbax")
    assert checkpoint_dtype(load_config(tmp_path / "orbax")[2]) == jnp.bfloat16


def test_convert_reports_a_bad_source(tmp_path, capsys):
    assert convert.main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "no such checkpoint directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
