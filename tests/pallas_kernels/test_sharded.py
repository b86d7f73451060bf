"""Heads sharded over virtual devices give what one device gives, with every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import virtual_devices


@pytest.mark.parametrize(
    ("backend", "head_dim", "pairs"),
    [
        ("numba", "64", ["2:24", "4:4"]),
        pytest.param("triton-interpret", "16", ["4:24"], marks=pytest.mark.slow),
        pytest.param("tpu-interpret", "128", ["2:4"], marks=pytest.mark.slow),
    ],
)
def test_sharded_heads(backend: str, head_dim: str, pairs: list[str]) -> None:
    """pairs: shards and tokens of a step, of decodes or with chunks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.run_sharded", backend, head_dim, *pairs],
        cwd=Path(__file__).parents[2],
        # Interpreted TPU kernels wait for each other on the host: a thread for each, however many
        # cores there are (XLA sizes its pools by NPROC).
        env={**os.environ, "XLA_FLAGS": virtual_devices(4), "JAX_PLATFORMS": "cpu", "NPROC": "32"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "q: 8 heads do not divide over 3 shards" in done.stdout
    assert "k: 4 heads do not divide over 3 shards" in done.stdout
    assert "pool: 4 heads do not divide over 3 shards" in done.stdout
