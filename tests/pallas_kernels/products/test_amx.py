"""Products on AMX: bit for bit as the instruction adds up, and a row's the same in any company."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.cpu import backend, dots, numba_ffi
from jaxserve.pallas_kernels.cpu.amx import instructions, plan, products

needs_amx = pytest.mark.skipif(
    not instructions.usable(), reason="no AMX here, or no leave to use it"
)
COMPANY = (1, 2, 15, 16, 17, 128, 300)  # rows of a call
MOST = max(COMPANY)
OUTPUTS = 200  # several shares, the last tiles of which overlap
LEAST = 2.0**-126  # what is smaller counts as 0


class Stored(NamedTuple):
    """How weights are stored, and the dtype of x."""

    bits: int
    groups: int = 1
    beside: str = ""
    x: str = "bfloat16"


KINDS = [
    Stored(16),
    Stored(8),
    Stored(4, 20),
    Stored(4, 5, "zero"),
    Stored(8, 5, "minimum", "float32"),
    Stored(4, 20, "zero", "float32"),
]


def _rows(count: int, inputs: int, dtype: str) -> jax.Array:
    rng = np.random.default_rng(count)
    return jnp.asarray(rng.normal(size=(count, inputs)), dtype)


def _weights(stored: Stored, inputs: int, outputs: int = OUTPUTS, seed: int = 0) -> list[Any]:
    """Operands behind x."""
    rng, shape = np.random.default_rng(seed), (outputs, stored.groups)
    if stored.bits == 16:
        return [jnp.asarray(rng.normal(size=(outputs, inputs)), jnp.bfloat16)]
    given = [rng.integers(-128, 128, (outputs, inputs * stored.bits // 8)).astype(np.int8)]
    given.append(rng.random(shape).astype(np.float32))
    if stored.beside == "zero":
        given.append(rng.integers(-8, 8, shape).astype(np.int8))
    elif stored.beside == "minimum":
        given += [None, rng.normal(size=shape).astype(np.float32)]
    else:
        given.append(None)
    return [one if one is None else jnp.asarray(one) for one in given]


def _product(stored: Stored, x: jax.Array, given: list[Any]) -> np.ndarray:
    if stored.bits == 16:
        return np.asarray(products.skinny_matmul(x, *given, transposed=True))
    return np.asarray(products.few_bits_matmul(x, *given))


def _flushed(numbers: np.ndarray) -> np.ndarray:
    return np.where(np.abs(numbers) < LEAST, np.float32(0), numbers)


def _instruction(c: np.ndarray, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """TDPBF16PS, in float32: c [rows, outputs] + x [rows, 32] @ weights [outputs, 32].T. Products
    of two bfloat16 are float32, so that to fuse them with a sum rounds as the sum does."""
    halves = []
    for half in range(2):
        total = np.zeros_like(c)
        for i in range(half, instructions.DEPTH, 2):
            total = _flushed(total + _flushed(x[:, i, None]) * _flushed(weights[None, :, i]))
        halves.append(total)
    return _flushed(c + _flushed(halves[0] + halves[1]))


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _expected(stored: Stored, x: jax.Array, given: list[Any]) -> np.ndarray:
    """In the order that the kernel has."""
    rounded = x.astype(jnp.bfloat16)
    parts = [np.asarray(rounded, np.float32)]
    if stored.x == "float32":
        parts.append(np.asarray((x - rounded).astype(jnp.bfloat16), np.float32))
    if stored.bits == 16:
        (weights,) = given
    else:
        weights, scale, zero, minimum = (
            [None if one is None else np.asarray(one) for one in given] + [None]
        )[:4]
        if stored.bits == 4:
            weights = np.stack([weights << 4 >> 4, weights >> 4], axis=-1).reshape(len(weights), -1)
    weights = np.asarray(weights, np.float32)
    sums = np.zeros((len(x), len(weights)), np.float32)
    size = x.shape[1] // stored.groups
    for group in range(stored.groups):
        c, of_x = np.zeros_like(sums), np.zeros((len(x), 1), np.float32)
        for i in range(group * size, (group + 1) * size, instructions.DEPTH):
            here = slice(i, i + instructions.DEPTH)
            for part in parts:
                c = _instruction(c, part[:, here], weights[:, here])
                for column in part[:, here].T:
                    of_x[:, 0] += column
        if stored.bits == 16:
            return c
        sums = _fused(c, scale[:, group], sums)
        if zero is not None:
            sums = _fused(of_x, -zero[:, group].astype(np.float32) * scale[:, group], sums)
        if minimum is not None:
            sums = _fused(of_x, minimum[:, group], sums)
    return sums


@needs_amx
@pytest.mark.parametrize("stored", KINDS, ids=str)
def test_bits(stored: Stored) -> None:
    """Of all numbers of rows, each of which has the same."""
    inputs = 640
    x, given = _rows(MOST, inputs, stored.x), _weights(stored, inputs)
    x = x.at[3].mul(1e-38)  # some are denormals
    among = _product(stored, x, given)
    np.testing.assert_array_equal(among[:20], _expected(stored, x[:20], given))
    for count in COMPANY:
        for first in (0, MOST - count):
            some = _product(stored, x[first : first + count], given)
            np.testing.assert_array_equal(some, among[first : first + count])


@needs_amx
@pytest.mark.parametrize("stored", [KINDS[0], KINDS[4]], ids=str)
def test_more_rows_than_a_cache_has_room_for(stored: Stored) -> None:
    inputs = plan.ROWS // 64
    x, given = _rows(MOST, inputs, stored.x), _weights(stored, inputs, 40)
    among = _product(stored, x, given)
    for first, count in ((0, 1), (60, 10), (150, 40)):
        some = _product(stored, x[first : first + count], given)
        np.testing.assert_array_equal(some, among[first : first + count])


@needs_amx
@pytest.mark.parametrize("stored", [KINDS[0], KINDS[-1]], ids=str)
@pytest.mark.parametrize("sizes", [[1, 0, 13, 2], [0, 40, 0, 16], [0, 0, 0, 0]], ids=str)
def test_groups_of_rows(stored: Stored, sizes: list[int]) -> None:
    """As each group alone, and zeros behind the last."""
    inputs = 640
    own = [_weights(stored, inputs, seed=seed) for seed in range(len(sizes))]
    x = _rows(sum(sizes) + 2 * plan.TAIL + 3, inputs, stored.x)
    given = [None if one[0] is None else jnp.stack(one) for one in zip(*own, strict=True)]
    product = products.grouped_matmul if stored.bits == 16 else products.few_bits_grouped_matmul
    got, first = np.asarray(product(x, *given, jnp.asarray(sizes, jnp.int32))), 0
    for size, weights in zip(sizes, own, strict=True):
        if size:
            alone = _product(stored, x[first : first + size], weights)
            np.testing.assert_array_equal(got[first : first + size], alone)
        first += size
    assert (got[first:] == 0).all()


@pytest.fixture
def no_helpers() -> Iterator[None]:
    """Kernels have one thread."""
    numba_ffi._start_helpers()
    (memory,) = numba_ffi._helpers
    helpers = memory[-(memory.ctypes.data // 8) % numba_ffi._HELPER :]
    count, helpers[0] = int(helpers[0]), 0
    yield
    helpers[0] = count


@needs_amx
@pytest.mark.parametrize("stored", [KINDS[0], KINDS[4]], ids=str)
def test_one_thread_or_several(stored: Stored, request: pytest.FixtureRequest) -> None:
    """And several callers at once."""
    x, given = _rows(70, 640, stored.x), _weights(stored, 640)
    among = _product(stored, x, given)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: _product(stored, x, given), range(40)):
            np.testing.assert_array_equal(got, among)
    request.getfixturevalue("no_helpers")
    np.testing.assert_array_equal(_product(stored, x, given), among)


@needs_amx
def test_what_is_taken() -> None:
    """Whatever the number of rows; what is not is multiplied by `dots`."""

    def kernel(outputs: int, inputs: int, rows: int = 1, dtype: Any = jnp.bfloat16) -> Any:
        weights = jax.ShapeDtypeStruct((outputs, inputs), dtype)
        return backend.BACKEND.skinny_matmul(rows, weights, transposed=True)

    for rows in COMPANY:
        assert kernel(16, 32, rows) is products.skinny_matmul
        assert kernel(15, 32, rows) is dots.skinny_matmul
        assert kernel(16, 32, rows, jnp.float32) is dots.skinny_matmul
    assert kernel(16, 48) is None


def test_without_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system to use AMX, other kernels multiply."""
    # `usable` keeps what it has found: nothing that is changed here may stay there.
    told = backend.BACKEND.built_for()
    monkeypatch.setattr(instructions, "_permitted", lambda: False)
    assert not instructions.usable.__wrapped__()
    used = instructions.usable()
    monkeypatch.setattr(instructions, "usable", lambda: False)
    weights = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)
    assert backend.BACKEND.skinny_matmul(1, weights, transposed=True) is dots.skinny_matmul
    assert (told != backend.BACKEND.built_for()) == used
