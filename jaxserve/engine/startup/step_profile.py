"""The first cost model of an engine without a profile, from a few steps timed before it serves.

It is a prior that served steps correct (`sched/cost/online_cost_model.py`), so few shapes will do.
`jaxserve profile` measures more of them, and longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxserve.engine.startup.step_timer import CHAIN, Shape
from jaxserve.sched.cost.cost_model import LinearCostModel
from jaxserve.sched.cost.cost_model_fit import NO_EXPERTS, Sample, least_squares
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
    """The shapes to time, the smallest first.

    They are decodes of few, some and all rows over short and long contexts; chunks of few, some and
    many tokens with and without a context; several chunks; chunks beside decodes; and steps that
    sample.

    Args:
        padding: the engine's buckets.
        max_rows: most rows of a batch.
        max_prefill: most tokens of a batch with chunks.
        max_len: most tokens of a row.
        hidden: whether to repeat the shapes that read caches with hidden ones, and add projections
            of hidden caches to KV.
        swaps: whether to add moves to the host and back.
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
    experts: tuple[int, int] = NO_EXPERTS,
    progress: Progress = iter,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> LinearCostModel:
    """A cost model fitted to measured times of the shapes.

    Each shape runs once to warm up, then in up to ROUNDS rounds through all shapes, so that a
    disturbance hits one sample of many shapes. The least time counts. If time is short there are
    fewer rounds, and shapes that seem to take too long are left out, but never the first one.

    Args:
        seconds: (shape, chain) -> seconds of one step among `chain` in a row.
        wanted: the shapes, smallest first.
        padding: the engine's buckets.
        num_layers: of the model.
        experts: `LinearCostModel.experts`.
        progress: wraps the list of work, as tqdm does.
        budget_s: seconds to spend.
        clock: seconds.
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
    return least_squares(samples, num_layers, experts)
