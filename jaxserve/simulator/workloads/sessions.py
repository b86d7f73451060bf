"""Requests that follow each other in sessions, as open loops: conversations, and the loops of
agents with tools. `closed_sessions.py` has the same ones closed.

A turn's prompt is the whole previous turn, prompt and output, plus new tokens. All arrivals are
drawn beforehand, so a late answer delays nobody's next turn. Lengths, prefixes and arrivals depend
on each other, so these are whole workloads, not samplers of lengths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.simulator.workloads.lengths import DATA_SETS, Distribution, Moments
from jaxserve.simulator.workloads.prefixes import NO_PREFIX, Prefixes
from jaxserve.simulator.workloads.workload import Lengths, WorkloadError, check_count

# Times of n starts, float64 [n] in seconds. Called with the rate and n.
Starts = Callable[[float, int, np.random.Generator], np.ndarray]
CHUNK = 512  # starts drawn at a time, each chunk from its own generator
_SAMPLE = 8  # chunks from which means are estimated
_EARLY = 0.999  # share of the requests whose sessions are young enough to be drawn


@dataclass(frozen=True)
class Sessions:
    """A distribution of sessions.

    Attributes:
        system_prompts: Tokens of each system prompt, the most popular first.
        popularity: Exponent of the Zipf law by which sessions have system prompts.
        opening: Tokens of a session's first message.
        follow_up: New tokens of each later turn, beside the previous answer.
        output: Output lengths.
        turns: Mean number of turns, which is geometric.
        pace: Expected seconds to write a token.
        pause: Mean seconds from an answer's expected end to the next turn; exponential.
        together: Mean number of sessions that start at once, with the same system prompt;
            geometric.
        max_context: Most tokens of prompt and output; a session ends before a turn that exceeds it.
        source: Where the numbers are from, or that they are assumed.

    Raises:
        WorkloadError: A first turn may have more tokens than `max_context`.
    """

    system_prompts: tuple[int, ...]
    popularity: float
    opening: Distribution
    follow_up: Distribution
    output: Distribution
    turns: float
    pace: float
    pause: float
    together: float
    max_context: int
    source: str

    def __post_init__(self) -> None:
        longest = max(self.system_prompts) + self.opening.high + self.output.high
        if longest > self.max_context:
            raise WorkloadError(
                f"a first turn may have {longest} tokens, more than max_context, {self.max_context}"
            )

    def requests_before(self, rate: float) -> int:
        """Requests that are drawn so that sessions are in progress when the first request comes.
        rate: requests/s. Raises WorkloadError if it is not positive."""
        if not 0 < rate < math.inf:
            raise WorkloadError(f"rate must be a positive number, got {rate}")
        return int(rate * self._means[1])

    def sample(
        self, count: int, rate: float, starts: Starts, rng: np.random.Generator
    ) -> tuple[np.ndarray, Lengths, Prefixes]:
        """Draws the first `count` requests after a moment at which sessions are in progress, so
        that their rate is the same from the start. Turns before it count as never seen.

        Args:
            count: Requests.
            rate: Requests/s on average.
            starts: When sessions start, or several together.
            rng: Random numbers.

        Returns:
            Arrivals, float64 [count], in seconds; lengths; and shared prefixes.

        Raises:
            WorkloadError: count is below 1, or the rate is not positive.
        """
        check_count(count)
        (each, before), seed = self._means, int(rng.integers(2**62))
        chunks, needed = list[Turns](), (self.requests_before(rate) + count) / each
        while True:
            number = 1 + int(needed / CHUNK)
            chunks += [self.turns_of(chunk, seed) for chunk in range(len(chunks), number)]
            times = starts(rate / each, number * CHUNK, np.random.default_rng((seed, 0)))
            turns = Turns.joined(chunks)
            arrival = times[turns.start] + turns.offset - before
            # Later starts cannot have any of the first requests.
            known = np.flatnonzero((arrival >= 0) & (arrival <= times[-1] - before))
            if len(known) >= count:
                break
            needed *= 1.5
        which = known[np.argsort(arrival[known], kind="stable")[:count]]
        lengths = Lengths(turns.prompt[which], turns.output[which])
        return arrival[which], lengths, self._prefixes(turns, which)

    @functools.cached_property
    def _means(self) -> tuple[float, float]:
        """Mean requests of a start; and seconds after which hardly any are left. The same for every
        seed."""
        turns = Turns.joined([self.turns_of(chunk, 0) for chunk in range(_SAMPLE)])
        return len(turns.start) / (_SAMPLE * CHUNK), float(np.quantile(turns.offset, _EARLY))

    def turns_of(self, chunk: int, seed: int) -> Turns:
        """All turns of a chunk of starts, session by session."""
        rng = np.random.default_rng((seed, 1, chunk))
        weights = np.arange(1.0, len(self.system_prompts) + 1) ** -self.popularity
        systems = rng.choice(len(weights), CHUNK, p=weights / weights.sum())
        start = np.repeat(np.arange(CHUNK), rng.geometric(1 / self.together, CHUNK))
        many = rng.geometric(1 / self.turns, len(start))
        first = np.cumsum(many) - many  # index of each session's first turn
        turn = np.arange(many.sum()) - np.repeat(first, many)
        start = np.repeat(start, many)
        new = self.follow_up.sample(len(turn), rng)
        new[first] = self.opening.sample(len(first), rng)
        output = self.output.sample(len(turn), rng)
        pause = rng.exponential(self.pause, len(turn))
        system = systems[start]
        before = _sums_before(new + output, first, many)
        prompt = np.array(self.system_prompts)[system] + before + new
        offset = _sums_before(output * self.pace + pause, first, many)
        fits = prompt + output <= self.max_context  # no turn after one that does not fit
        columns = (start + chunk * CHUNK, turn, system, prompt, output, offset)
        return Turns(*(column[fits] for column in columns))

    def _prefixes(self, turns: Turns, which: np.ndarray) -> Prefixes:
        """Shared prefixes of these turns, in this order."""
        number = np.full(len(turns.start), NO_PREFIX)
        number[which] = np.arange(len(which))
        before = np.where(turns.turn[which] > 0, number[which - 1], NO_PREFIX)
        shared = (turns.prompt + turns.output)[which - 1]
        # If the previous turn is not among them: the last request with the same system prompt.
        system = turns.system[which]
        order = np.argsort(system, kind="stable")
        last = np.full(len(which), NO_PREFIX)
        same = system[order[1:]] == system[order[:-1]]
        last[order[1:][same]] = order[:-1][same]
        length = np.where(last >= 0, np.array(self.system_prompts)[system], 0)
        goes_on = before >= 0
        return Prefixes(np.where(goes_on, before, last), np.where(goes_on, shared, length))


@dataclass(frozen=True)
class Turns:
    """n turns, those of a session next to each other in order.

    Attributes:
        start: int64 [n], the start that the session belongs to.
        turn: int64 [n], its number in the session, from 0.
        system: int64 [n], index of the system prompt.
        prompt, output: int64 [n], tokens.
        offset: float64 [n], seconds after the start.
    """

    start: np.ndarray
    turn: np.ndarray
    system: np.ndarray
    prompt: np.ndarray
    output: np.ndarray
    offset: np.ndarray

    @classmethod
    def joined(cls, parts: list[Turns]) -> Turns:
        """The parts one after another."""
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _sums_before(values: np.ndarray, first: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Sums of the values before each turn in its session, [n]."""
    before = np.cumsum(values) - values
    return np.asarray(before - np.repeat(before[first], many))


SESSIONS = {
    # Lengths of messages and answers: BROS Table 2, as `lmsys`. 3.7 turns: 73% of ShareGPT's
    # conversations have several (CachedAttention, Gao et al. 2024), and turns are geometric.
    # The others are assumed. System prompts: from a sentence to a page of rules, one used most.
    # 50 ms a token: what TBT targets allow. 30 s: to read an answer and write the next message.
    # 8,192 tokens: what the llama-3 models have.
    "conversation": Sessions(
        system_prompts=(400, 800, 200, 1600, 100, 1200, 300, 600),
        popularity=1.0,
        opening=DATA_SETS["lmsys"].prompt,
        follow_up=DATA_SETS["lmsys"].prompt,
        output=DATA_SETS["lmsys"].output,
        turns=3.7,
        pace=0.05,
        pause=30.0,
        together=1.0,
        max_context=8192,
        source="BROS Table 2, RT-LMSYS-CHAT-1M; turns: CachedAttention (Gao et al. 2024)",
    ),
    # All assumed. System prompts: instructions and schemas of tens of tools. 20 turns: a task of
    # some searches, edits and tests. Outputs: a thought and a call. Follow-ups: results of tools,
    # mostly short, now and then a file. 2 s: most tools answer at once, some run tests. 3 loops at
    # once: a task is split. 32,768 tokens: a common limit of context.
    "agent": Sessions(
        system_prompts=(6000, 4000, 9000, 3000),
        popularity=1.0,
        opening=Moments(400, 600, 4096),
        follow_up=Moments(600, 1200, 8192),
        output=Moments(150, 150, 1024),
        turns=20.0,
        pace=0.05,
        pause=2.0,
        together=3.0,
        max_context=32768,
        source="assumed",
    ),
}
"""The workloads of sessions, by name."""
