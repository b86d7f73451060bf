"""rho, measured at the start: what a step takes longer for every token that it reads from a hidden
cache instead of from K and V (Apt-Serve Eq. 6). It may be zero or negative.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.engine.step_timer import CHAIN, Shape

FILE_NAME = "rho.json"
BUDGET_S = 20.0
ROUNDS = 5
SLOW_S = 0.25  # steps that take longer are timed one by one, not in chains

Seconds = Callable[[Shape, int], float]


def shapes(row_buckets: tuple[int, ...], max_rows: int, max_len: int) -> list[Shape]:
    """Decodes of one, some and all rows at half and most of the longest context, shortest first."""
    fitting = [rows for rows in row_buckets if rows <= max_rows] or [max_rows]
    sizes = sorted({fitting[0], fitting[len(fitting) // 2], fitting[-1]})
    lengths = sorted({max(1, max_len // 2), max(1, int(0.9 * max_len))})
    found = [Shape(decodes=(length,) * rows) for rows in sizes for length in lengths]
    return sorted(found, key=lambda shape: sum(shape.decodes))


def measure(
    seconds: Seconds,
    wanted: list[Shape],
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds a token: the slope, by least squares through the origin, of what hidden caches add to
    the time of a step over the tokens cached.

    seconds(shape, chain): time of one step of several. Each shape is timed with either kind in
    turns, the least of up to ROUNDS. Shapes for which the budget seems too small are left out, the
    first one never is.
    """
    begin = clock()
    found: list[tuple[int, float, float]] = []  # tokens, seconds with KV and with hidden caches
    for number, shape in enumerate(wanted):
        left, tokens = budget_s - (clock() - begin), sum(shape.decodes)
        slowest = sum(found[-1][1:]) if found else 0.0
        if found and slowest * tokens / found[-1][0] > left:
            break
        end = clock() + left / (len(wanted) - number)
        chain = 1 if slowest > SLOW_S else CHAIN
        hidden = dataclasses.replace(shape, hidden=True)
        seconds(shape, 1), seconds(hidden, 1)  # what the first run of a shape has to fetch
        pairs: list[tuple[float, float]] = []
        while len(pairs) < ROUNDS and (not pairs or clock() < end):
            pairs.append((seconds(shape, chain), seconds(hidden, chain)))
        least = np.min(pairs, axis=0)
        found.append((tokens, float(least[0]), float(least[1])))
    cached, kv, other = np.array(found).T
    return float(cached @ (other - kv) / (cached @ cached))


def remembered(directory: str, key: dict[str, Any], make: Callable[[], float]) -> float:
    """What `make` once returned for this key, kept in the directory; "": nothing is kept."""
    if not directory:
        return make()
    path = Path(directory).expanduser() / FILE_NAME
    name, known = json.dumps(key, sort_keys=True), _read(path)
    if name not in known:
        known[name] = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    return known[name]


def _read(path: Path) -> dict[str, float]:
    """Empty if there is none, or it is none of ours."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): float(value) for key, value in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
