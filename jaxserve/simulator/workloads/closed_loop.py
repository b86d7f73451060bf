"""Best-effort requests in a closed loop: a batch is submitted when the last one has ended.

This is how BROS loads a server beside its real-time requests (section 7.1); the paper does not give
the size of its batches. As text, with lengths in tokens:

    closed:batch=64,input=uniform:512:1024,output=uniform:32:128
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.sched.request import Tier
from jaxserve.sched.slo.classes import SloClassError, values_of
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.workloads.lengths import Uniform
from jaxserve.simulator.workloads.memory import check_memory
from jaxserve.simulator.workloads.workload import (
    MAX_LENGTH,
    Lengths,
    Workload,
    WorkloadError,
    fixed_lengths,
)

MOST = 1 << 16  # requests per batch
_KEYS = ("batch", "input", "output")
_UNIFORM = re.compile(r"uniform:(\d{1,10}):(\d{1,10})")


@dataclass(frozen=True)
class ClosedLoop:
    """Best-effort requests without targets that come in batches, each once the last one has ended.
    All are greedy, and each may write as much as the longest of them.

    Attributes:
        batch: Requests submitted at a time, the first ones at 0 s.
        prompt: Prompt lengths in tokens.
        output: Output lengths in tokens.
    """

    batch: int
    prompt: Uniform
    output: Uniform

    def __str__(self) -> str:
        """The loop as text, which `parse_closed_loop` reads."""
        inputs, outputs = (f"uniform:{one.low}:{one.high}" for one in (self.prompt, self.output))
        return f"closed:batch={self.batch},input={inputs},output={outputs}"

    def requests(self, number: int, time: float, seed: int) -> Workload:
        """Batch `number`, counted from 0, submitted at `time`. Lengths depend on the seed and the
        number, not on the time."""
        rng = np.random.default_rng((seed, 7, number))
        lengths = Lengths(*(one.sample(self.batch, rng) for one in (self.prompt, self.output)))
        return self._of(lengths, time)

    def longest(self) -> Workload:
        """One request with the longest possible prompt and output."""
        return self._of(fixed_lengths(self.prompt.high, self.output.high, 1), 0.0)

    def _of(self, lengths: Lengths, time: float) -> Workload:
        count = len(lengths)
        terms = SloColumns.none(count)
        terms = replace(terms, tier=np.full(count, int(Tier.BEST_EFFORT), np.int8))
        limit = np.full(count, self.output.high)
        return Workload.create(np.full(count, time), lengths, limit=limit, terms=terms)


def parse_closed_loop(text: str) -> ClosedLoop:
    """Parses a closed loop's text. Raises WorkloadError with what is wrong with it."""
    kind, _, rest = text.partition(":")
    if kind != "closed":
        raise WorkloadError(
            "best-effort load is closed:batch=N,input=uniform:LOW:HIGH,output=uniform:LOW:HIGH, "
            f"got {text!r:.60}"
        )
    try:
        values = values_of("closed", rest.split(","), _KEYS)
    except SloClassError as error:
        raise WorkloadError(str(error)) from None
    missing = next((key for key in _KEYS if key not in values), None)
    if missing is not None:
        raise WorkloadError(f"closed: {missing}= is missing")
    batch = _batch(values["batch"])
    prompt, output = (_uniform(key, values[key]) for key in ("input", "output"))
    check_memory("closed", batch, batch * output.high)
    return ClosedLoop(batch, prompt, output)


def _batch(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) <= MOST):
        raise WorkloadError(f"closed: batch must be 1 to {MOST} requests, got {text!r:.40}")
    return int(text)


def _uniform(key: str, text: str) -> Uniform:
    found = _UNIFORM.fullmatch(text)
    low, high = map(int, found.groups()) if found else (0, 0)
    if not 1 <= low <= high <= MAX_LENGTH:
        raise WorkloadError(
            f"closed: {key} must be uniform:LOW:HIGH, in tokens, 1 to {MAX_LENGTH}, got "
            f"{text!r:.40}"
        )
    return Uniform(low, high)
