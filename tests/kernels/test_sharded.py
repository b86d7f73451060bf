"""Heads sharded over virtual devices give what one device gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_sharded_heads() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.run_sharded"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "q: 8 heads do not divide over 3 shards" in done.stdout
    assert "k: 4 heads do not divide over 3 shards" in done.stdout
