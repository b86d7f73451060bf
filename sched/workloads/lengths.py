"""Where lengths come from when there is no trace: InferMax's mixes, and samplers of the data sets
that the papers use, fitted to the statistics that are printed of them.

Real lengths vary in ways that two moments do not tell: these stand in for data that is not at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.workloads.workload import Lengths, WorkloadError

Sampler = Callable[[int, np.random.Generator], Lengths]

SHORT, LONG = (8, 16), (512, 1024)
GROUPS = {
    # name: (prompt lengths, output lengths)
    "siso": (SHORT, SHORT),
    "silo": (SHORT, LONG),
    "liso": (LONG, SHORT),
    "lilo": (LONG, LONG),
}
MIXES = ("lilo+liso", "lilo+siso", "lilo+silo", "liso+siso", "liso+silo", "siso+silo")


def mix_lengths(name: str, count: int, rng: np.random.Generator) -> Lengths:
    """`count` requests, half of each of two groups, shuffled (InferMax section 4.6): SISO, SILO,
    LISO and LILO have prompts and outputs of {8, 16} (S) or {512, 1024} (L) tokens, either equally
    often. name: two groups joined by +, in any order."""
    parts = name.lower().split("+")
    if len(parts) != 2 or parts[0] == parts[1] or not set(parts) <= set(GROUPS):
        raise WorkloadError(f"a mix is two different groups of {', '.join(GROUPS)}, got {name!r}")
    if count < 1:
        raise WorkloadError(f"num_requests must be at least 1, got {count}")
    which = rng.permutation(np.arange(count) % 2)
    drawn = []
    for side in (0, 1):
        choices = np.array([GROUPS[part][side] for part in parts], np.int64)
        drawn.append(choices[which, rng.integers(0, 2, count)])
    return Lengths(drawn[0], drawn[1])


@dataclass(frozen=True)
class Moments:
    """A log-normal of that mean and standard deviation, cut off at `high`: values above are drawn
    again, so that the mean of what remains is a little lower. Tokens."""

    mean: float
    std: float
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` lengths in tokens, from 1 to `high`, int64 [count]."""
        spread = math.log1p((self.std / self.mean) ** 2)
        center = math.log(self.mean) - spread / 2
        return _redrawn(
            lambda n: np.rint(rng.lognormal(center, math.sqrt(spread), n)), count, self.high
        )


@dataclass(frozen=True)
class Quartered:
    """Half of the values below the median and half above, bent towards one end on both sides so
    that the mean is right; from 1 to `high`. Tokens."""

    median: float
    mean: float
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` lengths in tokens, from 1 to `high`, int64 [count]. WorkloadError where no such
        distribution has that mean."""
        bend = self._bend()
        u = rng.random(count) ** bend
        upper = rng.permutation(count) % 2 == 1  # exactly half: few values lie near the median
        values = np.where(
            upper, self.median + (self.high - self.median) * u, 1 + (self.median - 1) * u
        )
        return np.clip(np.rint(values), 1, self.high).astype(np.int64)

    def _bend(self) -> float:
        """u ** bend has the mean 1 / (1 + bend), on both sides of the median."""
        share = (2 * self.mean - 1 - self.median) / (self.high - 1)
        if not 0 < share < 1:
            raise WorkloadError(f"no distribution has {self}")
        return 1 / share - 1


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` lengths in tokens, each value equally likely, int64 [count]."""
        return rng.integers(self.low, self.high + 1, count, dtype=np.int64)


@dataclass(frozen=True)
class DataSet:
    """prompt and output are drawn independently. source: who printed the statistics. total: limit
    of both together, to which outputs are cut."""

    prompt: Moments | Quartered | Uniform
    output: Moments | Quartered | Uniform
    source: str
    total: int | None = None

    def sample(self, count: int, rng: np.random.Generator) -> Lengths:
        """Prompt and output lengths of `count` requests. WorkloadError where it is less than 1."""
        if count < 1:
            raise WorkloadError(f"num_requests must be at least 1, got {count}")
        prompt, output = self.prompt.sample(count, rng), self.output.sample(count, rng)
        if self.total is not None:
            output = np.minimum(output, self.total - prompt)
        return Lengths(prompt, output)


DATA_SETS = {
    "sharegpt": DataSet(
        Moments(222.76, 256.36, 2048),
        Moments(234.51, 268.50, 2048),
        "BROS Table 2, RT-SharedGPT; at most 2K tokens: AccelGen section 3.1",
    ),
    "lmsys": DataSet(
        Moments(90.50, 148.52, 2048),
        Moments(237.04, 228.21, 2048),
        "BROS Table 2, RT-LMSYS-CHAT-1M",
    ),
    "best-effort": DataSet(
        Uniform(512, 1024), Uniform(32, 128), "BROS section 7.1, BE-Synthetic, uniform"
    ),
    "alpaca": DataSet(
        Moments(19.31, 19.31, 500),
        Moments(58.45, 58.45, 2048),
        "means: vLLM (Kwon et al. 2023) Fig. 11; prompts of at most 500 tokens, outputs of at most "
        "2K: AccelGen section 3.1; deviations equal to the means, as none are printed",
    ),
    "humaneval": DataSet(
        Moments(112.65, 57.40, 512),
        Moments(45.22, 34.78, 512),
        "the 164 prompts and solutions themselves at four characters a token: Apt-Serve shows "
        "their distribution (Fig. 7) but prints no number",
    ),
    "longbench": DataSet(
        Moments(1738.3, 300.0, 2047),
        Moments(90.7, 90.7, 2047),
        "means: DistServe (Zhong et al. 2024) Fig. 7; at most 2,048 tokens in all: Apt-Serve "
        "section 6.1, footnote 5, which shows the distribution (Fig. 7) but prints no number; "
        "deviations assumed",
        total=2048,
    ),
    "wikitext": DataSet(Quartered(871, 914, 1840), Quartered(552, 521, 992), "Apt-Serve Table 7"),
    "arxiv": DataSet(Quartered(6853, 7812, 19600), Quartered(226, 420, 9754), "Apt-Serve Table 7"),
    "bookcorpus": DataSet(
        Quartered(14781, 16944, 23706), Quartered(221, 185, 299), "Apt-Serve Table 7"
    ),
}


def sampler(name: str) -> Sampler:
    """A mix's or a data set's, by name. WorkloadError lists the names."""
    lower = name.lower()
    if "+" in lower:
        return lambda count, rng: mix_lengths(lower, count, rng)
    if lower not in DATA_SETS:
        raise WorkloadError(f"there is no workload {name!r}; known: {', '.join(names())}")
    return DATA_SETS[lower].sample


def names() -> list[str]:
    """Of all samplers."""
    return [*MIXES, *DATA_SETS]


def _redrawn(
    draw: Callable[[int], np.ndarray], count: int, high: int, attempts: int = 1000
) -> np.ndarray:
    values = draw(count)
    for _ in range(attempts):
        over = np.flatnonzero(values > high)
        if not len(over):
            break
        values[over] = draw(len(over))
    return np.clip(values, 1, high).astype(np.int64)
