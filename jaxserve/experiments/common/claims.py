"""What the pages of experiments have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.experiments.common.grid import Case, Numbers, Results

EF = "+ef"
Get = Callable[[Numbers], float]


@dataclass(frozen=True)
class Scale:
    """How much is run. prompts: I; between: more of them where M decides how many requests fit.
    few, many: B of the two contention levels."""

    prompts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    outputs: tuple[int, ...] = (1, 32, 1024)
    few: int = 32
    many: int = 1024
    kv_tokens: int = 100_000
    memories: tuple[int, ...] = (100, 1_000, 10_000, 100_000, 1_000_000)
    mixed: tuple[int, ...] = (16, 64, 256, 1024)
    optimum: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    optimum_requests: int = 4
    between: tuple[int, ...] = (3, 24, 48, 96, 140, 220, 305, 470, 700)


QUICK = Scale((1, 64), (1, 8), 4, 48, 20_000, (100, 1_000), (8, 16), (2, 64), 2, (24,))


@dataclass(frozen=True)
class Row:
    """What the paper says, what came out here, and why the two differ, if they do."""

    claim: str
    ours: str
    why: str = ""


@dataclass(frozen=True)
class Section:
    """figures: file name and caption. notes: paragraphs beneath the table."""

    title: str
    setting: str
    rows: list[Row]
    figures: list[tuple[str, str]]
    notes: list[str]

    def lines(self) -> list[str]:
        """Of the page."""
        lines = [f"## {self.title}", "", self.setting, ""]
        if self.rows:
            lines += ["| the paper | here | why they differ |", "|---|---|---|"]
            lines += [f"| {row.claim} | {row.ours} | {row.why} |" for row in self.rows]
            lines += [""]
        for note in self.notes:
            lines += [note, ""]
        for name, caption in self.figures:
            lines += [f"![{caption}.](figures/{name})", ""]
        return lines


class Comparison(ABC):
    """One section of `infermax`'s page: what it simulates, and what it makes of it."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @abstractmethod
    def cases(self) -> Iterator[Case]:
        """The simulations whose numbers `section` reads. Equal ones are run once."""

    @abstractmethod
    def section(self, results: Results, figures: Path) -> Section:
        """Of the page; its charts are written into the folder `figures`. KeyError if `results`
        lacks one of `cases`."""

    def fixed(self, policy: str, i: int, o: int, requests: int = 0, kv_tokens: int = 0) -> Case:
        """Requests that arrive together, each of i tokens in and o out. 0 requests: the scale's
        `many`; 0 kv_tokens: the scale's M."""
        count = requests or self.scale.many
        return Case(policy, f"fixed:{i}x{o}x{count}", kv_tokens or self.scale.kv_tokens)


@dataclass(frozen=True)
class Extreme:
    """The largest of some values, and where it was."""

    value: float
    where: str

    @classmethod
    def of(cls, values: dict[str, float]) -> Extreme:
        """From values by where they were found; the first of equals. ValueError if there are
        none."""
        where = max(values, key=lambda key: values[key])
        return cls(values[where], where)

    def times(self) -> str:
        """A value that is a factor: `1.91x (I = 24)`; three digits, or whole from 1,000 on."""
        value = f"{self.value:.3g}" if self.value < 1000 else f"{self.value:,.0f}"
        return f"{value}x ({self.where})"

    def percent(self) -> str:
        """A value that is a factor, as what it adds: `+13.5% (I = 128)`."""
        return f"{self.value - 1:+.1%} ({self.where})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the page."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def percent(share: float) -> str:
    """Of a share, one digit behind the point, without the sign."""
    return f"{100 * share:.1f}"


def latency_of(n: Numbers) -> float:
    """Seconds: the sum of the batch times (InferMax section 4.1)."""
    return n.latency


def tps_of(n: Numbers) -> float:
    """Tokens generated over the latency, in tokens/s."""
    return n.tps


def ttft_of(n: Numbers) -> float:
    """Seconds to the first token, mean over requests."""
    return n.ttft


def tpot_of(n: Numbers) -> float:
    """Seconds, mean over the requests' own means; 0 where nobody has a second token."""
    return n.tpot


def tpot_p99_of(n: Numbers) -> float:
    """Seconds, 99th percentile of the requests' own means; 0 where nobody has a second token."""
    return n.tpot_p99


def preemptions_of(n: Numbers) -> float:
    """Of the whole run: a request counts as often as it loses its cache."""
    return n.preemptions


def listed(values: tuple[int | str, ...]) -> str:
    """As in a sentence: `1, 32 and 1024`. ValueError if there are none."""
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


TPOT = (
    "O is the same for all, so that a mean over requests and one over tokens are equal. The "
    "paper's ratio lies between ours of the means and ours of the 99th percentiles."
)
