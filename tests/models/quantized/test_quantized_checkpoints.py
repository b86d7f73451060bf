"""Quantised checkpoints of others, packed here as their formats' documentation says, number by
number; and our own."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxserve
from jaxserve.commands import convert
from jaxserve.models.base import with_quantization
from jaxserve.models.quantized import Quantized, dequantize
from jaxserve.weights import load_config, load_params
from tests.models.fixtures import assert_same, hf_config, hf_tensors, refusal
from tests.models.quantized.test_quantized import in_groups, widened

GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word's eight, low bits first


def words(numbers: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Numbers [n] in int32 words, low bits first."""
    each = 32 // bits
    packed = []
    for first in range(0, len(numbers), each):
        word = 0
        for place in range(each):
            at = first + (place if order is None else order[place])
            if at < len(numbers):
                word |= int(numbers[at]) << bits * place
        packed.append(word)
    return np.array(packed, np.uint32).view(np.int32)


def down(matrix: np.ndarray, bits: int) -> np.ndarray:
    """Words of consecutive rows."""
    return np.stack([words(column, bits) for column in matrix.T], axis=1)


def along(matrix: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Words of consecutive columns."""
    return np.stack([words(row, bits, order) for row in matrix])


class Weight:
    """Random numbers of some bits [inputs, outputs], with scales, zero points and what they stand
    for."""

    def __init__(self, inputs: int, outputs: int, bits: int, group: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        group = group or inputs
        shape = (inputs // group, outputs)
        self.q = rng.integers(0, 1 << bits, (inputs, outputs))
        self.zero = rng.integers(0, 1 << bits, shape)
        self.scale = rng.uniform(0.5, 1.5, shape).astype(np.float16) * np.float16(0.05)
        self.middle = 1 << (bits - 1)
        self._group = group

    def wide(self, *, symmetric: bool) -> np.ndarray:
        zero = np.full_like(self.zero, self.middle) if symmetric else self.zero
        spread = [np.repeat(part, self._group, axis=0) for part in (zero, self.scale)]
        return ((self.q - spread[0]) * spread[1].astype(np.float64)).astype(np.float32)


def gptq(weight: Weight, bits: int, *, symmetric: bool, offset: int) -> dict[str, np.ndarray]:
    zero = np.full_like(weight.zero, weight.middle) if symmetric else weight.zero
    return {
        "qweight": down(weight.q, bits),
        "qzeros": along((zero - offset) % (1 << bits), bits),
        "scales": weight.scale,
        "g_idx": (np.arange(len(weight.q)) // (len(weight.q) // len(zero))).astype(np.int32),
    }


def awq(weight: Weight) -> dict[str, np.ndarray]:
    return {
        "qweight": along(weight.q, 4, AWQ_COLUMNS),
        "qzeros": along(weight.zero, 4, AWQ_COLUMNS),
        "scales": weight.scale,
    }


def packed(weight: Weight, bits: int, *, symmetric: bool) -> dict[str, np.ndarray]:
    """compressed-tensors' pack-quantized."""
    tensors = {
        "weight_packed": along(weight.q.T, bits),
        "weight_scale": weight.scale.T.astype(ml_dtypes.bfloat16),
        "weight_shape": np.array(weight.q.T.shape, np.int64),
    }
    weight.scale = tensors["weight_scale"].T.astype(np.float32)
    if not symmetric:
        tensors["weight_zero_point"] = down(weight.zero.T, bits)
    return tensors


def int8(weight: Weight) -> dict[str, np.ndarray]:
    """compressed-tensors' int-quantized."""
    return {
        "weight": (weight.q.T - 128).astype(np.int8),
        "weight_scale": weight.scale.T.astype(np.float32),
        "input_scale": np.ones(1, np.float32),
    }


def compressed(bits: int, *, symmetric: bool = True, kind: str = "int", **weights) -> dict:
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


CASES = {
    "gptq": (4, GROUP, True, {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq-zero": (4, GROUP, False, {"quant_method": "gptq", "sym": False}),
    "gptq-v2": (
        *(4, GROUP, False),
        {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-8": (8, GROUP, True, {"quant_method": "gptq", "bits": 8}),
    "gptq-channel": (4, 0, True, {"quant_method": "gptq", "group_size": -1}),
    "awq": (4, GROUP, False, {"quant_method": "awq", "version": "gemm"}),
    "packed": (4, GROUP, True, compressed(4)),
    "packed-zero": (4, GROUP, False, compressed(4, symmetric=False)),
    "packed-8": (8, 0, True, compressed(8)),
    "int8": (8, 0, True, compressed(8)),
}


def tensors_of(case: str, weight: Weight) -> dict[str, np.ndarray]:
    bits, _, symmetric, _ = CASES[case]
    kind = case.partition("-")[0]
    if kind == "gptq":
        offset = 0 if case == "gptq-v2" else 1
        return gptq(weight, bits, symmetric=symmetric, offset=offset)
    if kind == "awq":
        return awq(weight)
    return int8(weight) if case == "int8" else packed(weight, bits, symmetric=symmetric)


def write(folder: Path, hf: dict, tensors: dict[str, np.ndarray]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(
        {name: np.ascontiguousarray(one) for name, one in tensors.items()},
        folder / "model.safetensors",
    )


def write_both(tmp_path: Path, case: str, name: str = "llama3") -> tuple[Path, Path]:
    """A quantised checkpoint, and one of what it stands for."""
    bits, group, symmetric, config = CASES[case]
    hf, tensors = in_groups(name), hf_tensors(in_groups(name))
    small, wide = dict(tensors), dict(tensors)
    for seed, key in enumerate(sorted(tensors)):
        if not key.endswith(("fc1.weight", "fc2.weight")) and not QUANTISED.fullmatch(key):
            continue
        module = key.removesuffix(".weight")
        outputs, inputs = tensors[key].shape
        weight = Weight(inputs, outputs, bits, group, seed)
        del small[key]
        small |= {f"{module}.{part}": one for part, one in tensors_of(case, weight).items()}
        wide[key] = weight.wide(symmetric=symmetric).T
    write(tmp_path / "small", {**hf, "quantization_config": config}, small)
    write(tmp_path / "wide", hf, wide)
    return tmp_path / "small", tmp_path / "wide"


def load(folder: Path, **options):
    family, config, _ = load_config(folder)
    return load_params(folder, family, config, dtype="float32", **options), family, config


def assert_stands_for(folder: Path, wide: Path, **options) -> None:
    params, family, config = load(folder, **options)
    want = load(wide)[0]
    assert isinstance(params.layers[0].attn.q.kernel, Quantized)
    got = widened(params, family.leaves(config))
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7, err_msg=str(path))


@pytest.mark.parametrize("case", CASES)
def test_weights_of_each_format(tmp_path, case):
    small, wide = write_both(tmp_path, case)
    assert_stands_for(small, wide)


@pytest.mark.parametrize("case", ["awq", "int8"])
def test_to_orbax_and_to_compressed_tensors(tmp_path, case, capsys):
    small, wide = write_both(tmp_path, case, "opt")
    for into in ("orbax", "safetensors"):
        target = tmp_path / into
        assert convert.main([str(small), str(target), f"--format={into}"]) == 0
        assert_stands_for(target, wide)
        assert load(target)[2].quantization.scheme == load(small)[2].quantization.scheme


def float8(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8(tmp_path, strategy, method):
    hf = {**in_groups("llama3"), "intermediate_size": 96}
    tensors = hf_tensors(hf)
    small, wide, rng = dict(tensors), dict(tensors), np.random.default_rng(0)
    for key in sorted(tensors):
        if not key.endswith("_proj.weight"):
            continue
        outputs, inputs = tensors[key].shape
        q = float8(rng.normal(0, 50, (outputs, inputs)))
        block = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (48, 32)}[strategy]
        scale = rng.uniform(0.5, 1.5, (-(-outputs // block[0]), inputs // block[1]))
        scale = scale.astype(np.float32) * np.float32(1e-3)
        spread = np.kron(scale, np.ones(block, np.float32))[:outputs]
        small[key] = q
        inverse = method == "fp8" and strategy == "block"
        part = "weight_scale_inv" if inverse else "weight_scale"
        stored = scale.reshape(1) if strategy == "tensor" else scale
        small[f"{key.removesuffix('weight')}{part}"] = stored
        wide[key] = q.astype(np.float32) * spread
    sizes = [48, 32] if strategy == "block" else None
    config = (
        {"quant_method": "fp8", "weight_block_size": sizes}
        if method == "fp8"
        else compressed(8, kind="float", strategy=strategy, block_structure=sizes)
    )
    write(tmp_path / "small", {**hf, "quantization_config": config}, small)
    write(tmp_path / "wide", hf, wide)
    assert_stands_for(tmp_path / "small", tmp_path / "wide")
    params = load(tmp_path / "small")[0]
    assert params.layers[0].up.kernel.q.dtype == jnp.float8_e4m3fn
    assert params.lm_head.dtype == jnp.float32


Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("case", "name", "change", "says"),
    [
        ("gptq", f"{Q}.scales", lambda one: one * np.nan, f"{Q}: a scale .* NaN"),
        ("gptq", f"{Q}.scales", lambda one: one * 0, f"{Q}: a scale .* or 0"),
        ("awq", f"{UP}.scales", lambda one: one * np.inf, f"{UP}: a scale .* infinite"),
        (
            "packed",
            f"{UP}.weight_scale",
            lambda one: one * one.dtype.type(0),
            f"{UP}: a scale .* or 0",
        ),
        ("gptq", f"{Q}.scales", lambda one: one[:, :-1], rf"{Q}\.scales': expected shape"),
        ("gptq", f"{Q}.qzeros", lambda one: one[:, :-1], rf"{Q}\.qzeros': expected shape"),
        ("gptq", f"{Q}.qzeros", lambda one: one * 0, rf"{Q}\.qzeros': a symmetric weight"),
        ("gptq", f"{Q}.qweight", lambda one: one[:-1], f"{Q}: .* neither 4 nor 8 bits"),
        ("gptq", f"{Q}.qweight", lambda one: one.astype(np.int64), "stored as I64"),
        ("gptq", f"{Q}.g_idx", lambda one: one[::-1] + 1, r"g_idx': inputs ordered by activation"),
        ("awq", f"{Q}.qweight", lambda one: one[:, :-1], f"{Q}: .* not 4 bits"),
        ("packed", f"{Q}.weight_packed", lambda one: one[:, :-1], f"{Q}: .* neither 4 nor 8"),
        (
            *("packed", f"{UP}.weight_scale"),
            lambda one: np.repeat(one, 3, axis=1)[:, :3],
            f"{UP}: 3 groups do not divide its 32 inputs",
        ),
        ("int8", f"{UP}.weight_scale", lambda one: one[:-1], r"weight_scale': \d+ scales for"),
        (
            "int8",
            f"{UP}.weight",
            lambda one: one.astype(np.float32),
            "not quantised|expected|of qu",
        ),
    ],
)
def test_damaged(tmp_path, case, name, change, says):
    small, _ = write_both(tmp_path, case)
    tensors = load_file(small / "model.safetensors")
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, small / "model.safetensors")
    assert re.search(says, refusal(small))


def test_a_missing_scale(tmp_path):
    small, _ = write_both(tmp_path, "packed")
    tensors = load_file(small / "model.safetensors")
    del tensors[f"{Q}.weight_scale"]
    save_file(tensors, small / "model.safetensors")
    assert refusal(small) == f"the checkpoint has no tensor '{Q}.weight_scale'"


def add(folder: Path, name: str, tensor: np.ndarray) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: tensor}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("case", "stored"), [("packed", "plain"), ("packed", "in words"), ("int8", "plain")]
)
def test_zero_points_of_symmetric_weights_are_the_middle(tmp_path, case, stored):
    small, wide = write_both(tmp_path, case)
    name = f"{UP}.weight_zero_point"
    bits, group, _, _ = CASES[case]
    shape = (64, 32 // (group or 32))
    zero = np.zeros(shape, np.int8)
    if stored == "in words":
        zero = down(np.full(shape, 1 << (bits - 1)), bits)
    add(small, name, zero)
    assert_stands_for(small, wide)
    zero[-1, -1] += 1
    add(small, name, zero)
    assert refusal(small) == f"tensor '{name}': a symmetric weight has other zero points"


@pytest.mark.parametrize("case", ["gptq", "int8"])
def test_a_bias_that_the_model_has_not(tmp_path, case, caplog):
    small, wide = write_both(tmp_path, case)
    add(small, f"{Q}.bias", np.zeros(32, np.float16))
    assert_stands_for(small, wide)
    assert "nothing uses" not in caplog.text
    add(small, f"{Q}.bias", np.ones(32, np.float16))
    assert f"has a tensor '{Q}.bias', but by its config there are no such biases" in refusal(small)


@pytest.mark.parametrize(("given", "said"), [({"num_bits": 8}, 1), (None, 0)])
def test_that_activations_stay_wide_is_said(tmp_path, caplog, given, said):
    small, _ = write_both(tmp_path, "int8")
    hf = json.loads((small / "config.json").read_text())
    hf["quantization_config"]["config_groups"]["group_0"]["input_activations"] = given
    (small / "config.json").write_text(json.dumps(hf))
    with caplog.at_level("INFO"):
        load(small)
    assert caplog.text.count("activations stay wide") == said


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes is not supported (known: gptq, awq"),
        ({"quant_method": "awq", "version": "gemv"}, "awq version 'gemv' is not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "blocks of [0, 1]"),
        (compressed(2), "weights of 2 bits ('int')"),
        (compressed(4, kind="float"), "weights of 4 bits ('float')"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        ({**compressed(4), "sparsity_config": {"format": "2:4"}}, "sparsity_config '2:4'"),
        ({**compressed(4), "transform_config": {"a": 1}}, "transform_config is not supported"),
        ([1], "must be an object"),
        ({"quant_method": "jaxserve"}, "not as jaxserve convert writes it"),
    ],
)
def test_refused_by_name(tmp_path, config, says):
    write(tmp_path, {**in_groups("llama3"), "quantization_config": config}, {"a": np.ones(1)})
    assert says in refusal(tmp_path)


QUANTISED = re.compile(r".*(_proj|experts\.\d+\.w[123])\.weight")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("gptq-zero", "mixtral"),
        ("gptq-8", "phi3"),
        ("awq", "phi3"),
        ("packed-zero", "qwen3_moe"),
        ("int8", "mixtral"),
    ],
)
def test_of_joined_tensors_and_experts_they_are_made_wide(tmp_path, case, name, caplog):
    small, wide = write_both(tmp_path, case, name)
    with caplog.at_level(logging.INFO):
        params = load(small)[0]
    assert "its quantised weights are made float32 as they are read" in caplog.text
    assert "nothing uses" not in caplog.text
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(load(wide)[0]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_of_experts_they_are_quantised_anew_where_that_is_asked(tmp_path):
    small, wide = write_both(tmp_path, "awq", "qwen3_moe")
    found = []
    for folder in (small, wide):
        family, config, _ = load_config(folder)
        config = with_quantization(family, config, "int8")
        found.append(load_params(folder, family, config, dtype="float32"))
    assert_same(*found)


def test_q_k_and_v_must_be_alike(tmp_path):
    small, _ = write_both(tmp_path, "packed")
    tensors = load_file(small / "model.safetensors")
    original = hf_tensors(in_groups("llama3"))
    for name in [name for name in tensors if name.startswith(f"{Q}.")]:
        del tensors[name]
    tensors[f"{Q}.weight"] = original[f"{Q}.weight"]
    save_file(tensors, small / "model.safetensors")
    assert f"{Q} is not quantised, others of q, k and v are" in refusal(small)


def test_quantised_at_load_and_by_convert_alike(tmp_path, capsys):
    source = tmp_path / "hf"
    write(source, hf_config("opt"), hf_tensors(hf_config("opt")))
    (tmp_path / "plain").mkdir()
    small, plain = tmp_path / "small", tmp_path / "orbax"
    assert convert.main([str(source), str(small), "--quantize=int4:group=32,zero"]) == 0
    assert convert.main([str(source), str(plain)]) == 0
    params, family, config = load(small)
    for folder in (source, plain):  # safetensors, and Orbax
        again = load_params(folder, family, config, dtype="float32")
        assert_same(again, params)
    assert convert.main([str(small), str(tmp_path / "again"), "--quantize=int8"]) == 2
    assert "--quantize: the checkpoint's weights are quantised already" in capsys.readouterr().err
    assert convert.main([str(source), str(tmp_path / "x"), "--quantize=int3"]) == 2
    assert "--quantize: must be int8, int4 or fp8" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["int4:group=32,zero", "fp8"])
def test_compressed_tensors_of_our_own(tmp_path, how):
    source, target = tmp_path / "hf", tmp_path / "small"
    write(source, in_groups("llama3"), hf_tensors(in_groups("llama3")))
    convert.convert(source, target, quantize=how, into="safetensors")
    params = load(target)[0]
    assert params.embed_tokens.dtype == jnp.float32
    before = load(source)[0].layers[0].up.kernel
    after = dequantize(params.layers[0].up.kernel, jnp.float32)
    assert 0 < np.linalg.norm(after - before) / np.linalg.norm(before) < 0.1


def test_check_compares_what_both_make_of_a_text(tmp_path, capsys):
    box = Path(jaxserve.__file__).parent / "assets" / "tiny-stories"
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little girl who had a red ball. " * 8)
    command = [str(box), str(tmp_path / "int8"), "--quantize=int8", f"--check={text}"]
    assert convert.main(command) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"perplexity of text: ([\d.]+) -> ([\d.]+) \(([+-].+)%\)", said)
    assert found is not None, said
    assert 1 < float(found[1]) < 100
    assert abs(float(found[3])) < 3
    text.write_text("")
    assert convert.main([str(box), str(tmp_path / "x"), f"--check={text}"]) == 2
    assert "--check: text has fewer than two tokens" in capsys.readouterr().err.replace(
        str(tmp_path) + "/", ""
    )
