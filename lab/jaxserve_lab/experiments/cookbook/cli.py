"""Makes docs/cookbook/: a page for each model family, with the memory and speed of its models.

    python -m jaxserve_lab.experiments.cookbook
    python -m jaxserve_lab.experiments.cookbook --measure --pages=qwen

--measure: on this machine, anew, for the pages named; it wants the machine for itself. Without it,
the pages have the speeds of figures/cookbook.csv.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxserve.command_line import Parser, exit_code
from jaxserve_lab.experiments.common.page import rendered, table
from jaxserve_lab.experiments.cookbook.memory import QUANTIZATIONS, memory
from jaxserve_lab.experiments.cookbook.recipes import RECIPES, Recipe
from jaxserve_lab.experiments.cookbook.speed import PROMPT, STREAMS, TIMES, Speed, measure

_COLUMNS = [field.name for field in dataclasses.fields(Speed)]
_INDEX = """\
<!-- Made by `python -m jaxserve_lab.experiments.cookbook`. -->
# Cookbook

A page for each model family: the command, the memory it takes, its speed on a small machine, its
limits. [models.md](../models.md) lists what else loads.

{}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures if asked to, and writes.

    Args:
        argv: Arguments without the program's name.

    Returns:
        Exit status: 0, or 1 or 2 after a line on stderr.
    """
    parser = Parser(prog="python -m jaxserve_lab.experiments.cookbook", description=str(__doc__))
    add = parser.add_argument
    add("--out", default="docs", help="the folder of cookbook/ and figures/ (%(default)s)")
    add("--pages", default=",".join(RECIPES), help=f"to measure, of {', '.join(RECIPES)} (all)")
    add("--measure", action="store_true", help="speeds, on this machine")
    args = parser.parse_args(argv)
    pages = args.pages.split(",")
    if unknown := [page for page in pages if page not in RECIPES]:
        parser.error(f"--pages: there is no {unknown[0]!r}; known: {', '.join(RECIPES)}")
    try:
        write(Path(args.out), pages if args.measure else ())
    except (ValueError, OSError) as error:
        print(f"jaxserve_lab.experiments.cookbook: {error}", file=sys.stderr)
        return exit_code(error)
    return 0


def write(out: Path, measured: Iterable[str] = ()) -> None:
    """Writes all pages.

    Args:
        out: Folder of cookbook/ and of figures/cookbook.csv.
        measured: Pages whose models' speeds are measured first.
    """
    numbers = out / "figures" / "cookbook.csv"
    speeds = _read(numbers)
    for page in measured:
        for preset in RECIPES[page].measured:
            for quantization in QUANTIZATIONS:
                speed = measure(preset, quantization)
                print(speed, file=sys.stderr, flush=True)
                speeds[speed.preset, speed.weights] = speed
                _write(numbers, speeds.values())
    (out / "cookbook").mkdir(exist_ok=True)
    for name, recipe in RECIPES.items():
        (out / "cookbook" / f"{name}.md").write_text(page_of(recipe, speeds.values()), "utf-8")
    lines = [f"- [{recipe.title}]({name}.md)" for name, recipe in RECIPES.items()]
    (out / "cookbook" / "README.md").write_text(_INDEX.format("\n".join(lines)), "utf-8")


def page_of(recipe: Recipe, speeds: Iterable[Speed]) -> str:
    """A family's page, in Markdown."""
    own = [speed for speed in speeds if speed.preset in recipe.measured]
    cells = [
        [f"`{one.preset}`", one.weights, f"{one.ttft_ms:,}", f"{one.one:,}", f"{one.streams:,}"]
        for one in own
    ]
    header = ["model", "weights", "TTFT, ms", "one stream", f"{STREAMS} streams"]
    return rendered(
        Path(__file__).parent,
        recipe=recipe,
        memory=_memory(recipe),
        speed=table(header, cells) if cells else "",
        machine="; ".join(dict.fromkeys(one.machine for one in own)),
        prompt=PROMPT,
        streams=STREAMS,
        times=TIMES,
    )


def _memory(recipe: Recipe) -> str:
    rows = []
    for preset in recipe.presets:
        taken = memory(preset)
        weights = [f"{gib:,.1f}" for gib in taken.weights]
        rows.append([f"`{preset}`", *weights, f"{taken.token:g}", f"{taken.longest:,}"])
    names = [name or "bfloat16" for name in QUANTIZATIONS]
    return table(["model", *names, "a token", "longest"], rows)


def _read(path: Path) -> dict[tuple[str, str], Speed]:
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [
            Speed(
                preset=row["preset"],
                weights=row["weights"],
                ttft_ms=int(row["ttft_ms"]),
                one=float(row["one"]),
                streams=float(row["streams"]),
                machine=row["machine"],
            )
            for row in csv.DictReader(lines)
        ]
    return {(row.preset, row.weights): row for row in rows}


def _write(path: Path, speeds: Iterable[Speed]) -> None:
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(dataclasses.asdict, speeds))
