"""Measures the drafters' host time in a step of many long requests."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from jaxserve.engine.drafts.drafting import Drafts
from jaxserve.engine.drafts.speculator import Speculator
from jaxserve.sched.speculation.acceptance import AcceptanceRates

ROWS, KNOWN, STEPS, WARM_UP = 32, 4000, 400, 50
EARLIER = 20  # outputs of the tenant, of 2,000 tokens
DRAFTERS = ("lookups", "lookups and a prediction that is wrong")


def milliseconds(drafters: str) -> float:
    """The median time of a step of ROWS requests with KNOWN tokens, each getting one more.

    Args:
        drafters: One of DRAFTERS.
    """
    draw, drafts, rates = random.Random(0), Drafts(), AcceptanceRates()
    for _ in range(EARLIER):
        drafts.of(()).end(text(draw, 2000))
    texts = [text(draw, KNOWN + STEPS) for _ in range(ROWS)]
    prediction = text(draw, KNOWN) if drafters != DRAFTERS[0] else ()
    requests = [
        Speculator(drafts.of(item[:KNOWN], prediction=prediction), rates.of(""), STEPS + WARM_UP)
        for item in texts
    ]
    times = []
    for step in range(KNOWN, KNOWN + STEPS):
        begin = time.perf_counter()
        for item, tokens in zip(requests, texts, strict=True):
            item.receive(tokens[step : step + 1])
            _ = item.acceptance
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[WARM_UP:])


def text(draw: random.Random, length: int) -> Sequence[int]:
    """Tokens, about half of them copied from earlier ones, 3 to 30 at a time."""
    tokens = [draw.randrange(2000) for _ in range(200)]
    while len(tokens) < length:
        if draw.random() < 0.5:
            begin = draw.randrange(len(tokens) - 40)
            tokens += tokens[begin : begin + draw.randrange(3, 30)]
        else:
            tokens += [draw.randrange(2000) for _ in range(draw.randrange(2, 20))]
    return tokens[:length]
