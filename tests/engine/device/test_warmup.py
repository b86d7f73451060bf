"""What the warm-up compiles in threads is what the steps then run: nothing is compiled twice."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from tests.engine import harness


def test_no_step_is_compiled_again_when_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {
        "scheduler__max_rows": 3,  # nobody else's shapes, so that nobody has compiled them
        "scheduler__max_batch_tokens": 48,
        "scheduler__max_prefill_tokens": 48,
        "engine__row_buckets": (2, 3),
        "engine__token_buckets": (48,),
        "scheduler__policy": "goodput",
        "cache__hidden_read": "absorbed",
    }
    with jax.log_compiles(), harness.engine(harness.write_shape(tmp_path, "opt"), **fields):
        pass
    here = set(re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text))
    assert here, "the log has what this thread compiles"
    in_threads = {"_model_step", "sample_full", "_prompt_step", "_project_to_kv"}
    assert not here & in_threads, "threads have compiled them"
