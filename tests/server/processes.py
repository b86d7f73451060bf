"""serve.py in a process of its own, with few steps to compile, and always the same ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS, TOKENS = 16, 64  # of a batch
PATIENCE = 120


@dataclass
class ServedProcess:
    """printed: what it has said until it was ready."""

    process: subprocess.Popen[str]
    printed: str
    address: str


SERVE_PY = (sys.executable, str(ROOT / "serve.py"))


def serve_command(*flags: str, program: Sequence[str] = SERVE_PY) -> list[str]:
    """On free ports: whoever runs the tests may have a server of their own."""
    return [*program, "--port=0", "--http_port=0", "--metrics_port=0", *flags]


def refused(*flags: str, code: int = 2, **environment: str) -> str:
    """What serve.py says of flags that it cannot serve: all that it prints, and one line."""
    done = subprocess.run(
        serve_command(*flags),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    assert re.fullmatch(r"serve\.py: .+\n", done.stderr), done.stderr
    return done.stderr


@contextmanager
def serve(
    *flags: str, program: Sequence[str] = SERVE_PY, cwd: Path = ROOT, **environment: str
) -> Iterator[ServedProcess]:
    """The model in the box, ready. Killed at the end."""
    fields = (
        f"scheduler.max_rows={ROWS}",
        f"scheduler.max_batch_tokens={TOKENS}",
        f"scheduler.max_prefill_tokens={TOKENS}",
        f"engine.row_buckets=({ROWS},)",
        f"engine.token_buckets=({TOKENS},)",
        "engine.compilation_cache_dir=",
    )
    command = serve_command(*(f"--config.{field}" for field in fields), *flags, program=program)
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            printed = []
            while not printed or " complete " not in printed[-1]:
                printed.append(process.stdout.readline())
                assert printed[-1], process.stderr.read()
            text = "".join(printed)
            address = re.search(r"address  (\S+)", text)
            assert address is not None
            yield ServedProcess(process, text, address[1])
        finally:
            process.kill()
