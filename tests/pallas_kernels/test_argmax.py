"""The likeliest token of each row: NumPy's, by numba and by XLA alone."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import argmax as public
from jaxserve.pallas_kernels.cpu.rowwise import argmax as numba_argmax

INF = np.float32(np.inf)


Argmax = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(params=["numba", "xla"])
def argmax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Argmax:
    if request.param == "xla":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def check(scores: np.ndarray) -> np.ndarray:
        run = jax.jit(lambda x: public(x))  # traced anew for each backend
        given = jnp.asarray(scores)
        assert ("jaxserve_argmax" in run.lower(given).as_text()) is (request.param == "numba")
        return np.asarray(run(given))

    return check


@pytest.mark.parametrize("columns", [1, 511, 2 * numba_argmax.CHUNK + 3])
def test_the_first_of_the_largest(columns: int, argmax: Argmax) -> None:
    rng = np.random.default_rng(columns)
    scores = rng.normal(size=(9, columns)).astype(np.float32)
    scores[1] = rng.integers(-2, 2, columns)  # many are equal
    scores[2, :-1] = -INF
    scores[3, -1] = np.finfo(np.float32).max
    scores[4] = -np.abs(scores[4])
    scores[5] = -0.0
    scores[5, -1] = 0.0  # no more than the first
    scores[6] = -np.finfo(np.float32).max
    got = argmax(scores)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, scores.argmax(axis=1))


def test_rows_without_a_finite_maximum_have_none(argmax: Argmax) -> None:
    scores = np.zeros((9, 700), np.float32)
    scores[0] = np.nan
    scores[1] = -np.float32(np.nan)
    scores[2, 600] = np.nan
    scores[3, 699] = -np.float32(np.nan)  # as x86 makes them
    scores[4, 7] = INF
    scores[5] = -INF
    scores[6] = INF
    scores[7, :600] = -INF
    assert argmax(scores).tolist() == [-1] * 7 + [600, 0]
