"""What is only numba's: tiles of queries, heads cut into shares, threads, products of few rows."""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve.pallas_kernels import AttentionBatch, has_skinny_matmul, skinny_matmul
from jaxserve.pallas_kernels.cpu import attention, dots, numba_ffi
from jaxserve.pallas_kernels.cpu.amx import instructions, products
from jaxserve.pallas_kernels.cpu.pairs import has_pairs, has_vectors
from tests.pallas_kernels import edges
from tests.pallas_kernels.batches import Shape, make_batch, steps
from tests.pallas_kernels.cases import BACKENDS, Case
from tests.pallas_kernels.conformance import PAGED
from tests.pallas_kernels.edges import Edge

M_PERTURB = -6  # of glibc's mallopt: new and freed memory are filled with what it is given
# Groups of heads and a head_dim that fill no whole vectors; tiles of queries and of context.
LONG = Case("long", Shape(6, 2, head_dim=64, rows=4, width=20, tokens=150), window=40, cap=2.0)
WHOLE = Case("whole", Shape(4, 4, head_dim=64, rows=4, width=20, tokens=150))
needs_vectors = pytest.mark.skipif(
    not has_vectors(), reason="this processor has no vectors of 512 bits"
)
needs_pairs = pytest.mark.skipif(
    not has_pairs(), reason="this processor does not multiply pairs of bfloat16"
)


@pytest.fixture(autouse=True)
def _memory_of_nobody() -> Iterator[None]:
    """What kernels read of memory that is not theirs any more, or has never been, shows."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(M_PERTURB, 0xA5)
    yield
    mallopt(M_PERTURB, 0)


@pytest.mark.parametrize("case", [LONG, WHOLE], ids=lambda case: case.name)
@pytest.mark.parametrize("edge", [edges.prompt, edges.any_order, edges.far_chunks])
def test_chunks_of_more_than_one_tile(case: Case, edge: Edge) -> None:
    assert case.shape.tokens > attention.TILE
    PAGED.check("numba", case, edge(case.shape, PAGED.kind), 1)


def test_drawn_steps_of_long_chunks() -> None:
    @settings(max_examples=BACKENDS["numba"])
    @given(step=steps(LONG.shape))
    def run(step: tuple[AttentionBatch, int]) -> None:
        PAGED.check("numba", LONG, *step)

    run()


@pytest.mark.parametrize("context", [1, 33, 2048])
def test_a_single_rows_heads_are_cut(context: int) -> None:
    """From one share to one a head."""
    case = Case("one-row", Shape(6, 6, head_dim=64, block_size=32, rows=1, width=64, tokens=1))
    assert 33 * 6 * 64 < attention.ALONE < 2048 * 6 * 64
    batch = make_batch(case.shape, [(context, 1)], [1], 1, np.random.default_rng(context))
    PAGED.check("numba", case, batch, context)


def test_several_threads_at_once() -> None:
    """Calls share nothing but the threads that compute."""
    case = Case("many", Shape(8, 8, head_dim=64, block_size=32, rows=4, width=16, tokens=4))
    lengths = [(512, 1), (500, 1), (7, 1), (400, 1)]
    batches = [
        make_batch(case.shape, lengths, [0, 1, 0, 1], 4, np.random.default_rng(seed))
        for seed in range(12)
    ]
    PAGED.check("numba", case, batches[0], 0)
    with ThreadPoolExecutor(4) as pool:
        for found in [
            pool.submit(PAGED.check, "numba", case, batch, seed)
            for seed, batch in enumerate(batches)
        ]:
            found.result()


# Panels: of one tile of rows or several, whole or not; the same of columns and of depth.
@needs_pairs
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        *((1, (64, 96)), (2, (1024, 1056)), (3, (64, 96)), (4, (1024, 1056))),
        *((5, (64, 32)), (8, (192, 416)), (13, (96, 160)), (128, (160, 384))),
    ],
)
def test_skinny_matmul(rows: int, shape: tuple[int, int]) -> None:
    """Within float32's rounding of the product in float64; of one share and of several."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, shape[0])), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    assert has_skinny_matmul(rows, weights, transposed=False)
    got = jax.jit(skinny_matmul, static_argnums=2)(x, weights, False)
    assert got.dtype == jnp.float32
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    assert np.abs(np.asarray(got) - want).max() <= 1e-6 * np.abs(want).max() * shape[0] ** 0.5


@needs_vectors
@pytest.mark.parametrize(
    ("rows", "shape"), [(3, (64, 32)), (8, (32, 416)), (13, (97, 160)), (64, (768, 384))]
)
def test_skinny_matmul_of_float32(rows: int, shape: tuple[int, int]) -> None:
    """And what training needs of them."""
    rng = np.random.default_rng(rows)
    x, dx = (jnp.asarray(rng.normal(size=(rows, shape[0])), jnp.float32) for _ in range(2))
    weights = jnp.asarray(rng.normal(size=shape), jnp.float32)
    assert has_skinny_matmul(rows, weights, transposed=False)
    got = jax.jit(skinny_matmul, static_argnums=2)(x, weights, False)
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
    assert np.abs(np.asarray(got) - want).max() <= 1e-6 * np.abs(want).max() * shape[0] ** 0.5
    _, along = jax.jvp(lambda x: skinny_matmul(x, weights, False), (x,), (dx,))
    np.testing.assert_allclose(along, dx @ weights, rtol=1e-3, atol=1e-3)
    slope = jax.grad(lambda w: skinny_matmul(x, w, False).sum())(weights)
    np.testing.assert_allclose(slope, np.tile(x.sum(0)[:, None], shape[1]), rtol=1e-3, atol=1e-3)


def test_products_that_skinny_matmul_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = jnp.zeros((64, 64), jnp.bfloat16)

    def taken(weights: jax.Array) -> bool:
        found = {has_skinny_matmul(rows, weights, transposed=False) for rows in (1, 5, 129)}
        assert len(found) == 1, "rows would depend on how many there are"
        return found.pop()

    assert taken(weights) is has_pairs()
    assert taken(weights.astype(jnp.float32)) is has_vectors()
    assert not taken(weights[:, :48])
    assert not taken(weights[:63])  # no pairs
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", dict)
    assert not taken(weights)


def test_helpers_help_whoever_calls() -> None:
    """Those who sleep are woken, and several callers at once have what is theirs."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(2, 512)), jnp.bfloat16)
    weights = [jnp.asarray(rng.normal(size=(2048, 512)), jnp.bfloat16) for _ in range(4)]
    product = jax.jit(lambda w: dots.skinny_matmul(x, w, transposed=True))
    alone = [np.asarray(product(w)) for w in weights]

    def call(number: int) -> bool:
        return all((np.asarray(product(weights[number])) == alone[number]).all() for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))
    (memory,) = numba_ffi._helpers
    helpers = memory[-(memory.ctypes.data // 8) % numba_ffi._HELPER :]
    asleep = helpers[numba_ffi._HELPER + numba_ffi._ASLEEP :: numba_ffi._HELPER][: helpers[0]]
    deadline = time.monotonic() + 60
    while not asleep.all():
        assert time.monotonic() < deadline, "helpers look for work for ever"
    assert call(0)


def test_denormals_are_zero_in_all_threads() -> None:
    """As in XLA's, whoever computes a share."""
    x, q = jnp.full((64, 64), 2.0**-8, jnp.bfloat16), jnp.ones((4096, 64), jnp.int8)
    product = jax.jit(dots.few_bits_matmul)
    for _ in range(20):
        assert (np.asarray(product(x, q, jnp.full((4096, 1), 2.0**-126), None)) == 0).all()


def test_what_is_kept_belongs_to_a_jaxlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the functions are that XLA offers is in the machine code."""
    before = numba_ffi.digest()
    other = tmp_path / "c_api.h"
    other.write_text(numba_ffi._HEADER.read_text() + "// one more\n")
    monkeypatch.setattr(numba_ffi, "_HEADER", other)
    assert numba_ffi.digest() != before


def test_parts_of_kernels_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba finds their code by them, whichever process has compiled it."""
    monkeypatch.setattr(numba_ffi, "_start_helpers", lambda: None)
    monkeypatch.setattr(numba_ffi, "_compiled", lambda *_: 0)
    monkeypatch.setattr(numba_ffi, "_capsule", lambda *_: None)
    monkeypatch.setattr(numba_ffi.llvm, "add_symbol", lambda *_: None)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    register, names = numba_ffi.register, []

    def seen(name: str, plan: Any, share: Any, *files: str, parts: Any = ()) -> str:
        register(name, plan, share, *files, parts=parts)
        names.extend(part.py_func.__qualname__ for part in (plan, share, *parts))
        return name

    monkeypatch.setattr(numba_ffi, "register", seen)
    for bits, parts in ((4, 4), (8, 2), (8, 0)):
        inspect.unwrap(dots.target)(bits=bits, parts=parts, zeros=False)
    monkeypatch.setattr(instructions, "usable", lambda: True)
    for bits in (4, 8):
        inspect.unwrap(products.target)(bits=bits)
    assert len(set(names)) == len(names) == 3 * 3 + 2 * 7


USES = """
import sys
import jax.numpy as jnp
import numpy as np
from jaxserve.pallas_kernels.cpu import dots, numba_ffi

numba_ffi._start_helpers()
for bits in map(int, sys.argv[1:]):
    x, scale = jnp.ones((1, 576), jnp.bfloat16), jnp.ones((8192, 18))
    q = jnp.full((8192, 576 * bits // 8), 0x11 if bits == 4 else 1, jnp.int8)
    y = np.asarray(dots.few_bits_matmul(x, q, scale, None))
    assert (y == 576).all(), (bits, y)
"""


@pytest.mark.slow
@needs_pairs
def test_kernels_of_several_processes_stand_beside_each_other(tmp_path: Path) -> None:
    """Two processes keep one each on disk; the last finds both there."""
    where = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for bits in ([], ["4"], ["8"], ["4", "8"]):
        subprocess.run([sys.executable, "-c", USES, *bits], env=where, check=True, timeout=300)
