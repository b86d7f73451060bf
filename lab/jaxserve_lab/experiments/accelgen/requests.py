"""AccelGen's requests: mixed prompts, and targets scaled from what prompts take alone (3.2)."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.lengths import LONGEST_OUTPUT, mixed_prompt_sets, mixed_prompts
from jaxserve.simulator.workloads.workload import Lengths, Workload
from jaxserve_lab.experiments.accelgen.places import Place, prefill_seconds

MIXED, EXCLUSIVE = "mixed", "exclusive"
LONG_PROMPTS, SHORT_PROMPTS, SHORT = (10_214, 10_252), 20, (128, 384)  # tokens (Figure 6)
EXCLUSIVE_OUTPUT = 256  # tokens; the paper says nothing of it
GROUP = 512  # tokens: prompts of one group have one mean latency
TTFT_SCALE = (0.5, 1.5)
READING = 0.1875  # seconds per token
TBT_RANGE = (0.75, 1.25)  # of READING (section 6.1)
TBT_CHOICES = (0.25, 0.5, 1.0, 2.0)  # of READING (section 3.2)


def drawn_lengths(
    place: Place, data: str, books: float, count: int, rng: np.random.Generator, *, printed: bool
) -> Lengths:
    """Draws lengths of prompts and outputs.

    Args:
        place: Bounds the prompts.
        data: MIXED, EXCLUSIVE, or a name of `mixed_prompt_sets`.
        books: Share of MIXED that is from BookCorpus.
        count: Number of requests; EXCLUSIVE has its own.
        rng: What to draw with.
        printed: Whether MIXED has the outputs of Figure 8, see `mixed_prompts`.
    """
    if data == MIXED:
        return mixed_prompts(books, place.longest, printed_outputs=printed).sample(count, rng)
    if data != EXCLUSIVE:
        return mixed_prompt_sets(place.longest)[data].sample(count, rng)
    short = rng.integers(SHORT[0], SHORT[1] + 1, SHORT_PROMPTS)
    prompts = rng.permutation(np.concatenate([LONG_PROMPTS, short]))
    return Lengths(prompts, np.full(len(prompts), EXCLUSIVE_OUTPUT))


def with_slos(
    place: Place, arrival: np.ndarray, lengths: Lengths, rng: np.random.Generator, **how: float
) -> Workload:
    """The workload, with targets for each request (sections 3.2 and 6.1).

    A TTFT is the mean of `prefill_seconds` over prompts of about the same length (GROUP), times a
    scale from [0.5, 1.5]. A TBT is 0.1875 s times a scale from [0.75, 1.25]. Each request may write
    LONGEST_OUTPUT tokens.

    Args:
        place: Predicts `prefill_seconds`.
        arrival: float64 [n], seconds.
        lengths: Of prompts and outputs.
        rng: What to draw with.
        **how: `ease` multiplies the TTFTs; with `choices`, the scales of TBTs are from {0.25, 0.5,
            1, 2}.
    """
    alone, group = prefill_seconds(place, lengths.prompt_len), (lengths.prompt_len - 1) // GROUP
    totals, sizes = np.bincount(group, weights=alone), np.bincount(group)
    mean = (totals / np.maximum(sizes, 1))[group]
    count = len(lengths)
    scale, share = rng.uniform(*TTFT_SCALE, count), rng.uniform(*TBT_RANGE, count)
    if how.get("choices"):
        share = rng.choice(TBT_CHOICES, count)
    terms = dataclasses.replace(
        SloColumns.none(count), ttft=mean * scale * how.get("ease", 1.0), tbt=READING * share
    )
    limit = np.full(count, LONGEST_OUTPUT, np.int64)
    return Workload.create(arrival, lengths, limit=limit, terms=terms)
