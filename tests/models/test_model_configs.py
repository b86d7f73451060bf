"""Reading config.json: presets, unsupported fields by name, rope lengths, windows."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from jaxserve.models.presets import preset, preset_names
from jaxserve.models.registry import family_for, get_family
from jaxserve.models.rope import Rope, inverse_frequencies
from tests.models.fixtures import hf_config, saved_config


def parse(hf):
    return family_for(hf).config_from_hf(hf)


# In billions, of presets whose names have none.
SIZES = {"deepseek-v2-lite": 15.7, "deepseek-v3": 671, "kimi-k2": 1026}
SIZES |= {"glm-4.5": 355, "glm-4.5-air": 106}


@pytest.mark.parametrize("name", preset_names())
def test_preset_has_the_size_of_its_name(name):
    hf = preset(name)
    config = parse(hf)
    sized = f"{name}-{SIZES[name]}b" if name in SIZES else name.replace("8x7", "46.7")
    size, unit = re.search(r"-([\d.]+)([mb])(?:-a[\d.]+b)?$", sized).groups()
    stated = float(size) * {"m": 1e6, "b": 1e9}[unit]
    assert family_for(hf).num_params(config) == pytest.approx(stated, rel=0.12)
    assert hash(config) == hash(parse(preset(name)))
    assert config.num_heads * config.head_dim >= 0.75 * config.d_model


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"'gpt-5'.*opt-125m"):
        preset("gpt-5")


def test_presets_are_copies():
    preset("llama-3.1-8b")["rope_scaling"]["factor"] = 99.0
    assert preset("llama-3.1-8b")["rope_scaling"]["factor"] == 8.0


YARN = {"type": "yarn", "factor": 4.0}

BAD = [
    ("opt", {"model_type": "gpt2"}, "model_type 'gpt2' is not supported.*llama, ministral, "),
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
    ("llama3", {"rope_scaling": {"type": "longrope"}}, r"rope_scaling\.long_factor must be a list"),
    ("phi4_mini", {"head_dim": 8}, "long_factor and short_factor must have 3 numbers each, got 6"),
    (
        "phi4_mini",
        {"partial_rotary_factor": 0.7},
        "partial_rotary_factor 0.7 of head_dim 16 is",
    ),
    ("phi4_mini", {"partial_rotary_factor": 2.0}, "partial_rotary_factor 2 of head_dim 16 is not"),
    (
        "phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
        "'linear' with a partial_rotary_factor",
    ),
    ("phi3", {"layer_types": ["full_attention"] * 3}, "layer_types .* model_type 'phi3'"),
    (
        "mistral",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types is not supported with model_type 'mistral'",
    ),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be a list of 3 zeros and ones"),
    ("granite", {"logits_scaling": 0}, "logits_scaling must be a number above 0"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"model_type": "gemma3"}, "model_type 'gemma3' is not supported.*gemma3_text"),
    ("llama3", {"rope_scaling": {"type": "dynamic"}}, "factor is missing"),
    ("llama3", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1}}, "alpha is not"),
    (
        "llama3",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2},
        "'dynamic' rope needs a head_dim of 4 or more, got 2",
    ),
    ("llama3", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ("llama3", {"rope_scaling": {**YARN, "attn_factor": 1}}, r"rope_scaling\.attn_factor"),
    ("llama2", {"rope_parameters": {"rope_type": "ntk"}}, "rope_parameters.rope_type 'ntk'"),
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
    ("mixtral", {"num_local_experts": 0}, "num_local_experts must be a positive integer, got 0"),
    ("qwen3_moe", {"num_experts": None}, "num_experts is missing"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, r"per_tok must be at most num_experts \(8\), got 9"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, r"must be a list of layers, 0 to 2, got \[3\]"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
    ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
    ("qwen2_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("gpt_oss", {"num_experts_per_tok": 9}, r"at most num_local_experts \(8\), got 9"),
    ("gpt_oss", {"swiglu_limit": -1}, "swiglu_limit must be a number above 0, got -1"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    ("gpt_oss", {"attention_bias": "yes"}, "attention_bias must be true or false"),
    ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
    ("deepseek_v2_lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
    ("deepseek_v2_lite", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
    ("deepseek_v2_lite", {"first_k_dense_replace": -1}, "replace must be a number of layers"),
    ("deepseek_v2_lite", {"n_shared_experts": None}, "n_shared_experts is missing"),
    ("deepseek_v2_lite", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ("deepseek_v2_lite", {"num_experts_per_tok": 9}, "per_tok must be at most 8, .* got 9"),
    ("deepseek_v2_lite", {"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, got 0"),
    ("deepseek_v2_lite", {"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
    ("deepseek_v2_lite", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 must be even"),
    (
        "deepseek_v2_lite",
        {"num_key_value_heads": 2},
        r"other than num_attention_heads \(4\) is not",
    ),
    ("deepseek_v2_lite", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("deepseek_v2_lite", {"routed_scaling_factor": 0}, "routed_scaling_factor must be a number"),
    ("deepseek_v2", {"n_group": 3}, r"n_group 3 must divide n_routed_experts \(8\)"),
    ("deepseek_v2", {"topk_group": 5}, r"n_group 4 must .* be at least topk_group \(5\)"),
    ("deepseek_v2", {"topk_group": 1}, "num_experts_per_tok must be at most 2, .* got 3"),
    ("deepseek_v2", {"topk_group": None}, "topk_group is missing"),
    ("deepseek_v2", {"num_nextn_predict_layers": -1}, "predict_layers must be a number of layers"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    ("deepseek_v3", {"n_group": 5}, r"n_group 5 must divide n_routed_experts \(12\)"),
    ("deepseek_v3", {"n_group": 12}, r"n_group 12 must leave two of n_routed_experts \(12\)"),
    ("deepseek_v3", {"topk_group": 5}, r"n_group 4 must .* be at least topk_group \(5\)"),
    ("deepseek_v3", {"num_experts_per_tok": 7}, "per_tok must be at most 6, .* got 7"),
    ("deepseek_v3", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
    ("deepseek_v3", {"q_lora_rank": -4}, "q_lora_rank must be a positive integer, got -4"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false is not supported"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
    ("kimi_k2", {"n_shared_experts": 0}, "n_shared_experts must be a positive integer, got 0"),
    ("kimi_k2", {"num_nextn_predict_layers": True}, "must be a number of layers, got True"),
    ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm must be true or false, got 1"),
    ("glm4_moe", {"topk_group": 3}, r"n_group 2 must .* be at least topk_group \(3\)"),
    (
        "glm4_moe",
        {"partial_rotary_factor": 0.45},
        "partial_rotary_factor 0.45 of head_dim 16 is not",
    ),
    ("glm4_moe", {"rope_scaling": YARN}, "'yarn' with a partial_rotary_factor is not supported"),
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
        ({"type": "linear", "factor": 4.0}, 64),  # as transformers warns beyond
        ({**YARN, "original_max_position_embeddings": 32}, 128),
        ({**YARN, "original_max_position_embeddings": 8}, 64),
        ({"type": "dynamic", "factor": 2.5}, 160),
        (hf_config("llama3")["rope_scaling"], 64),
    ],
)
def test_longest_context(scaling, longest):
    assert parse({**hf_config("llama2"), "rope_scaling": scaling}).max_position == longest


def test_a_linear_scaling_may_say_what_it_stretches_to():
    """As Vicuna's configs do; no further than the factor goes."""
    hf = {**hf_config("llama2"), "rope_scaling": {"type": "linear", "factor": 4.0}}
    for stated, longest in ((16, 64), (200, 200), (1000, 256)):
        assert parse({**hf, "max_sequence_length": stated}).max_position == longest


def test_layers_of_two_kinds():
    gemma = parse(hf_config("gemma3"))
    assert [kind.sliding_window for kind in gemma.layer_kinds] == [9] * 5 + [None]
    near, far = gemma.layer_kinds[0].rope, gemma.layer_kinds[5].rope
    assert (near, far) == (Rope(theta=1e4), Rope(kind="linear", theta=1e6, factor=8.0))
    smollm = parse({**hf_config("smollm3"), "no_rope_layers": None})
    assert [kind.rope is None for kind in smollm.layer_kinds] == [False, True, False]
    assert parse({**hf_config("smollm3"), "no_rope_layers": [0] * 3}).rope is None
    capless = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert parse({**hf_config("gemma2"), **capless}).soft_cap is None
    for name in ("gemma2", "gemma3", "smollm3", "olmo2", "phi4_mini", "gpt_oss"):
        assert not parse(hf_config(name)).plain_keys
    for name in ("llama3", "mistral", "qwen3", "granite", "phi3"):
        assert parse(hf_config(name)).plain_keys


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_gemma_without_fields_has_the_shape_of_its_name(model_type):
    """Multimodal configs leave out what is as usual."""
    hf = {"model_type": model_type}
    config = parse(hf)
    assert family_for(hf).num_params(config) == pytest.approx(2.6e9, rel=0.05)
    assert (config.num_heads, config.head_dim, config.tied) == (8, 256, True)


def test_longrope_rotates_by_the_longest_context_served():
    hf = hf_config("phi4_mini")
    config = parse(hf)
    scaling = hf["rope_scaling"]
    base = 1e4 ** (-np.arange(0, 12, 2) / 12)
    for longest, factors in ((32, "short_factor"), (33, "long_factor"), (128, "long_factor")):
        rope = config.for_length(longest).rope
        want = base / np.asarray(scaling[factors])
        np.testing.assert_allclose(inverse_frequencies(rope, 16), want, rtol=1e-5)
    assert config.rope.amplitude == pytest.approx((1 + np.log(4) / np.log(32)) ** 0.5)
    for first_name in ("su", "yarn"):  # of Phi-3's
        assert parse({**hf, "rope_scaling": {**scaling, "rope_type": first_name}}) == config
    short = parse({**hf, "max_position_embeddings": 32})
    assert short.rope.factors == tuple(scaling["short_factor"])
    llama = parse(hf_config("llama3"))
    assert llama.for_length(2) == llama


def test_dynamic_ntk_rotates_by_the_longest_context_served():
    """Up to `max_position_embeddings` as the model was trained, beyond as transformers rotates one
    text that long."""
    config = parse(hf_config("llama_dynamic"))
    assert config.rope.longest == config.max_position == 96
    for longest, beyond in ((1, 1), (24, 1), (25, 1 + 4 / 24), (48, 5), (96, 13)):
        got = inverse_frequencies(config.for_length(longest).rope, 8)
        want = (1e4 * beyond ** (8 / 6)) ** (-np.arange(0, 8, 2) / 8)
        np.testing.assert_allclose(got, want, rtol=1e-5)


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


@pytest.mark.parametrize("name", ["llama3", "llama_yarn", "qwen2_yarn", "phi4_mini"])
def test_the_original_context_is_read_wherever_it_is(name):
    """As transformers has it: the config's own comes before that of its scaling."""
    hf = hf_config(name)
    field = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    where = "original_max_position_embeddings"
    scaling = {key: value for key, value in hf[field].items() if key != where}
    size = hf[field].get(where) or hf[where]
    want = parse({**hf, field: {**scaling, where: size}})
    for inner in ({}, {where: 3}):
        assert parse({**hf, where: size, field: {**scaling, **inner}}) == want


def test_a_scaling_that_was_added_counts():
    """transformers 5 writes rope_parameters, and people add the older field by hand."""
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    hf = {**hf_config("qwen2"), "rope_parameters": None, "rope_theta": 1e6}
    want = parse({**hf, "rope_scaling": added}).rope
    written = {"rope_type": "default", "rope_theta": 1e6}
    assert want.kind == "yarn"
    both = {**hf, "rope_scaling": added, "rope_parameters": written}
    assert parse(both).rope == want
    # Its own base counts, and nothing of the other field.
    own = parse({**both, "rope_theta": None, "rope_scaling": {**added, "rope_theta": 5e5}}).rope
    assert own == dataclasses.replace(want, theta=5e5)
    gemma = saved_config("gemma3")
    linear = {"rope_type": "linear", "factor": 8.0}
    kinds = parse({**gemma, "rope_scaling": linear}).layer_kinds
    before = parse(gemma).layer_kinds
    assert {kind.rope.kind for kind in kinds if kind.sliding_window is None} == {"linear"}
    assert [kind for kind in kinds if kind.sliding_window] == [
        kind for kind in before if kind.sliding_window
    ]
