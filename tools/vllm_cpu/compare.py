"""Runs jaxserve's bench and vLLM's in turn on this machine, and compares them.

    python tools/vllm_cpu/compare.py --vllm_python=.venv-vllm/bin/python --rounds=3

One process at a time. A ratio is jaxserve's rate over vLLM's of the same round, so that a machine
that slows down over an hour slows both; the median of the rounds counts. Prints a table for
docs/performance.md, and with --out writes everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ("--config=configs/opt_125m_cpu.py", "--config.engine.max_model_len=512")
DTYPES = ("float32", "bfloat16")
# What is reported: the workload, and where each result has its output tokens per second.
ROWS = (("batch", "{num_requests} requests at once"), ("single", "one request alone"))


class CompareError(RuntimeError):
    """A run failed; the message says which."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status, 1 where a run failed."""
    args = parse(argv)
    try:
        result = compare(args)
    except CompareError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(table(result))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The workload, and how often it is run. Exits with 2 for a wrong number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm_python", default=".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="measured runs in a process")
    parser.add_argument("--num_requests", type=int, default=32)
    parser.add_argument("--input_len", type=int, default=128)
    parser.add_argument("--output_len", type=int, default=64)
    parser.add_argument("--policy", default="sarathi")
    parser.add_argument("--out", help="file for the JSON")
    args = parser.parse_args(argv)
    for name in ("rounds", "repeats", "num_requests", "input_len", "output_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds, one after the other; rates in output tokens per second. Raises CompareError."""
    rounds = []
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        rounds.append(one_round(args))
    return {
        "workload": {n: getattr(args, n) for n in ("num_requests", "input_len", "output_len")},
        "summary": summarise(rounds),
        "rounds": rounds,
    }


def one_round(args: argparse.Namespace) -> dict[str, Any]:
    """Every process once: jaxserve's two commands, then vLLM in each data type."""
    lengths = [f"--input_len={args.input_len}", f"--output_len={args.output_len}"]
    batch = [f"--num_requests={args.num_requests}", f"--repeats={args.repeats}"]
    alone = [f"--num_requests={args.repeats}"]
    ours = [sys.executable, "-m", "jaxserve.bench"]
    flags = [*CONFIG, f"--policy={args.policy}", "--json", *lengths]
    found = {
        "throughput": run([*ours, "throughput", *flags, *batch]),
        "latency": run([*ours, "latency", *flags, *alone]),
    }
    script = str(ROOT / "tools" / "vllm_cpu" / "bench.py")
    for dtype in DTYPES:
        found[dtype] = run([args.vllm_python, script, f"--dtype={dtype}", *lengths, *batch])
    return found


def run(command: Sequence[str]) -> dict[str, Any]:
    """The JSON object that a command prints. Raises CompareError."""
    print("  " + " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[-15:])
        raise CompareError(f"{' '.join(command)} exited with {done.returncode}:\n{end}")
    return last_json(done.stdout)


def last_json(output: str) -> dict[str, Any]:
    """The last line that is a JSON object with a "command"; other lines may follow it."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "command" in found:
            return found
    raise CompareError("a run printed no JSON object")


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per workload the median rates, and the median of the rounds' ratios."""
    summary: dict[str, Any] = {}
    for row, _ in ROWS:
        ours = [_ours(r, row) for r in rounds]
        summary[row] = {"jaxserve": statistics.median(ours)}
        for dtype in DTYPES:
            theirs = [r[dtype]["results"][row]["output_tokens_per_s"]["median"] for r in rounds]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            summary[row][f"vllm_{dtype}"] = statistics.median(theirs)
            summary[row][f"ratio_{dtype}"] = statistics.median(ratios)
            summary[row][f"ratios_{dtype}"] = ratios
    return summary


def _ours(found: dict[str, Any], row: str) -> float:
    command = "throughput" if row == "batch" else "latency"
    return float(found[command]["results"]["output_tokens_per_s"]["median"])


def table(result: dict[str, Any]) -> str:
    """Markdown, as in docs/performance.md."""
    lines = [
        "| output tokens/s | jaxserve float32 | vLLM float32 | vLLM bfloat16 "
        "| ratio to float32 | ratio to bfloat16 |",
        "|---|---|---|---|---|---|",
    ]
    for row, label in ROWS:
        found = result["summary"][row]
        rates = [f"{found[n]:.1f}" for n in ("jaxserve", "vllm_float32", "vllm_bfloat16")]
        ratios = [f"{found[f'ratio_{dtype}']:.2f}" for dtype in DTYPES]
        name = label.format(**result["workload"])
        lines.append("| " + " | ".join([name, *rates, *ratios]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
