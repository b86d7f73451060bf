"""What AccelGen runs on (sections 3.1 and 6.1): models, devices, caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.model_shapes import MODELS
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.cost.saturation import flat_from
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.lengths import LONGEST_OUTPUT

BLOCK = 32  # tokens (section 3.1)
UTILISED = (0.64, 0.83)  # of compute and cache, Sarathi in section 3.2
HOST_BYTES = 144e9  # of host memory for each GPU: a p4d.24xlarge has 1,152 GB for eight


@dataclass(frozen=True)
class Place:
    """A model on the paper's devices.

    Attributes:
        name: Of the system.
        model: Name of the model, whose shape it has.
        devices: Number of GPUs.
        cache: Bytes for K and V, on all GPUs together.
        pivot: Forward size at which throughput saturates in the paper, tokens.
    """

    name: str
    model: str
    devices: int
    cache: float
    pivot: int

    @property
    def system(self) -> System:
        """The simulator's system."""
        return system(self.name)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the cache, in whole blocks."""
        return int(self.cache // self._bytes) // BLOCK * BLOCK

    @property
    def host_tokens(self) -> int:
        """Tokens that fit into host memory."""
        return int(HOST_BYTES * self.devices // self._bytes)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt: as many as the cache holds beside the longest output, at
        most the paper's 100K."""
        return min(100_000, self.kv_tokens - LONGEST_OUTPUT)

    @property
    def _bytes(self) -> int:
        """Bytes of a token's K and V."""
        shape = MODELS[self.model]
        return shape.kv_bytes * shape.layers


# The paper has no pivots for the Llamas: those of the models of their devices.
PLACES = {
    "OPT-13B": Place("opt-13b@a100", "opt-13b", 1, 12e9, 768),
    "Llama-13B": Place("llama-2-13b@a100", "llama-2-13b", 1, 12e9, 768),
    "OPT-175B": Place("opt-175b@8xa100", "opt-175b", 8, 8 * 33.75e9, 1280),
    "Llama-3-70B": Place("llama-3-70b@4xa100", "llama-3-70b", 4, 135e9, 1280),
}


def prefill_seconds(place: Place, prompts: np.ndarray) -> np.ndarray:
    """What each prompt takes alone and in one step, float64 [n]. prompts: int64 [n], tokens."""
    alone = BatchFeatures(prompts, prompts, 0, 0, prompts**2, 1, 0)
    return np.asarray(place.system.cost_model.batch_time(alone), np.float64)


def budget_of(place: Place, seconds: float) -> int:
    """The longest prompt, in tokens, that a step of at most `seconds` computes; at least 1."""
    sizes = np.arange(1, 1 << 14)
    return max(int(np.searchsorted(prefill_seconds(place, sizes), seconds, side="right")), 1)


def implied_output(place: Place, prompt: float) -> float:
    """The mean output, tokens, with which steps have the share of the pivot, beside the share of
    the cache, that the paper measures of Sarathi: with r requests in the cache a step has r decodes
    and, as long as as many come as go, r prompt / output tokens of prompts."""
    compute, cache = UTILISED[0] * place.pivot, UTILISED[1] * place.kv_tokens
    output = 1.0
    for _ in range(50):
        rows = cache / (prompt + output / 2)
        output = prompt * rows / (compute - rows)
    return output


def saturation(place: Place, most: int = 2048) -> int:
    """The fewest tokens of a step with nearly the best throughput of any step of up to `most`."""
    sizes = np.arange(1, most + 1)
    return int(sizes[flat_from(sizes, prefill_seconds(place, sizes))])
