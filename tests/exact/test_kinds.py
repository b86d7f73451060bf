"""A request's tokens and log-probabilities have the bits that they have alone, whatever else is
served and whatever becomes of its cache: in models of every kind, in every dtype."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.device import cache_moves
from jaxserve.engine.startup.choices import policy_choice
from tests.compiling import AS_USERS_HAVE_IT, as_users_have_it
from tests.engine.harness import engine, wait_until_idle
from tests.exact.kinds import KINDS, STATEFUL, WINDOWED, write
from tests.exact.lots import Lots
from tests.exact.questions import alone, differing, questions, together

FIELDS: dict[str, Any] = {
    "cache__host_gib": 0.001,
    "scheduler__max_rows": 8,
    "engine__row_buckets": (1, 8),
    "engine__token_buckets": (16, 64),
}
# In `make test`, as windows and states are by test_windows.py and test_states.py.
QUICK = (
    "deepseek_v2, cache of int8",
    "qwen3, bfloat16",
    "whole moe, bfloat16",
    "whole, int8",
)
# Of the others each has something of one of these.
FEW = (*QUICK, "whole, cache of int8", "gemma3", "gpt_oss", "qwen3_next, bfloat16", "gguf")


@pytest.mark.promise(45)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS]
)
def test_whatever_becomes_of_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fields = KINDS[kind]
    policy, asked = Lots(), questions()
    monkeypatch.setattr(cache_moves, "SIZES", (4, 16))
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: policy)
    with engine(write(tmp_path, model), **FIELDS, **fields) as running:
        expected = alone(running, asked)
        wait_until_idle(running)
        policy.quiet = False
        found = together(running, asked)
        grouped = running._scheduler.groups is not None
    assert not differing(found, expected)
    assert grouped == (model in WINDOWED + STATEFUL)
    # Layers in groups have no blocks to lend, and a state stands for all of a text.
    more = () if model in STATEFUL else ("cut",) if grouped else ("cut", "copy")
    assert min(policy.did[what] for what in ("checkpoint", "restore", *more)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_as_users_compile_it(number: int) -> None:
    """XLA's passes, and LLVM's, decide what is added first; tests go without most of them. Half of
    the kinds that are among the few or in another dtype than float32."""
    if AS_USERS_HAVE_IT in os.environ:
        pytest.skip("this is such a process")
    kinds = [kind for kind in KINDS if kind in FEW or "," in kind][number::2]
    chosen = [f"{__file__}::test_whatever_becomes_of_it[{kind}]" for kind in kinds]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "slow or not slow", *chosen]
    done = subprocess.run(
        command, env=as_users_have_it(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
