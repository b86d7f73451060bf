"""Each layer has arrays of its own, and the ways to run the layers give the same."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxserve.models.base import ParamSpec
from jaxserve.models.dense import sequence_logits
from jaxserve.models.forward import over_layers
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for
from jaxserve.models.rope import Rope, angles
from jaxserve.pallas_kernels import rotate
from jaxserve.weights import load_config, load_params
from jaxserve.weights.orbax_io import save_orbax
from tests.models.fixtures import NAMES, hf_config, hf_tensors, load_reference, write_checkpoint

FAMILIES = ("opt", "opt_post_norm", "llama3", "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_a_layers_arrays_are_its_own(name):
    """As many elements as its parts of the checkpoint's tensors have, in each way to load."""
    hf = hf_config(name)
    case = load_reference(name)
    drawn = load_params(None, case.family, case.config, dtype="float32", load_format="random")
    # Of 4 heads and 2 KV heads.
    split = {"qkv_proj": ((0, 4), (4, 6), (6, 8)), "gate_up_proj": ((0, 1), (1, 2))}
    stored = hf_tensors(hf)
    for tensor in list(stored):
        parts = split.get(tensor.split(".")[-2], ())
        if ".experts.gate_up_proj" in tensor:  # columns of both by turns
            parts = split["gate_up_proj"]
        whole = stored.pop(tensor)
        rows = len(whole) // max((end for _, end in parts), default=1)
        for begin, end in parts or ((0, 1),):
            stored[f"{tensor} {begin}"] = whole[begin * rows : end * rows]
    elements: Counter[str] = Counter()
    for tensor, part in stored.items():  # all experts' of a layer are one array
        elements[re.sub(r"\.experts\.\d+\.", ".experts.", tensor)] += part.size
    for params in (case.stored, drawn, case.family.param_specs(case.config)):
        assert isinstance(params.layers, tuple)
        assert len(params.layers) == case.config.num_layers
        for index, layer in enumerate(params.layers):
            sizes = [size for tensor, size in elements.items() if f"layers.{index}." in tensor]
            assert sorted(leaf.size for leaf in jax.tree.leaves(layer)) == sorted(sizes)


@pytest.mark.parametrize("name", ["opt-13b", "llama-3-8b"])
def test_no_leaf_has_an_axis_of_layers(name):
    """These have more layers than heads, or as many, so that shapes alone would not tell."""
    hf = preset(name)
    family = family_for(hf)
    specs = family.param_specs(family.config_from_hf(hf))
    for spec in jax.tree.leaves(specs.layers):
        assert isinstance(spec, ParamSpec)
        assert len(spec.shape) == len(spec.axes) <= 2
        assert "layers" not in spec.axes
    first, *others = specs.layers
    assert all(layer == first for layer in others)


def test_layers_run_in_order_with_their_numbers():
    layers = tuple({"w": np.float32(w)} for w in (2.0, 3.0, 5.0))

    def step(state, layer, index):
        return state * layer["w"] + index

    got = jax.jit(lambda x: over_layers(step, x, layers))(np.float32(1.0))
    assert got == ((1 * 2 + 0) * 3 + 1) * 5 + 2


def test_layers_are_read_where_they_are():
    """Not out of a stack, into which a scan would copy them; see `over_layers`."""
    case = load_reference("opt")
    inputs = jax.ShapeDtypeStruct((4,), np.int32)
    run = jax.jit(lambda p, t: sequence_logits(case.family, p, case.config, t))
    shape = "x".join(map(str, (case.config.num_layers, *case.params.layers[0].up.kernel.shape)))
    assert f"tensor<{shape}xf32>" not in run.lower(case.params, inputs).as_text()


@pytest.mark.parametrize("name", ["opt", "qwen3"])
def test_orbax_keeps_layers_apart(tmp_path: Path, name):
    """What is saved is restored, each array under a name with its layer's number."""
    write_checkpoint(tmp_path, hf_config(name))
    family, config, _ = load_config(tmp_path)
    params = load_params(None, family, config, dtype="float32", load_format="random", seed=3)
    save_orbax(tmp_path, params)
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = dict(checkpointer.metadata(tmp_path / "params").item_metadata.tree)
    last = f"layers.{config.num_layers - 1}.attn.q.kernel"
    assert stored[last].shape == params.layers[-1].attn.q.kernel.shape
    assert len(stored) == len(jax.tree.leaves(params))
    restored = load_params(tmp_path, family, config, dtype="float32", load_format="orbax")
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_a_step_on_a_cpu_computes_each_angle_once():
    """However many layers and heads read it; and as for a token alone."""
    rope, positions = Rope(), 7 * jnp.arange(64)

    def layers(positions, x):
        rotation = angles(rope, 8, positions)
        for _ in range(3):
            x = rotate(x * x, *rotation)
        return x, rotation

    x = np.ones((64, 2, 8), np.float32)
    compiled = jax.jit(layers).lower(positions, x).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="jaxserve_angles"') == 1
    got = compiled(positions, x)[1]
    for i in (0, 1, 37, 63):
        for many, one in zip(got, angles(rope, 8, positions[i : i + 1]), strict=True):
            np.testing.assert_array_equal(many[i], one[0])
