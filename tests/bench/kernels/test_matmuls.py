"""`jaxserve bench matmuls`."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.bench import cli
from jaxserve_lab.bench.kernels import matmuls


def test_shapes_are_those_of_all_weights_of_a_layer() -> None:
    assert set(matmuls.shapes("opt-125m")) == {(768, 2304), (768, 768), (768, 3072), (3072, 768)}


@pytest.mark.parametrize("dtype", matmuls.DTYPES)
def test_both_sides_compute_the_same(dtype: str) -> None:
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((4, 64), np.float32))
    weights = jnp.asarray(rng.standard_normal((64, 32), np.float32), dtype)
    sides = [(matmuls._ours, weights.T), (matmuls._xla(0), weights), (matmuls._xla(1), weights.T)]
    first, *others = (np.asarray(jax.jit(run)(x, own)) for run, own in sides)
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-5, atol=1e-5)


def test_a_rate_is_of_our_time_and_the_ratio_is_over_xlas_faster_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"_ours": 2e-3, "in, out": 4e-3, "out, in": 3e-3}
    sides = iter(times.values())

    def timer(*args: object) -> object:
        seconds = next(sides)
        return lambda: seconds

    monkeypatch.setattr(matmuls, "_timer", timer)
    found = matmuls.measure((1000, 100), "float32", 10, 3)
    assert found["ours"] == pytest.approx(1.0) and found["xla"] == pytest.approx(2 / 3)
    assert found["ratio"] == pytest.approx(1.5)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(matmuls, "shapes", lambda model: [(64, 32)])
    monkeypatch.setattr(matmuls, "_MEMORY", 1 << 12)
    monkeypatch.setattr(matmuls, "_LEAST_S", 1e-4)
    command = ["matmuls", "--dtypes=bfloat16", "--rows=1,16", "--rounds=1", "--json"]
    assert cli.main(command) == 0
    out, shown = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert [one["rows"] for one in result["matmuls"]] == [1, 16]
    assert result["read_gb_per_s"] > 0
    assert "| GFLOP/s (over XLA's) | 1 row | 16 rows |" in shown
    assert "| bfloat16, 64 x 32 |" in shown


@pytest.mark.parametrize("flag", ["--dtypes=int8", "--rows=0", "--rows=x", "--rounds=0"])
def test_wrong_flags_are_refused(flag: str) -> None:
    with pytest.raises((SystemExit, cli.UsageError)):
        matmuls.parse([flag])
