"""Adapters over a mesh: cut as the projections that they change, with the same text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import virtual_devices
from tests.engine.lora import sharded_main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("family", ["opt", pytest.param("llama", marks=pytest.mark.slow)])
def test_text(tmp_path: Path, family: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.lora.sharded_main", str(tmp_path), family],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": virtual_devices(2)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() == set(map(str, sharded_main.SHARDS))
    assert report["1"] == report["2"]
    each = len(sharded_main.PROMPTS)
    assert len({tuple(text) for text in report["1"]}) > 2 * each, "adapters change the text"
