"""Makes the measured table of docs/exactness.md, between its markers.

    python -m jaxserve_lab.experiments.exactness
    python -m jaxserve_lab.experiments.exactness --models="SmolLM2, int8"
    python -m jaxserve_lab.experiments.exactness --model=/some/checkpoint --out=""

The same greedy chats are served in every way, each by a process of its own; tokens and the bits of
all log-probabilities are compared with those of each chat served alone. --model: one's own
checkpoint, as for `jaxserve serve`. --models: of the page's, separated by semicolons. --out: the
page; empty to print the table alone. --chats, --tokens: how many, for a shorter look.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.command_line import Parser, exit_code
from jaxserve.simulator.workload_flags import positive_int
from jaxserve_lab.experiments.common.page import write_part
from jaxserve_lab.experiments.exactness.chats import ALONE, WAYS, Answers, answers
from jaxserve_lab.experiments.exactness.models import MODELS, given


def main(argv: Sequence[str] | None = None) -> int:
    """Serves, compares and writes.

    Args:
        argv: Arguments without the program's name.

    Returns:
        Exit status: 0 if every chat has the same bits in every way, 1 if not, or after a line on
        stderr.
    """
    parser = Parser(prog="python -m jaxserve_lab.experiments.exactness", description=str(__doc__))
    add = parser.add_argument
    add("--out", default="docs/exactness.md", help="the page, with its markers (%(default)s)")
    add("--models", default=";".join(MODELS), help=f"of {'; '.join(MODELS)} (all)")
    add("--model", default="", help="one's own, in their place")
    add("--ways", default=";".join(WAYS), help=f"of {'; '.join(WAYS)} (all)")
    add("--chats", type=positive_int, default=50, help="%(default)s")
    add("--tokens", type=positive_int, default=48, help="of each answer (%(default)s)")
    add("--one", default="", help="for its own processes: file for the answers of one way")
    args = parser.parse_args(argv)
    models = [args.model] if args.model else args.models.split(";")
    ways = args.ways.split(";")
    for flag, names, known in (("ways", ways, WAYS), ("models", models, MODELS)):
        unknown = [name for name in names if name not in known]
        if unknown and not (flag == "models" and args.model):
            parser.error(f"--{flag}: there is no {unknown[0]!r}; known: {'; '.join(known)}")
    try:
        if args.one:
            path, fields = given(models[0])
            found, preemptions = answers(path, ways[0], args.chats, args.tokens, fields)
            Path(args.one).write_text(json.dumps([found, preemptions]), encoding="utf-8")
            return 0
        table = [(model, _compared(model, ways, args.chats, args.tokens)) for model in models]
        lines = _table(table, args.chats)
        if args.out and not args.model:
            write_part(Path(args.out), "exactness", "chats", lines)
        else:
            print(lines)
    except (ValueError, OSError) as error:
        print(f"jaxserve_lab.experiments.exactness: {error}", file=sys.stderr)
        return exit_code(error)
    same = all(cell == (args.chats, args.chats) for _, row in table for cell in row.values())
    return 0 if same else 1


def _compared(
    model: str, ways: Sequence[str], chats: int, tokens: int
) -> dict[str, tuple[int, int]]:
    """By way: how many chats have the same text, and the same bits, as alone."""
    run: Callable[[str], Answers] = lambda way: _served(model, way, chats, tokens)  # noqa: E731
    alone = run(ALONE)
    found = {}
    for way in ways:
        if way != ALONE:
            pairs = list(zip(alone, run(way), strict=True))
            found[way] = (
                sum(one["tokens"] == other["tokens"] for one, other in pairs),
                sum(one == other for one, other in pairs),
            )
            print(f"{model}: {way}: {found[way]}", file=sys.stderr, flush=True)
    return found


def _served(model: str, way: str, chats: int, tokens: int) -> Answers:
    """The answers of a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        what = [f"--models={model}", f"--ways={way}", f"--one={file}"]
        what += [f"--chats={chats}", f"--tokens={tokens}"]
        if model not in MODELS:
            what[0] = f"--model={model}"
        command = [sys.executable, "-m", "jaxserve_lab.experiments.exactness", *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{model}, {way}: {done.stderr.strip()[-2000:]}")
        found: Answers
        found, preemptions = json.loads(file.read_text(encoding="utf-8"))
    if way == "preempted" and not preemptions:
        raise ValueError(f"{model}: nothing was preempted")
    return found


def _table(rows: Sequence[tuple[str, Mapping[str, Any]]], chats: int) -> str:
    """Of each model, chats with the same text and with the same bits."""
    ways = list(rows[0][1])
    lines = [f"| {chats} chats | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
    for model, found in rows:
        cells = [f"{text}, {bits}" for text, bits in found.values()]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
