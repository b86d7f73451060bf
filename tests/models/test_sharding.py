"""Tensor parallelism: rules, KV heads fewer than shards, and logits on 4 virtual CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxserve.models.registry import family_for
from jaxserve.models.sharding import check_tensor, constrain, make_mesh, pool_kv_heads, spec
from tests.compiling import virtual_devices
from tests.models import sharded_checks
from tests.models.fixtures import ROOT, hf_config

TOLERANCE = 1e-4


def run_checks(lane):
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": virtual_devices(4),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.sharded_checks", lane],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("lane", ["quick", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_four_devices(lane):
    """One test a lane, so that the process runs once however the tests are spread over workers."""
    results, wanted = run_checks(lane), sharded_checks.LANES[lane]
    more = lane == "quick"
    check_errors(results["dense"], {*wanted.dense} | ({"experts by number"} if more else set()))
    check_errors(results["paged"], {*wanted.paged})
    check_errors(results["quantized"], {*wanted.quantized})
    assert results["layout"].keys() == {*wanted.layout}
    for name, found in results["layout"].items():
        check_layout(parse(name), found)


def check_errors(errors, expected):
    """Logits of each case are within the tolerance of the reference."""
    assert errors.keys() == expected
    for name, error in errors.items():
        assert error < TOLERANCE, name


def check_layout(config, found):
    """Each of 4 devices holds its part, whichever way the parameters were loaded."""
    # A head each of q, k and v: llama3's two KV heads are there twice.
    assert found["qkv"] == [32, 3 * config.head_dim]
    assert found["o"] == [8, 32]
    experts = [config.experts.num_experts] if config.experts else []
    assert found["down"] == [*experts, config.d_ff // 4, 32]
    assert found["embed"] == [16, 32]  # 61 rows padded to 64
    assert found["padding"] == 0.0
    assert found["orbax_same"]
    assert found["random_same"]
    assert found["bytes"] == found["param_bytes"]


def parse(name, **change):
    hf = {**hf_config(name), **change}
    return family_for(hf).config_from_hf(hf)


def test_rules():
    assert spec(("layers", "embed", "heads")) == P(None, None, "tensor")
    with pytest.raises(KeyError):
        spec(("no such axis",))


def test_mesh_errors():
    too_many = len(jax.devices()) + 1
    for tensor in (0, too_many):
        with pytest.raises(ValueError, match=rf"mesh\.tensor must be between 1 .*got {tensor}"):
            make_mesh(tensor)


def test_no_mesh_leaves_arrays_alone():
    x = jax.numpy.ones((2, 3))
    assert constrain(x, None, "heads", None) is x


def test_models_that_do_not_fit_the_mesh():
    with pytest.raises(ValueError, match=r"attention heads \(4\)"):
        check_tensor(parse("opt"), 3)
    with pytest.raises(ValueError, match=r"feed-forward width \(50\)"):
        check_tensor(parse("llama3", intermediate_size=50), 4)
    with pytest.raises(ValueError, match=r"neither the width .* \(25\) nor their number \(6\)"):
        check_tensor(parse("qwen2_moe", intermediate_size=60), 4)
    with pytest.raises(ValueError, match=r"shared expert's width \(50\)"):
        check_tensor(parse("qwen2_moe", shared_expert_intermediate_size=50), 4)
    odd = parse("llama3", num_attention_heads=12, num_key_value_heads=6)
    assert pool_kv_heads(odd, 4) == 12
    with pytest.raises(ValueError, match="6 KV heads repeated to 24"):
        pool_kv_heads(odd, 8)


@given(kv=st.integers(1, 16), group=st.integers(1, 16), tensor=st.integers(1, 16))
def test_pool_heads_divide_evenly(kv, group, tensor):
    config = parse("llama3", num_attention_heads=kv * group, num_key_value_heads=kv, head_dim=8)
    try:
        heads = pool_kv_heads(config, tensor)
    except ValueError:
        # Then no number of repeats that the query heads allow is divisible by the shards.
        assert all(kv * r % tensor for r in range(1, group + 1) if group % r == 0)
        return
    assert heads % tensor == 0
    assert heads % kv == 0
    assert (kv * group) % heads == 0
    # Query head h still reads its own KV head after the repetition.
    repeats, per_pool_head = heads // kv, kv * group // heads
    assert all((h // per_pool_head) // repeats == h // group for h in range(kv * group))
