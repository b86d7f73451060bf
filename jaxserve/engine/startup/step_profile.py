"""The first cost model of an engine that nobody has profiled: a few steps timed before it serves.

It is a prior. What is served corrects it (`sched/cost/online_cost_model.py`), so few shapes will
do; `jaxserve profile` measures more of them, and longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxserve.engine.startup.step_timer import CHAIN, Shape
from jaxserve.sched.cost.cost_model import LinearCostModel
from jaxserve.sched.cost.cost_model_fit import Sample, least_squares
from jaxserve.sched.cost.padding import Padding

BUDGET_S = 20.0
ROUNDS = 2
SLOW_S = 0.25  # steps that take longer are timed one by one, not in chains
SWAPPED = 256  # slots that go to the host and back

Seconds = Callable[[Shape, int], float]
Progress = Callable[[Iterable[Any]], Iterable[Any]]


def shapes(
    padding: Padding,
    *,
    max_rows: int,
    max_prefill: int,
    max_len: int,
    hidden: bool = False,
    swaps: bool = False,
) -> list[Shape]:
    """What to time, the smallest first: decodes of few, some and all rows over short and long
    contexts, chunks of few, some and many tokens with and without a context, several chunks, chunks
    beside decodes, and steps that sample. No row gets longer than max_len tokens, or a batch than
    max_prefill where it has chunks.

    hidden: those that read a cache once more with hidden ones, and hidden caches that become KV.
    swaps: caches that go to the host and back.
    """
    short, half, most = (max(1, int(share * (max_len - 1))) for share in (0.05, 0.5, 0.9))
    rows = _spread([n for n in padding.rows if n <= max_rows] or [max_rows])
    found = [Shape((length,) * n) for n in rows for length in (short, half, most)]
    found += [Shape((short,) * n, sampling=True) for n in rows]
    for size in _spread([n for n in padding.tokens if n <= max_prefill] or [max_prefill]):
        for before in (0, half):
            found.append(Shape(chunks=((min(size, max_len - before), before),)))
        parts = min(4, max_rows, size)
        found.append(Shape(chunks=((min(size // parts, max_len), 0),) * parts))
        beside = min(max_rows - 1, size // 2)
        found.append(Shape((half,) * beside, ((min(size - beside, max_len), 0),)))
    found = [shape for shape in found if all(count > 1 for count, _ in shape.chunks)]
    if hidden:
        reading = [s for s in found if s.contexts.any() and not s.sampling]
        found += [dataclasses.replace(shape, hidden=True) for shape in reading]
        found += [Shape((short,), projected=length) for length in (half, most)]
    if swaps:
        found += [Shape((short,), swapped=SWAPPED), Shape((short,), swapped=2 * SWAPPED)]
    return sorted(dict.fromkeys(found), key=_size)


def _spread(sizes: Sequence[int]) -> list[int]:
    """The first, the middle one and the last."""
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})


def _size(shape: Shape) -> int:
    return shape.tokens + int(shape.contexts.sum()) + shape.projected + shape.swapped


def timed_model(
    seconds: Seconds,
    wanted: Sequence[Shape],
    padding: Padding,
    num_layers: int,
    *,
    progress: Progress = iter,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> LinearCostModel:
    """A cost model of the shapes' times.

    seconds(shape, chain): time of one step of several. Each shape is run once, to fetch what its
    first run has to, then in up to ROUNDS rounds through all of them, so that a disturbance falls
    on one sample of many shapes; the least counts. Where time is short there are fewer rounds,
    and of the largest shapes those are left out for which it seems too short; the first one never
    is. progress: wraps the list of work, as tqdm does.
    """
    end = clock() + budget_s
    first: dict[Shape, float] = {}
    taken: dict[Shape, list[float]] = {}
    last: Shape | None = None
    for number, shape in progress(list(itertools.product(range(1 + ROUNDS), wanted))):
        left = end - clock()
        if number == 0:
            if last is None or first[last] * _size(shape) / _size(last) < left:
                first[shape], taken[shape], last = seconds(shape, 1), [], shape
        elif shape in taken:
            chain = 1 if first[shape] > SLOW_S else CHAIN
            if chain * first[shape] < left:
                taken[shape].append(seconds(shape, chain))
    samples = [
        Sample(shape.features(padding), min(times or [first[shape]]))
        for shape, times in taken.items()
    ]
    return least_squares(samples, num_layers)
