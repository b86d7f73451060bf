"""Runs jaxserve's bench and vLLM's in turn on this machine, and compares them.

    python tools/vllm_cpu/compare.py --vllm_python=.venv-vllm/bin/python --rounds=1

One process at a time. A ratio is jaxserve's rate over vLLM's in the same round with the same dtype,
so that a machine that slows down over an hour slows both; the median of the rounds counts. Prints
a table for docs/performance.md with each target's verdict, and with --out writes everything as
JSON.
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

import workload
from workload import DTYPES

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ("--config=opt_125m_cpu", "--config.engine.max_model_len=512")
# Least ratios of jaxserve's rate over vLLM's in the same data type, by workload; for OPT-125M.
MODEL = workload.MODELS[0]
TARGETS = {
    ("batch", "float32"): 1.05,
    ("batch", "bfloat16"): 1.05,
    ("single", "float32"): 1.2,
    ("single", "bfloat16"): 1.0,
}
# Reported rows: a workload and its title.
ROWS = (("batch", "{num_requests} requests at once"), ("single", "one request alone"))
OURS = {"batch": "throughput", "single": "latency"}  # the commands of jaxserve


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
    """Parses the workload and the number of rounds. Exits with 2 on errors."""
    parser = workload.parser(__doc__, 3)
    parser.add_argument("--vllm_python", default=".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=workload.at_least_one, default=1)
    parser.add_argument("--policy", default="sarathi")
    parser.add_argument("--out", help="file for the JSON")
    return parser.parse_args(argv)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds, one after the other; rates in output tokens per second. Raises CompareError."""
    rounds = []
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        rounds.append(one_round(args))
    return {
        "workload": {
            n: getattr(args, n) for n in ("model", "num_requests", "input_len", "output_len")
        },
        "summary": summarise(rounds),
        "rounds": rounds,
    }


def one_round(args: argparse.Namespace) -> dict[str, Any]:
    """Every process once, by data type: jaxserve's two commands, and vLLM."""
    lengths = [f"--input_len={args.input_len}", f"--output_len={args.output_len}"]
    batch = [f"--num_requests={args.num_requests}", f"--repeats={args.repeats}"]
    alone = [f"--num_requests={args.repeats}"]
    folder = ROOT / "tools" / "vllm_cpu"
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        what = [f"--model={args.model}", f"--dtype={dtype}", *lengths]
        model = [f"--config.model.preset={args.model}", f"--config.model.dtype={dtype}"]
        flags = [*CONFIG, *model, f"--policy={args.policy}", "--json", *lengths]
        ours = [sys.executable, "-m", "jaxserve", "bench"]
        results[dtype] = {
            "throughput": run([*ours, "throughput", *flags, *batch]),
            "latency": run([*ours, "latency", *flags, *alone]),
            "vllm": run([args.vllm_python, str(folder / "bench.py"), *what, *batch]),
        }
    return results


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
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "command" in value:
            return value
    raise CompareError("a run printed no JSON object")


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median rates and the median of the rounds' ratios, by workload and dtype."""
    summary: dict[str, Any] = {row: {} for row, _ in ROWS}
    for row, _ in ROWS:
        for dtype in DTYPES:
            ours, theirs = (
                [_rate(r[dtype][command], row) for r in rounds] for command in (OURS[row], "vllm")
            )
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            summary[row][dtype] = {
                "jaxserve": statistics.median(ours),
                "vllm": statistics.median(theirs),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
            }
    return summary


def _rate(found: dict[str, Any], row: str) -> float:
    results = found["results"]
    return float(results.get(row, results)["output_tokens_per_s"]["median"])


def table(result: dict[str, Any]) -> str:
    """Markdown, as in docs/performance.md."""
    lines = [
        "| output tokens/s | dtype | jaxserve | vLLM | ratio | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    asked = result["workload"]
    for row, label in ROWS:
        for dtype in DTYPES:
            rates = result["summary"][row][dtype]
            target = TARGETS[row, dtype] if asked["model"] == MODEL else None
            cells = [
                label.format(**asked),
                dtype,
                *(f"{rates[name]:.1f}" for name in ("jaxserve", "vllm")),
                f"{rates['ratio']:.2f}",
                *(("reported", "") if target is None else verdict(rates["ratio"], target)),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(ratio: float, target: float) -> tuple[str, str]:
    """A target as text, and its verdict."""
    return f"at least {target:.2f}", "met" if ratio >= target else "missed"


if __name__ == "__main__":
    sys.exit(main())
