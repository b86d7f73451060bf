"""Run by test_sharding.py in a process of its own with 4 CPU devices; prints results as JSON. Its
argument is the lane: what is checked."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from gguf import GGMLQuantizationType as Type

from jaxserve.commands.convert import convert
from jaxserve.models.base import with_quantization
from jaxserve.models.dense import sequence_logits
from jaxserve.models.fused import param_bytes
from jaxserve.models.sharding import make_mesh
from jaxserve.weights import fuse_loaded, load_config, load_params
from tests.models.fixtures import hf_config, load_reference, write_checkpoint
from tests.models.paged import PagedRun
from tests.models.quantized.test_gguf_blocks import written

GROUPED = {**hf_config("llama3"), "hidden_size": 128, "intermediate_size": 128}


class Lane(NamedTuple):
    """What is checked, on how many shards."""

    dense: dict[str, int]
    paged: dict[str, int]
    layout: tuple[str, ...]
    quantized: tuple[str, ...]


# 4 heads each, of opt and deepseek 4 KV heads, of all others 2; a vocabulary of 61. Experts' width
# is cut over 2 or 4 devices; where that is odd, their number.
LANES = {
    "quick": Lane(
        {"gpt_oss": 2},
        {"llama3": 4},
        ("mixtral",),
        ("Q4_K",),
    ),
    "slow": Lane(
        {
            **{"opt": 4, "gemma3": 2, "olmo2": 4, "phi4_mini": 2, "mixtral": 4, "qwen2_moe": 2},
            **{"deepseek_v2": 2, "deepseek_v3": 4, "glm4_moe": 2, "qwen3_5": 2},
        },
        {"mixtral": 4, "gpt_oss": 2, "deepseek_v2_lite": 2, "qwen3_5": 2},
        ("opt", "llama3"),
        ("int8", "fp8"),
    ),
}


def dense_error(name: str, folder: Path, tensor: int) -> float:
    """Largest difference from the reference logits."""
    case, mesh = load_reference(name), make_mesh(tensor)
    params = load_params(folder, case.family, case.config, dtype="float32", mesh=mesh)
    params = fuse_loaded(params, case.family, case.config, mesh)
    run = jax.jit(lambda p, t: sequence_logits(case.family, p, case.config, t, mesh=mesh))
    return float(np.abs(np.asarray(run(params, case.tokens[0])) - case.logits[0]).max())


def paged_error(name: str, folder: Path, tensor: int) -> float:
    """The same through the pool: one prefill of 16 tokens, 8 decodes."""
    case, mesh = load_reference(name), make_mesh(tensor)
    params = load_params(folder, case.family, case.config, dtype="float32", mesh=mesh)
    params = fuse_loaded(params, case.family, case.config, mesh)
    tokens = case.tokens[0]
    run = PagedRun(case.family, case.config, params, [24], 4, mesh)
    out = run.step([(0, tokens[:16])], 1, 16)
    for i in range(16, 24):
        out += run.step([(0, tokens[i : i + 1])], 1, 1)
    return float(np.abs(np.concatenate(out) - case.logits[0][:24]).max())


def layout(name: str, folder: Path, tensor: int) -> dict[str, Any]:
    """What one device holds of some parameters, and whether the loaders agree on it."""
    case, mesh = load_reference(name), make_mesh(tensor)
    options: dict[str, Any] = {"dtype": "float32", "mesh": mesh}
    params = load_params(folder, case.family, case.config, **options)
    with tempfile.TemporaryDirectory() as target:
        convert(folder, Path(target) / "orbax", "float32")
        restored = load_params(Path(target) / "orbax", case.family, case.config, **options)
    whole, drawn = (
        load_params(None, case.family, case.config, dtype="float32", load_format="random", mesh=m)
        for m in (None, mesh)
    )
    same = _same(params, restored)
    params = fuse_loaded(params, case.family, case.config, mesh)
    shard = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, params)
    mlp = getattr(shard.layers[2], "experts", None) or shard.layers[2]
    return {
        "qkv": shard.layers[2].attn.qkv.kernel.shape,
        "o": shard.layers[2].attn.o.kernel.shape,
        "down": mlp.down.kernel.shape,
        "embed": shard.embed_tokens.shape,
        "padding": float(np.abs(np.asarray(params.embed_tokens)[61:]).sum()),
        "orbax_same": same,
        "random_same": _same(
            whole, jax.tree.map(lambda a, b: np.asarray(a)[: b.shape[0]], drawn, whole)
        ),
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(shard)),
        "param_bytes": param_bytes(case.config, "float32", mesh),
    }


def quantized_error(how: str, tensor: int) -> float:
    """Largest difference between the logits of a quantised model on one device and on several, as
    it is quantised at load, or as a GGUF file has it: of blocks of 256 numbers a shard has half."""
    with tempfile.TemporaryDirectory() as where:
        if how == "Q4_K":
            path = written(Path(where) / "m.gguf", {"": Type.Q4_K})
            return _sharded_error(path, "llama3", tensor)
        write_checkpoint(Path(where), GROUPED)
        return _sharded_error(Path(where), "llama3", tensor, how)


def check_quantized_parts(how: str, tensor: int) -> None:
    """Of a model that is quantised at load, and of its packed checkpoint."""
    with tempfile.TemporaryDirectory() as where:
        source, packed = Path(where) / "hf", Path(where) / "packed"
        source.mkdir()
        write_checkpoint(source, GROUPED)
        convert(source, packed, "float32", quantize=how, into="safetensors")
        check_parts(source, tensor, how)
        check_parts(packed, tensor)


def by_number_error(tensor: int) -> float:
    """Largest difference between the logits on one device and on several of which each has some of
    the experts, whose width is odd, with their biases."""
    hf = {**hf_config("gpt_oss"), "intermediate_size": 25}
    with tempfile.TemporaryDirectory() as where:
        write_checkpoint(Path(where), hf)
        bias = check_parts(Path(where), tensor).layers[0].experts.up.bias
        assert bias.addressable_shards[0].data.shape == (bias.shape[0] // tensor, 25)
        return _sharded_error(Path(where), "gpt_oss", tensor)


def check_parts(path: Path, tensor: int, how: str = "") -> Any:
    """That a checkpoint's parameters on several devices are those on one; returns them."""
    family, config, _ = load_config(path)
    config = with_quantization(family, config, how)
    whole, parts = (
        load_params(path, family, config, dtype="float32", mesh=mesh)
        for mesh in (None, make_mesh(tensor))
    )
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(one, np.asarray(other)[: len(one)])
    return parts


def _sharded_error(path: Path, name: str, tensor: int, how: str = "") -> float:
    family, config, _ = load_config(path)
    config = with_quantization(family, config, how)
    tokens, logits = load_reference(name).tokens[0], []
    run = functools.partial(sequence_logits, family, dtype="float32")
    for mesh in (None, make_mesh(tensor)):
        params = load_params(path, family, config, dtype="float32", mesh=mesh)
        params = fuse_loaded(params, family, config, mesh)
        logits.append(jax.jit(lambda p, m=mesh: run(p, config, tokens, mesh=m))(params))
    shard = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, params)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(shard))
    assert stored == param_bytes(config, "float32", make_mesh(tensor))
    if config.quantization is not None:
        assert params.layers[0].down.kernel.axes == ("tensor", None)
    return float(np.abs(np.asarray(logits[0]) - np.asarray(logits[1])).max())


def _same(first: Any, second: Any) -> bool:
    def leaf(a: Any, b: Any) -> bool:
        where = getattr(b, "sharding", None)
        return np.array_equal(a, b) and (where is None or where == a.sharding)

    return all(jax.tree.leaves(jax.tree.map(leaf, first, second)))


def main() -> None:
    """Prints {"dense": {name: error}, "paged": ..., "layout": ..., "quantized": ...}."""
    assert len(jax.devices()) == 4
    lane = LANES[sys.argv[1]]
    results: dict[str, dict[str, Any]] = {"dense": {}, "paged": {}, "layout": {}}
    for name in {**lane.dense, **lane.paged, **dict.fromkeys(lane.layout)}:
        with tempfile.TemporaryDirectory() as where:
            folder = Path(where)
            write_checkpoint(folder, hf_config(name))
            assert load_config(folder)[1] == load_reference(name).config
            if name in lane.dense:
                results["dense"][name] = dense_error(name, folder, lane.dense[name])
            if name in lane.paged:
                results["paged"][name] = paged_error(name, folder, lane.paged[name])
            if name in lane.layout:
                results["layout"][name] = layout(name, folder, 4)
    results["quantized"] = {how: quantized_error(how, 2) for how in lane.quantized}
    if sys.argv[1] == "quick":
        results["dense"]["experts by number"] = by_number_error(4)
        check_quantized_parts("int4:group=32,zero", 2)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
