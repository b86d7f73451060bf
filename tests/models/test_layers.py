"""Each layer has arrays of its own, which are read where they are."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxserve.models.base import ParamSpec
from jaxserve.models.dense import sequence_logits
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for
from jaxserve.models.rope import Rope, angles
from jaxserve.pallas_kernels import rotate
from jaxserve.weights import load_config, load_params
from jaxserve.weights.orbax_io import save_orbax
from tests.models.fixtures import assert_same, hf_config, load_reference, write_checkpoint


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


def test_layers_are_read_where_they_are():
    """Not out of a stack, into which a scan would copy them; see `over_layers`."""
    case = load_reference("opt")
    inputs = jax.ShapeDtypeStruct((4,), np.int32)
    run = jax.jit(lambda p, t: sequence_logits(case.family, p, case.config, t))
    shape = "x".join(map(str, (case.config.num_layers, *case.params.layers[0].up.kernel.shape)))
    assert f"tensor<{shape}xf32>" not in run.lower(case.params, inputs).as_text()


def test_orbax_keeps_layers_apart(tmp_path: Path):
    """What is saved is restored, each array under a name with its layer's number."""
    write_checkpoint(tmp_path, hf_config("opt"))
    family, config, _ = load_config(tmp_path)
    params = load_params(None, family, config, dtype="float32", load_format="random", seed=3)
    save_orbax(tmp_path, params)
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = dict(checkpointer.metadata(tmp_path / "params").item_metadata.tree)
    last = f"layers.{config.num_layers - 1}.attn.q.kernel"
    assert stored[last].shape == params.layers[-1].attn.q.kernel.shape
    assert len(stored) == len(jax.tree.leaves(params))
    restored = load_params(tmp_path, family, config, dtype="float32", load_format="orbax")
    assert_same(restored, params)


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
