"""DeepSeek, Kimi K2 and GLM-4.5: what configs and checkpoints must have, and what steps make of
them."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.commands import convert
from jaxserve.models.base import Experts, Latent, ModelConfig, with_quantization
from jaxserve.models.dense import sequence_logits
from jaxserve.models.experts import ExpertParams, route
from jaxserve.models.families.deepseek import config_from_hf
from jaxserve.models.fused import fuse
from jaxserve.models.layers import Linear
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for
from jaxserve.models.rope import Rope
from jaxserve.models.sharding import check_tensor
from jaxserve.pallas_kernels.pool import slot_bytes
from jaxserve.weights import load_config, load_params, transpose_loaded
from tests.models.fixtures import (
    assert_same,
    hf_config,
    hf_tensors,
    load,
    refusal,
    write_checkpoint,
)
from tests.models.quantized.test_quantized import widened

LITE, FULL = hf_config("deepseek_v2_lite"), hf_config("deepseek_v2")


def test_the_lite_model_has_its_shape() -> None:
    # As deepseek-ai/DeepSeek-V2-Lite has it.
    hf = preset("deepseek-v2-lite") | {
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
    }
    assert config_from_hf(hf) == config_from_hf(preset("deepseek-v2-lite"))
    config = config_from_hf(hf)
    assert config.latent == Latent(rank=512, q_rank=None, plain=128, rotated=64, values=128)
    assert (config.d_model, config.num_heads, config.num_kv_heads) == (2048, 16, 1)
    assert (config.head_dim, config.value_dim, config.rotated_dim) == (288, 128, 64)
    assert (config.halves, config.query_dim) == (256, 512 + 64)
    assert config.experts == Experts(
        num_experts=64,
        experts_per_token=6,
        d_ff=1408,
        shared_d_ff=2816,
        normalised=False,
        dense_layers=(0,),
    )
    assert (config.num_layers, config.d_ff, config.vocab_size) == (27, 10944, 102400)
    assert config.max_position == 163840
    assert isinstance(config.rope, Rope) and config.rope.amplitude == 1
    temperature = 0.1 * 0.707 * np.log(40) + 1
    assert config.attn_scale == pytest.approx(192**-0.5 * temperature**2)
    # The latent vector of a token and the rotated part, and what K and V made of them would take.
    assert 2 * slot_bytes(27, 1, config.head_dim, "bfloat16") == 27 * (512 + 64) * 2 == 31104
    assert 27 * (16 * (192 + 192) * 2) == 324 << 10
    for tensor in (2, 4, 16):
        check_tensor(config, tensor)
    assert not config.plain_keys


def test_a_config_without_fields_means_what_transformers_takes_it_for() -> None:
    config = config_from_hf({"model_type": "deepseek_v2", "num_experts_per_tok": 6})
    assert config.latent == Latent(rank=512, q_rank=1536, plain=128, rotated=64, values=128)
    assert config.experts is not None and config.experts.dense_layers == ()
    assert (config.d_model, config.num_heads, config.eos_token_ids) == (4096, 32, (2,))


def test_an_odd_number_has_a_zero_behind_it() -> None:
    config = config_from_hf(LITE | {"kv_lora_rank": 11})
    assert config.latent is not None and config.latent.half == 6
    assert config.query_dim == 2 * config.head_dim == 11 + config.latent.rotated + 1


def test_layers_may_all_be_dense() -> None:
    config = config_from_hf(LITE | {"first_k_dense_replace": 4})
    assert config.experts is None


def test_projections_in_few_bits_say_what_they_stand_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LITE | {"num_hidden_layers": 2})
    family, plain, _ = load_config(tmp_path)
    config = with_quantization(family, plain, "int8")
    small = load_params(tmp_path, family, config, dtype="float32")
    assert small.layers[1].attn.kv_b.kernel.q.dtype == jnp.int8
    tokens = jnp.arange(20)

    def logits(params: Any, shape: ModelConfig) -> np.ndarray:
        run = functools.partial(sequence_logits, family, dtype=jnp.float32)
        return np.asarray(jax.jit(lambda params: run(params, shape, tokens))(params))

    want = logits(widened(small, family.leaves(config)), plain)
    got = logits(transpose_loaded(fuse(small, config), "float32"), config)
    np.testing.assert_allclose(got, want, atol=1e-3)


V3 = hf_config("deepseek_v3")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_the_bias_of_a_choice_stays_wide(tmp_path: Path, name: str) -> None:
    """A rounding of 2**-8 of a bias of 5 is more than what experts' scores differ by."""
    tensors = hf_tensors(hf_config(name))
    tensors[BIAS] += 5
    (tmp_path / "wide").mkdir()
    write_checkpoint(tmp_path / "wide", hf_config(name), tensors)
    assert convert.main([str(tmp_path / "wide"), str(tmp_path / "orbax"), "--format=orbax"]) == 0
    for folder in ("wide", "orbax"):
        params = load(tmp_path / folder, "bfloat16")
        assert params.layers[1].experts.router.kernel.dtype == jnp.bfloat16
        np.testing.assert_array_equal(params.layers[1].experts.correction, tensors[BIAS])


def test_experts_are_chosen_with_the_bias_and_weighed_without() -> None:
    """Groups by the sum of their two best, of which one expert may be far worse than others."""
    experts = Experts(
        num_experts=6, experts_per_token=2, d_ff=1, sigmoid=True, groups=3, groups_per_token=1,
        scale=2.0,
    )  # fmt: skip
    chances = np.array([[0.5, 0.1, 0.4, 0.3, 0.2, 0.1]], np.float32)
    correction = jnp.array([0.0, 0, 0, 0, 0.4, 0.2])  # sums: 0.6, 0.7, 0.9
    scores = jnp.asarray(np.log(chances / (1 - chances)))
    weights = ExpertParams(Linear(scores), *[Linear(None)] * 3, correction=correction)
    parts, chosen = route(jnp.ones((1, 1)), weights, experts, None)
    assert chosen.tolist() == [[4, 5]]
    np.testing.assert_allclose(parts, [[2 * 0.2 / 0.3, 2 * 0.1 / 0.3]], rtol=1e-6)


def test_scores_that_are_all_zero_give_no_nan() -> None:
    experts = Experts(num_experts=4, experts_per_token=2, d_ff=1, sigmoid=True)
    weights = ExpertParams(
        Linear(jnp.full((1, 4), -1000.0)), *[Linear(None)] * 3, correction=jnp.zeros(4)
    )
    parts, _ = route(jnp.ones((1, 1)), weights, experts, None)
    assert parts.tolist() == [[0, 0]]


def test_layers_for_more_tokens_are_skipped_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = hf_tensors(V3)
    further = {
        f"model.layers.3.{name}.weight": np.ones((4, 4), np.float32)
        for name in ("eh_proj", "self_attn.o_proj", "mlp.experts.40.up_proj")
    }
    write_checkpoint(tmp_path, V3, tensors | further)
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    said = [record.message for record in caplog.records if "multi-token" in record.message]
    assert len(said) == 1 and "3 tensors of layers from 3 on" in said[0]
    assert not any("nothing uses" in record.message for record in caplog.records)
    write_checkpoint(tmp_path, V3 | {"num_nextn_predict_layers": 0}, tensors | further)
    assert "num_hidden_layers is 3, but the checkpoint has a tensor 'model.layers.3." in refusal(
        tmp_path
    )


WIDE_V3 = V3 | {"hidden_size": 256, "kv_lora_rank": 128, "moe_intermediate_size": 128}
WIDE_V3 |= {"intermediate_size": 256, "q_lora_rank": 128, "num_hidden_layers": 2}


def in_blocks(hf: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tensors in 8 bits, with a scale for every 128 x 128, and what they stand for."""
    small, wide, draw = hf_tensors(hf), hf_tensors(hf), np.random.default_rng(0)
    for name, tensor in hf_tensors(hf).items():
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            continue
        shape = [-(-size // 128) for size in tensor.shape]
        scale = draw.uniform(0.5, 1.5, shape).astype(np.float32) * np.float32(1e-3)
        small[name] = (200 * tensor).astype(ml_dtypes.float8_e4m3fn)
        small[f"{name}_scale_inv"] = scale
        whole = np.kron(scale, np.ones((128, 128), np.float32))
        wide[name] = small[name].astype(np.float32) * whole[: len(tensor), : tensor.shape[1]]
    return small, wide


def write_blocks(folder: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config["activation_scheme"] = "dynamic"
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))
    save_file(tensors, folder / "model.safetensors")


def test_blocks_of_8_bits_say_what_they_stand_for(tmp_path: Path) -> None:
    """As DeepSeek publishes V3, rows that fill no block included: 136 and 96 of them."""
    small, wide = in_blocks(WIDE_V3)
    (tmp_path / "wide").mkdir()
    write_checkpoint(tmp_path / "wide", WIDE_V3, wide)
    write_blocks(tmp_path / "small", WIDE_V3, small)
    assert_same(load(tmp_path / "small"), load(tmp_path / "wide"))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 4), (256, 1)])
def test_blocks_that_lie_are_named(tmp_path: Path, shape: tuple[int, int]) -> None:
    small, _ = in_blocks(WIDE_V3)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    small[name] = np.ones(shape, np.float32)
    write_blocks(tmp_path / "lies", WIDE_V3, small)
    says = f"tensor {name!r} has shape {list(shape)}, not [2, 2] for blocks of 128 x 128"
    assert says in refusal(tmp_path / "lies")


@pytest.mark.parametrize("wrapper", ["kimi_k25", "kimi_k2"])
def test_a_tower_for_images_is_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrapper: str
) -> None:
    """In a config around the text's, whose model_type it may leave out, and in one of the text."""
    tensors = hf_tensors(hf_config("kimi_k2"))
    text = {name: value for name, value in hf_config("kimi_k2").items() if name != "model_type"}
    inner = {"text_config": text, "tie_word_embeddings": False} if wrapper == "kimi_k25" else text
    outer = {"model_type": wrapper, "vision_config": {"hidden_size": 8}} | inner
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tower = {"vision_tower.patch_embed.proj.weight": np.ones((2, 2), np.float32)}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_file(named | tower, tmp_path / "model.safetensors")
    (tmp_path / "text").mkdir()
    write_checkpoint(tmp_path / "text", hf_config("kimi_k2"), tensors)
    with caplog.at_level(logging.INFO):
        assert_same(load(tmp_path), load(tmp_path / "text"))
    said = [record.message for record in caplog.records if "images are refused" in record.message]
    assert len(said) == 1 and f"'{wrapper}'" in said[0]


@pytest.mark.parametrize(
    ("name", "heads", "number"), [("deepseek-v3", 128, 256), ("kimi-k2", 64, 384)]
)
def test_the_large_models_have_their_shapes(name: str, heads: int, number: int) -> None:
    config = config_from_hf(preset(name))
    assert config.latent == Latent(rank=512, q_rank=1536, plain=128, rotated=64, values=128)
    assert (config.num_heads, config.num_layers, config.d_model) == (heads, 61, 7168)
    experts = config.experts
    assert experts is not None and experts.sigmoid and experts.normalised
    assert (experts.num_experts, experts.experts_per_token) == (number, 8)
    assert config.rope is not None and config.rope.amplitude == 1
    assert 2 * slot_bytes(61, 1, config.head_dim, "bfloat16") == 61 * (512 + 64) * 2 == 70272
    check_tensor(config, 16)


def test_glm_has_its_shape() -> None:
    config = family_for(preset("glm-4.5")).config_from_hf(preset("glm-4.5"))
    assert (config.head_dim, config.num_kv_heads, config.attn_scale) == (128, 8, 128**-0.5)
    assert config.rope is not None and config.rope.partial == 0.5
    assert config.experts is not None and config.experts.dense_layers == (0, 1, 2)
    assert not config.plain_keys
