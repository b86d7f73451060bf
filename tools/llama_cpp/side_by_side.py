"""Compares jaxserve with llama.cpp on this machine's cores, at equal bits of the weights.

    python tools/llama_cpp/side_by_side.py --rounds=3
    python tools/llama_cpp/side_by_side.py --models=smollm2 --types=int8 --only=decode

For each model and type both sides are started and then measured in turns, so that only one of them
computes. A ratio is jaxserve's rate over llama.cpp's in the same round; the median of the rounds
counts. Prints a table with each target's verdict, and with --out writes everything as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measures import MEASURES, MODELS, TYPES

from jaxserve.gguf.wheels import fetch

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tools" / "llama_cpp"
LABELS = {"decode": "one stream", "prefill": "a prompt of 512", "streams": "16 streams"}
TARGET = 1.0  # least ratio of each measure
Rounds = dict[str, dict[str, list[float]]]  # tokens/s by measure and side


class Child:
    """One side's process.

    Args:
        command: Its command line.

    Attributes:
        about: Its description of itself.

    Raises:
        RuntimeError: The process ended.
    """

    def __init__(self, command: Sequence[str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        self.about = self._read()

    def ask(self, name: str) -> Any:
        """Asks it for a measure, in tokens/s. Raises like the class."""
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status, 1 if a side failed."""
    args = parse(argv)
    try:
        result = [compare(args, model, type_) for model in args.models for type_ in args.types]
    except RuntimeError as error:
        print(f"side_by_side: {error}", file=sys.stderr)
        return 1
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. Exits with 2 for unknown names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def several(flag: str, known: Sequence[str]) -> None:
        def names(text: str) -> list[str]:
            chosen = text.split(",")
            if not set(chosen) <= set(known):
                raise argparse.ArgumentTypeError(f"must be of {','.join(known)}; got {text}")
            return chosen

        parser.add_argument(flag, type=names, default=list(known), help=",".join(known))

    several("--models", MODELS)
    several("--types", list(TYPES))
    several("--only", list(MEASURES))
    parser.add_argument("--rounds", type=int, default=3)
    add_places(parser)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    return parser.parse_args(argv)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Adds flags for llama.cpp's Python and the files."""
    parser.add_argument("--llama_python", default=str(ROOT / ".venv-llama" / "bin" / "python"))
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "llama_cpp",
        help="folder of the GGUF files, 5 GB",
    )


def compare(args: argparse.Namespace, model: str, type_: str) -> dict[str, Any]:
    """Runs the rounds of one model in one type. Raises RuntimeError."""
    measures = f"--measures={','.join(args.only)}"
    with contextlib.ExitStack() as stack:
        folder, ours = files(args, model)
        script, own = str(HERE / "jaxserve_side.py"), f"--type={type_}"
        theirs = f"--file={folder / TYPES[type_].gguf}.gguf"
        sides = {}
        for side, command in (
            ("jaxserve", [sys.executable, script, ours, own, measures]),
            ("llama.cpp", [args.llama_python, str(HERE / "llama_side.py"), theirs, measures]),
        ):
            print("  " + " ".join(command), file=sys.stderr, flush=True)
            sides[side] = Child(command)
            stack.callback(sides[side].close)
        rates: Rounds = {name: {side: [] for side in sides} for name in args.only}
        for name, side in in_turns(args.only, list(sides), args.rounds):
            rates[name][side].append(sides[side].ask(name))
        about = {side: child.about for side, child in sides.items()}
    return {"model": model, "type": type_, "about": about, "rates": rates}


def in_turns(
    measures: Sequence[str], sides: Sequence[str], rounds: int
) -> Iterator[tuple[str, str]]:
    """Takes each measure of both sides once per round; the sides alternate in going first."""
    for number in range(rounds):
        for name in measures:
            for side in sides[:: 1 if number % 2 == 0 else -1]:
                yield name, side


def files(args: argparse.Namespace, model: str) -> tuple[Path, str]:
    """Writes a model's GGUF files; returns their folder and the model for jaxserve. Raises
    RuntimeError."""
    folder = args.folder / model
    real = model == "smollm2"
    what = f"--source={fetch(model)}" if real else f"--random={model}"
    command = [args.llama_python, str(HERE / "make_files.py"), what, f"--folder={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-5:]))
    return folder, f"--file={folder / 'F32.gguf'}" if real else what


def table(result: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| tokens/s | model | weights | jaxserve | llama.cpp | ratio | target | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, label in LABELS.items():
        wider: dict[str, float] = {}
        for row in result:
            if name not in row["rates"]:
                continue
            ours, theirs = (row["rates"][name][side] for side in ("jaxserve", "llama.cpp"))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            median, model, type_ = statistics.median(ours), row["model"], row["type"]
            verdict = "met" if ratio >= TARGET else "missed"
            if name == "decode":  # both kinds of 4 bits are equally wide
                before = wider.get(model, 0.0)
                verdict += "" if median > before else ", no faster than the wider one"
                if not type_.startswith("int4"):
                    wider[model] = median
            cells = (label, model, f"{type_}, {TYPES[type_].gguf}", f"{median:.1f}")
            cells += (f"{statistics.median(theirs):.1f}", f"{ratio:.2f}", f"{TARGET:.1f}", verdict)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
