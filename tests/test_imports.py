"""Commands start quickly: what takes long to import is imported where it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SIMULATE = ["--system=llama-3-8b@a100", "--workload=sharegpt", "--rate=2"]
HEAVY = (
    "jax", "numba", "scipy.optimize", "scipy.stats", "matplotlib", "ortools", "fastapi", "grpc",
    "pydantic", "jinja2", "tokenizers",
)  # fmt: skip
RUN = """
import sys
from jaxserve.commands.cli import main
try:
    assert main(sys.argv[1:]) == 0
except SystemExit as ended:
    assert not ended.code, ended.code
"""
SAY = f"""
import sys
print("HEAVY", *(name for name in {HEAVY} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("begin", "arguments"),
    [
        (RUN, ["simulate", *SIMULATE, "--num_requests=50"]),
        (RUN, ["optimal", "--help"]),
        (RUN, ["advise", "--help"]),
        (RUN, ["--help"]),
        (RUN, ["policies"]),
        (RUN, ["keys", "--help"]),
        ("from jaxserve import LLM, SamplingParams", []),
    ],
)
def test_what_starts_at_once(begin: str, arguments: list[str]) -> None:
    command = [sys.executable, "-c", begin + SAY, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["HEAVY"], done.stdout[-300:] + done.stderr
