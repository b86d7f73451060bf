"""Files of prompts, and what is said to the client about them."""

from __future__ import annotations

import json
from pathlib import Path


def write(path: Path, count: int) -> Path:
    """Prompts whose tokens say which they are."""
    sampling = {"max_tokens": 1}
    lines = ({"id": f"id {n}", "token_ids": [n + 1], "sampling": sampling} for n in range(count))
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return path


def command(address: str, prompts: Path, *flags: str) -> list[str]:
    out = prompts.with_name("results.jsonl")
    return [f"--address={address}", str(prompts), f"--out={out}", *flags]
