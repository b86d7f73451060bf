"""Reading config.json: presets, unsupported fields by name, rope lengths, windows."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxserve.models.presets import preset, preset_names
from jaxserve.models.registry import family_for, get_family
from jaxserve.models.rope import Rope, inverse_frequencies
from tests.models.fixtures import hf_config


def parse(hf):
    return family_for(hf).config_from_hf(hf)


@pytest.mark.parametrize("name", preset_names())
def test_preset_has_the_size_of_its_name(name):
    hf = preset(name)
    config = parse(hf)
    size, unit = re.search(r"-([\d.]+)([mb])$", name).groups()
    stated = float(size) * {"m": 1e6, "b": 1e9}[unit]
    assert family_for(hf).num_params(config) == pytest.approx(stated, rel=0.12)
    assert hash(config) == hash(parse(preset(name)))
    assert config.num_heads * config.head_dim >= config.d_model


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"'gpt-5'.*opt-125m"):
        preset("gpt-5")


def test_presets_are_copies():
    preset("llama-3.1-8b")["rope_scaling"]["factor"] = 99.0
    assert preset("llama-3.1-8b")["rope_scaling"]["factor"] == 8.0


YARN = {"type": "yarn", "factor": 4.0}

BAD = [
    ("opt", {"model_type": "gpt2"}, "model_type 'gpt2' is not supported.*llama, mistral, opt"),
    ("opt", {"model_type": None}, "model_type is missing"),
    ("opt", {"hidden_size": None}, "hidden_size is missing"),
    ("opt", {"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    ("opt", {"num_attention_heads": 5}, "hidden_size 32 .* num_attention_heads 5"),
    ("opt", {"activation_function": "silu"}, "activation_function 'silu'"),
    ("opt", {"enable_bias": "yes"}, "enable_bias must be true or false, got 'yes'"),
    ("opt", {"eos_token_id": "</s>"}, "eos_token_id must hold token ids"),
    ("llama3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama3", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ("llama3", {"head_dim": 7}, "head_dim 7 must be even"),
    ("llama3", {"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
    ("llama3", {"rope_theta": -1.0}, "rope_theta must be a number above 0"),
    ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type 'longrope'"),
    ("llama3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ("llama3", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ("llama3", {"rope_scaling": {**YARN, "attn_factor": 1}}, r"rope_scaling\.attn_factor"),
    ("llama3", {"rope_parameters": {"rope_type": "ntk"}}, "rope_parameters.rope_type 'ntk'"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers"),
    (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["full_attention"]},
        "layer_types must be a list of",
    ),
    (
        "qwen2",
        {"use_sliding_window": True, "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        "layer_types has 'linear_attention'",
    ),
]


@pytest.mark.parametrize(("base", "change", "message"), BAD)
def test_unsupported_fields_are_named(base, change, message):
    with pytest.raises(ValueError, match=message):
        parse({**hf_config(base), **change})


def test_unknown_family_name():
    with pytest.raises(ValueError, match=r"'gpt2'.*opt, llama"):
        get_family("gpt2")


@pytest.mark.parametrize(
    ("base", "change", "window"),
    [
        ("llama3", {}, None),
        ("mistral", {}, 7),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {}, None),
        ("qwen2_window", {}, 8),
        ("qwen2_window", {"max_window_layers": 3}, None),
    ],
)
def test_sliding_window(base, change, window):
    assert parse({**hf_config(base), **change}).sliding_window == window


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        ({"type": "linear", "factor": 4.0}, 256),
        ({**YARN, "original_max_position_embeddings": 32}, 128),
        ({**YARN, "original_max_position_embeddings": 8}, 64),
        (hf_config("llama3")["rope_scaling"], 64),
    ],
)
def test_longest_context(scaling, longest):
    assert parse({**hf_config("llama2"), "rope_scaling": scaling}).max_position == longest


def test_llama3_frequencies_keep_short_waves_and_stretch_long_ones():
    """The rule of Llama 3.1, written per wavelength as its authors state it."""
    rope = Rope(kind="llama3", theta=5e5, factor=8.0, original_max=8192, low=1.0, high=4.0)
    plain = inverse_frequencies(Rope(theta=5e5), 128)
    got = inverse_frequencies(rope, 128)
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(got[waves < 8192 / 4], plain[waves < 8192 / 4])
    np.testing.assert_allclose(got[waves > 8192], plain[waves > 8192] / 8, rtol=1e-6)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert ((got < plain) & (got > plain / 8))[between].all()
