"""Sources of lengths without a trace: InferMax's mixes, and samplers of the papers' data sets,
fitted to their published statistics.

Two moments do not determine how real lengths vary: the samplers stand in for data that is not
available.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.simulator.workloads.workload import Lengths, WorkloadError, check_count

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
    """Half the requests of each of two groups, shuffled (InferMax section 4.6). SISO, SILO, LISO
    and LILO have prompts and outputs of {8, 16} (S) or {512, 1024} (L) tokens, either equally
    often.

    Args:
        name: Two groups joined by +, in any order.
        count: Requests.
        rng: Random numbers.

    Raises:
        WorkloadError: There is no such mix, or count is below 1.
    """
    parts = name.lower().split("+")
    if len(parts) != 2 or parts[0] == parts[1] or not set(parts) <= set(GROUPS):
        raise WorkloadError(f"a mix is two different groups of {', '.join(GROUPS)}, got {name!r}")
    which = rng.permutation(np.arange(check_count(count)) % 2)
    drawn = []
    for side in (0, 1):
        choices = np.array([GROUPS[part][side] for part in parts], np.int64)
        drawn.append(choices[which, rng.integers(0, 2, count)])
    return Lengths(drawn[0], drawn[1])


@dataclass(frozen=True)
class Moments:
    """A log-normal of this mean and standard deviation, truncated at `high`. Larger values are
    drawn again, so the actual mean is a little lower.

    Attributes:
        mean: Tokens, before truncation.
        std: Standard deviation, tokens, before truncation.
        high: Largest length, tokens.
    """

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
    """Lengths from 1 to `high` with this median and mean. Half of the values lie on each side of
    the median, skewed the same way on both so that the mean is right.

    Attributes:
        median: Tokens.
        mean: Tokens.
        high: Largest length, tokens.
    """

    median: float
    mean: float
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` lengths in tokens, from 1 to `high`, int64 [count]. Raises WorkloadError if no
        such distribution has that mean."""
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
class LogUniform:
    """Lengths from low to high tokens, both included, uniform in their logarithm: every doubling is
    equally likely."""

    low: int
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` lengths in tokens, int64 [count]."""
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high), count))
        return np.asarray(np.rint(drawn).astype(np.int64))


@dataclass(frozen=True)
class Ranges:
    """A histogram of lengths.

    Attributes:
        parts: For each range its weight, normalised over all, and the distribution within it.
    """

    parts: tuple[tuple[float, Distribution], ...]

    @property
    def high(self) -> int:
        """The largest length."""
        return max(part.high for _, part in self.parts)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` lengths in tokens, int64 [count]."""
        which = _drawn(tuple(share for share, _ in self.parts), count, rng)
        drawn = np.stack([part.sample(count, rng) for _, part in self.parts])
        return np.asarray(drawn[which, np.arange(count)])


Distribution = Moments | Quartered | Uniform | LogUniform | Ranges


@dataclass(frozen=True)
class DataSet:
    """A sampler that stands in for a data set. Prompts and outputs are drawn independently.

    Attributes:
        prompt: Distribution of prompt lengths.
        output: Distribution of output lengths.
        source: Where the statistics were published.
        total: Limit of prompt and output together, to which outputs are cut; None for none.
    """

    prompt: Distribution
    output: Distribution
    source: str
    total: int | None = None

    def sample(self, count: int, rng: np.random.Generator) -> Lengths:
        """Prompt and output lengths of `count` requests. Raises WorkloadError if count is below
        1."""
        check_count(count)
        prompt, output = self.prompt.sample(count, rng), self.output.sample(count, rng)
        if self.total is not None:
            output = np.minimum(output, self.total - prompt)
        return Lengths(prompt, output)


@dataclass(frozen=True)
class Blend:
    """Requests of several data sets, shuffled.

    Attributes:
        parts: For each data set its weight, normalised over all, and its sampler.
        source: Where the statistics were published.
    """

    parts: tuple[tuple[float, DataSet], ...]
    source: str

    def sample(self, count: int, rng: np.random.Generator) -> Lengths:
        """Prompt and output lengths of `count` requests. Raises WorkloadError if count is below
        1."""
        drawn = [data.sample(count, rng) for _, data in self.parts]
        which = _drawn(tuple(share for share, _ in self.parts), count, rng), np.arange(count)
        prompts, outputs = ([getattr(d, f"{of}_len") for d in drawn] for of in ("prompt", "output"))
        return Lengths(np.stack(prompts)[which], np.stack(outputs)[which])


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
    "azure-conv": DataSet(
        Moments(1154.70, 1108.79, 14050),
        Moments(211.13, 162.87, 1000),
        "moments of the hour of conversations of the Azure public dataset (2023, CC-BY-4.0)",
    ),
    "azure-code": DataSet(
        Moments(2047.85, 1973.77, 7437),
        Moments(27.88, 59.86, 1899),
        "moments of the hour of code completions of the Azure public dataset (2023, CC-BY-4.0)",
    ),
    "wikitext": DataSet(Quartered(871, 914, 1840), Quartered(552, 521, 992), "Apt-Serve Table 7"),
    "arxiv": DataSet(Quartered(6853, 7812, 19600), Quartered(226, 420, 9754), "Apt-Serve Table 7"),
    "bookcorpus": DataSet(
        Quartered(14781, 16944, 23706), Quartered(221, 185, 299), "Apt-Serve Table 7"
    ),
}


SETS = (52, 90)  # thousands of requests in Alpaca and in ShareGPT (AccelGen section 3.1)
LONGEST_OUTPUT = 2048  # most output tokens of AccelGen's requests (section 3.1)


def mixed_prompts(
    books: float = 0.35, longest: int = 100_000, *, printed_outputs: bool = False
) -> Blend:
    """AccelGen's mixed prompts: a share from BookCorpus, the others from Alpaca and ShareGPT in
    proportion to their sizes (section 3.1).

    Prompts are distributed as in Figure 8: 34% in [10, 512], 52% in [512, 4K] and 14% above, over
    all. With 35% from BookCorpus that holds if 40% of these have 4K tokens and more, and a quarter
    of ShareGPT's at most 512, which makes them longer here than in `sharegpt`. Nothing is published
    on the distribution within a range: `LogUniform`.

    Outputs are those of `alpaca`, `sharegpt` and `bookcorpus`, unless `printed_outputs` is set.

    Args:
        books: Share from BookCorpus.
        longest: Tokens of its longest prompts.
        printed_outputs: Whether outputs follow Figure 8 instead: 51% in [10, 512], 36% in [512, 4K]
            and 13% above, Alpaca's being short; cut to the 2,048 tokens that section 3.1 allows.
    """
    parts = mixed_prompt_sets(longest, printed_outputs=printed_outputs)
    rest = (1 - books) / sum(SETS)
    shares = (SETS[0] * rest, SETS[1] * rest, books)
    return Blend(
        tuple(zip(shares, parts.values(), strict=True)),
        "AccelGen sections 3.1 and 3.2, Figure 8; outputs as of the data sets' own",
    )


def mixed_prompt_sets(longest: int, *, printed_outputs: bool = False) -> dict[str, DataSet]:
    """The three data sets of `mixed_prompts`, by name."""
    middle = LogUniform(512, LONGEST_OUTPUT)
    most = LogUniform(LONGEST_OUTPUT, LONGEST_OUTPUT)
    printed = Ranges(((0.36, LogUniform(10, 512)), (0.47, middle), (0.17, most)))
    prompts: dict[str, Distribution] = {
        "alpaca": DATA_SETS["alpaca"].prompt,
        "sharegpt": Ranges(((0.25, LogUniform(10, 512)), (0.75, LogUniform(512, 2048)))),
        "bookcorpus": Ranges(((0.6, LogUniform(512, 4096)), (0.4, LogUniform(4096, longest)))),
    }
    source = "AccelGen sections 3.1 and 3.2, Figure 8"
    return {
        name: DataSet(
            prompt,
            printed if printed_outputs and name != "alpaca" else DATA_SETS[name].output,
            source,
        )
        for name, prompt in prompts.items()
    }


BLENDS = {"mixed-prompts": mixed_prompts()}


def sampler(name: str) -> Sampler:
    """The sampler of a mix or data set, by name. Raises WorkloadError with the known names."""
    lower = name.lower()
    if "+" in lower:
        return lambda count, rng: mix_lengths(lower, count, rng)
    if lower not in names():
        raise WorkloadError(f"there is no workload {name!r}; known: {', '.join(names())}")
    return (BLENDS[lower] if lower in BLENDS else DATA_SETS[lower]).sample


def names() -> list[str]:
    """The names of all samplers."""
    return [*MIXES, *DATA_SETS, *BLENDS]


def _drawn(shares: tuple[float, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    """The part of each of `count` requests, int64 [count]."""
    return rng.choice(len(shares), count, p=np.array(shares) / sum(shares))


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
