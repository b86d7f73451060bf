"""Output lengths learned from ended requests: `sched/state/output_lengths.py`, compiled."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.sched.state.output_lengths import DECAY
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.state import Machine


@kernel
def expected_peak(m: Machine, r: np.record) -> int:
    """Cache tokens that the request is expected to end with: its prompt and the mean length of
    outputs that are longer than its own so far, at most its max_tokens."""
    mean = max(m.expected[m.bins_above[r.generated]], float(r.generated + 1))
    output = min(math.ceil(mean), r.max_tokens)
    return max(r.prompt_len + output - 1, r.computed)


@kernel
def learn(m: Machine, length: int, cut: bool) -> None:
    """`OutputLengths.add`."""
    index = m.bin_of[length]
    for i in range(len(m.reached)):
        m.reached[i] *= DECAY
        m.ended[i] *= DECAY
    m.reached[index] += 1.0
    if not cut:
        m.ended[index] += 1.0
    m.mean[index] += (length - m.mean[index]) / m.reached[index]
    m.me[0].outputs += 1
    _expect(m)


@kernel
def _expect(m: Machine) -> None:
    """The mean length of the outputs that reach each bin, as in `OutputLengths`."""
    at_risk = mean = 0.0
    for i in range(len(m.reached) - 1, -1, -1):
        if m.reached[i] > 0.0:
            share = 1.0
            if at_risk > 0.0:
                share = m.ended[i] / (at_risk + m.reached[i])
            at_risk += m.reached[i]
            mean += share * (m.mean[i] - mean)
        m.expected[i] = mean
