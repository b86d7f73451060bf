"""Tensor parallelism changes neither logits, those of prompts included, nor greedy text, few KV
heads, hidden caches and adapters included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compiling import virtual_devices
from tests.engine.device import sharded_main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("family", ["opt", pytest.param("llama", marks=pytest.mark.slow)])
def test_shards_agree(tmp_path: Path, family: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.device.sharded_main", str(tmp_path), family],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": virtual_devices(4)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    whole = report["1"]
    assert report.keys() == set(map(str, sharded_main.SHARDS))
    texts = {tuple(one["tokens"]) for one in whole}
    assert len(texts) > 2 * len(sharded_main.PROMPTS), "adapters change the text"
    for cut in (report[shards] for shards in report if shards != "1"):
        for one, other in zip(whole, cut, strict=True):
            assert one["tokens"] == other["tokens"]
            assert one["vector"] == pytest.approx(other["vector"], abs=1e-5)
            assert len(one["top"]) == len(other["top"]) == one["prompt"] - 1 + len(one["tokens"])
            for a, b in zip(one["top"], other["top"], strict=True):
                common = a.keys() & b.keys()
                assert len(common) >= 19  # the 20th may tie
                assert max(abs(a[k] - b[k]) for k in common) < 1e-4
