"""Steps with hidden rows: the same logits however many rows there is room for, and no K and V made
that nobody keeps; and what steps are compiled with on each platform."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.device.batch_layout import Layout, Rows
from jaxserve.engine.device.model_step import make_model_step
from jaxserve.engine.device.sampling_state import Newest
from jaxserve.engine.device.step_model import StepModel, compiler_options
from jaxserve.models.base import Family, ModelConfig, Params
from jaxserve.models.registry import family_for
from jaxserve.pallas_kernels import HIDDEN, KV, format_of, make_pool, pool_format
from jaxserve.pallas_kernels.rowwise.fixed_batches import SIZE
from jaxserve.sched.cache.cache_kinds import ABSORBED, PROJECTED
from jaxserve.weights import load_params
from tests.compiling import OPTIMISED
from tests.engine.harness import SHAPES

ROWS, WIDTH, BLOCK_SIZE, LAYERS = 16, 4, 8, 1
SHAPE = {**SHAPES["opt"], "num_hidden_layers": LAYERS}
NEWEST = Newest(*np.zeros((2, ROWS), np.int32))


@functools.cache
def model() -> tuple[Family, ModelConfig, Params]:
    family = family_for(SHAPE)
    config = family.config_from_hf(SHAPE)
    return (
        family,
        config,
        load_params(None, family, config, dtype=jnp.float32, load_format="random"),
    )


def step_model(read: str) -> StepModel:
    family, config, _ = model()
    return StepModel(
        family,
        config,
        backend="xla",
        mesh=None,
        hidden_read=read,
        max_len=WIDTH * BLOCK_SIZE,
    )


def random_pool() -> jax.Array:
    _, config, _ = model()
    shape = (LAYERS, 2 * ROWS * WIDTH, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pool = make_pool(*shape, jnp.float32)
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return jax.device_put(jnp.asarray(values), pool_format(pool))


def rows(hidden: int, chunk: int = 0) -> Rows:
    """ROWS rows of one token each, the last of `chunk` instead if given; so many of them, here and
    there, have hidden caches, and the chunk has."""
    rng = np.random.default_rng(1)
    kind = np.zeros(ROWS, np.int32)
    kind[rng.permutation(ROWS - 1)[:hidden]] = HIDDEN
    counts = np.ones(ROWS, np.int64)
    if chunk:
        counts[-1], kind[-1] = chunk, HIDDEN
    return Rows(
        counts=counts,
        contexts=np.append(rng.integers(0, WIDTH * BLOCK_SIZE - 1, ROWS - 1), 5),
        tables=rng.permutation(2 * ROWS * WIDTH).reshape(ROWS, 2, WIDTH).astype(np.int32),
        direction=rng.integers(0, 2, ROWS),
        kind=kind,
        tokens=[rng.integers(3, 90, count).tolist() for count in counts],
        slots=np.arange(ROWS),
        emits=1,
    )


def logits(layout: Layout, given: Rows, read: str) -> np.ndarray:
    """[ROWS, vocabulary], in the order of the given rows."""
    _, _, params = model()
    pool, packed = random_pool(), layout.pack(given)
    step = make_model_step(step_model(read), pool_format(pool))
    done = step(params, pool, NEWEST, jnp.asarray(packed.buffer), layout=layout)
    found = done.logits
    out = np.empty((ROWS, found.shape[1]), np.float32)
    out[packed.order] = np.asarray(found)[:ROWS]
    return out


@pytest.mark.parametrize(
    ("tokens", "read"),
    [(ROWS, PROJECTED), (2 * ROWS, ABSORBED)],
    ids=["decodes projected", "absorbed beside a chunk"],
)
def test_few_hidden_rows_are_found_at_the_front(tokens: int, read: str) -> None:
    given = rows(2, chunk=0 if tokens == ROWS else 9)
    few, all_of_them = (
        logits(Layout(tokens, ROWS, WIDTH, ROWS, tokens == ROWS, room), given, read)
        for room in (2, ROWS)
    )
    np.testing.assert_allclose(few, all_of_them, rtol=1e-4, atol=1e-4)


def matmuls(layout: Layout) -> int:
    """Those of the compiled step that give [ROWS, d_model], by XLA, or in batches of SIZE rows, or
    by a kernel: processors without AVX-512 have no kernel for these weights."""
    _, config, params = model()
    pool = random_pool()
    step: Any = make_model_step(step_model(ABSORBED), pool_format(pool))
    given = (params, pool, NEWEST, jnp.zeros(layout.size, jnp.int32))
    text = step.lower(*given, layout=layout).compile(OPTIMISED).as_text()
    found = len(
        re.findall(rf"= f32\[(?:{ROWS}|{SIZE}),{config.d_model}\]\S* (dot|custom-call)\(", text)
    )
    assert found
    return found


def test_where_all_rows_are_hidden_no_new_k_and_v_are_made() -> None:
    beside_kv, alone = (Layout(ROWS, ROWS, WIDTH, ROWS, True, ROWS, kv) for kv in (True, False))
    assert matmuls(alone) == matmuls(beside_kv) - 2 * LAYERS
    given = rows(0)
    given.kind[:] = HIDDEN
    np.testing.assert_allclose(
        logits(alone, given, ABSORBED), logits(beside_kv, given, ABSORBED), rtol=1e-4, atol=1e-4
    )


def test_packed_rows_are_in_the_order_that_steps_count_on() -> None:
    packed = Layout(32, ROWS, WIDTH, ROWS, False, ROWS).pack(rows(3, chunk=9))
    kinds = Layout(32, ROWS, WIDTH, ROWS, False, ROWS).views(packed.buffer)["kind"]
    assert kinds.tolist() == [HIDDEN] * 3 + [KV] * (ROWS - 4) + [HIDDEN]
    assert packed.order[-1] == ROWS - 1


@pytest.mark.parametrize(("platform", "told"), [("cuda", True), ("gpu", True), ("tpu", False)])
def test_gpus_are_told_to_compute_nothing_twice(platform: str, told: bool) -> None:
    devices = [SimpleNamespace(platform=platform)]
    pool_format: Any = SimpleNamespace(sharding=SimpleNamespace(device_set=devices))
    assert ("rematerialization" in compiler_options(pool_format).values()) == told


def test_a_cpu_is_told_nothing() -> None:
    assert jax.devices()[0].platform == "cpu"
    assert compiler_options(format_of(jnp.float32, jnp.zeros((2, 3)).sharding)) == {}
