"""What AccelGen runs on (sections 3.1 and 6.1): models, devices, caches."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.sched.cost.model_shapes import MODELS
from jaxserve.sched.cost.profiles import System
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.lengths import LONGEST_OUTPUT

BLOCK = 32  # tokens (section 3.1)
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
