"""q, k and v as one projection: whose columns lie where, and that the logits stay what they are."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.attention import FusedAttention
from jaxserve.models.base import with_quantization
from jaxserve.models.dense import sequence_logits
from jaxserve.models.fused import fuse, fused_specs, param_bytes, side_by_side
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for
from jaxserve.models.sharding import pool_kv_heads
from jaxserve.pallas_kernels.backends import platform_backend
from jaxserve.pallas_kernels.rowwise.fixed_batches import SIZE
from jaxserve.weights import fuse_loaded, load_config, load_params, transpose_loaded
from tests.models.fixtures import hf_config, load_reference, write_checkpoint


@settings(max_examples=10)
@given(
    kv=st.integers(1, 6),
    group=st.integers(1, 4),
    shards=st.integers(1, 6),
    head_dim=st.sampled_from((2, 4)),
)
def test_each_shard_has_its_own_heads(kv, group, shards, head_dim):
    """Columns are marked with the head that they belong to; see `pool_kv_heads` for which is
    whose."""
    hf = hf_config("llama3")
    hf |= {"num_attention_heads": kv * group, "num_key_value_heads": kv, "head_dim": head_dim}
    config = family_for(hf).config_from_hf(hf)
    try:
        pool = pool_kv_heads(config, shards)
    except ValueError:
        return
    if config.num_heads % shards:
        return

    def marked(heads, base):
        return np.repeat(base + np.arange(heads, dtype=np.float32), head_dim)[None]

    parts = (marked(kv * group, 0), marked(kv, 1000), marked(kv, 2000))
    fused = np.asarray(side_by_side(parts, config, shards))
    for shard, columns in enumerate(np.split(fused[0], shards)):
        heads = columns.reshape(-1, head_dim)
        assert (heads == heads[:, :1]).all()
        queries, mine = kv * group // shards, pool // shards
        # Pool head p is a copy of KV head p // (pool / kv).
        kv_heads = (shard * mine + np.arange(mine)) // (pool // kv)
        want = [shard * queries + np.arange(queries), 1000 + kv_heads, 2000 + kv_heads]
        np.testing.assert_array_equal(heads[:, 0], np.concatenate(want))


# One of each way to make queries, keys and values.
APART = ("opt", "qwen3", "olmo2", "deepseek_v2")


@pytest.mark.parametrize("name", APART)
def test_apart_gives_the_same_logits(name):
    case = load_reference(name)
    got = sequence_logits(case.family, case.stored, case.config, case.tokens[0])
    np.testing.assert_allclose(got, case.logits[0], atol=1e-4, rtol=0)


def test_loaded_parameters_are_fused_in_place(tmp_path):
    """As `fuse` does; what is no longer wanted is gone, all else is as it was."""
    write_checkpoint(tmp_path, hf_config("qwen2"))
    family, config, _ = load_config(tmp_path)
    stored = load_params(tmp_path, family, config, dtype="float32")
    want = fuse(stored, config)
    jax.block_until_ready(want)
    got = fuse_loaded(stored, family, config)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for before, after in zip(stored.layers, got.layers, strict=True):
        assert isinstance(after.attn, FusedAttention)
        attn = before.attn
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((attn.q, attn.k, attn.v)))
        assert after.attn.o is attn.o
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(got)) == param_bytes(config, "float32")


@pytest.mark.parametrize("how", ["", "int8"])
def test_latent_projections_are_cut_by_heads_in_place(tmp_path, how):
    """As `fuse` does, and as the specs say, of weights that are quantised, too."""
    write_checkpoint(tmp_path, hf_config("deepseek_v2"))
    family, plain, _ = load_config(tmp_path)
    config = with_quantization(family, plain, how)
    stored = load_params(tmp_path, family, config, dtype="bfloat16")
    want, kernel = fuse(stored, config), stored.layers[0].attn.kv_b.kernel
    jax.block_until_ready(want)
    got = fuse_loaded(stored, family, config)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(kernel))
    shapes = jax.tree.map(lambda spec: spec.shape, fused_specs(family, config, 1).layers[0].attn)
    assert jax.tree.map(lambda leaf: leaf.shape, got.layers[0].attn) == shapes
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(got)) == param_bytes(config, "bfloat16")


@pytest.mark.parametrize(
    ("name", "shards", "columns"),
    [
        ("opt-13b", 1, 3 * 5120),
        ("llama-3-8b", 4, 4096 + 2 * 1024),
        ("qwen2.5-0.5b", 2, (14 + 2 * 2) * 64),
        ("yi-6b", 8, (32 + 2 * 8) * 128),  # 4 KV heads, each there twice
    ],
)
def test_specs(name, shards, columns):
    hf = preset(name)
    family = family_for(hf)
    config = family.config_from_hf(hf)
    specs = fused_specs(family, config, shards).layers[0].attn.qkv
    assert specs.kernel.shape == (config.d_model, columns)
    assert specs.kernel.axes == ("embed", "heads")
    assert specs.kernel.granule * shards == columns
    assert specs.bias is None or specs.bias.shape == (columns,)


def test_one_matmul_reads_x():
    case = load_reference("opt")
    tokens = jax.ShapeDtypeStruct((4,), np.int32)

    def matmuls(params):
        run = jax.jit(lambda p, t: sequence_logits(case.family, p, case.config, t))
        text = run.lower(params, tokens).as_text()
        width = case.config.d_model
        # In batches of SIZE rows on processors without AVX-512.
        return sum(text.count(f"(tensor<{n}x{width}xf32>, tensor<{width}x") for n in (4, SIZE))

    fewer = matmuls(case.stored) - matmuls(case.params)
    assert fewer == 2  # of the one layer that is traced


@pytest.mark.parametrize("apart", [False, True])
def test_kernels_that_lie_by_columns_give_the_same_logits(apart):
    """Where the platform's kernels read them so. K's and V's that are apart stay as they are."""
    hf = hf_config("llama3") | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    family = family_for(hf)
    config = family.config_from_hf(hf)

    def made(dtype):
        params = load_params(None, family, config, dtype=dtype, load_format="random")
        return params if apart else fuse_loaded(params, family, config)

    tokens = jax.numpy.arange(3)
    for dtype in ("float32", "bfloat16"):
        want = sequence_logits(family, made(dtype), config, tokens)
        params = transpose_loaded(made(dtype), dtype)
        layer = params.layers[0]
        turned = platform_backend().by_columns is not None
        assert layer.down.transposed == layer.attn.o.transposed == turned
        assert layer.down.kernel.shape == ((64, 96) if turned else (96, 64))
        if apart:
            assert not (layer.attn.k.transposed or layer.attn.v.transposed)
        got = sequence_logits(family, params, config, tokens)
        np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max(), rtol=0)
