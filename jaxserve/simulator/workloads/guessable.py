"""How well the texts of requests can be guessed, as columns: how much a drafter finds to copy, and
how often that is right.

A text is in one of two states. While its drafter has found a continuation to copy, the next token
equals its guess with some probability; the first wrong guess ends this, and until the drafter finds
another continuation it has nothing to offer. So right guesses come in runs, like copied text, and
some tokens have no guess at all, as with prompt lookup.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from jaxserve.sched.parallel_arrays import ParallelArrays


@dataclass(frozen=True)
class Guessable(ParallelArrays):
    """How well the texts of n requests can be guessed. `Workload` checks the columns.

    Attributes:
        guess_share: float64 [n], share of the tokens for which a drafter has a guess.
        guess_right: float64 [n], probability that such a guess is right if all before it are.
    """

    guess_share: np.ndarray
    guess_right: np.ndarray

    @classmethod
    def same(cls, count: int, chances: Chances | None = None) -> Guessable:
        """`count` requests of one kind; None for texts without guesses."""
        share, right = (0.0, 0.0) if chances is None else (chances.share, chances.right)
        return cls(np.full(count, share), np.full(count, right))


@dataclass(frozen=True)
class Chances:
    """Chances of one kind of text, see `Guessable`.

    Raises:
        ValueError: A value is not from 0 to 1.
    """

    share: float
    right: float

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and 0 <= self.right <= 1):
            raise ValueError(f"shares must be from 0 to 1, got {self.share:g} and {self.right:g}")

    @classmethod
    def parse(cls, text: str) -> Chances:
        """From `SHARE:RIGHT`. ValueError for anything else."""
        if not re.fullmatch(r"[0-9.]{1,20}:[0-9.]{1,20}", text):
            raise ValueError(f"must be SHARE:RIGHT, two numbers from 0 to 1, got {text!r:.40}")
        return cls(*map(float, text.split(":")))


def draw(
    share: float, right: float, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a text of `count` tokens. It does not depend on when drafts are made.

    Args:
        share, right: See `Guessable`.
        count: Tokens.
        rng: Random numbers.

    Returns:
        Which tokens a drafter has a guess for, if it knows all before, bool [count]; and the number
        of tokens in a row, from each on, that equal their guesses, int64 [count].
    """
    holds, finds = rng.random((2, count))
    holds = holds < right
    # So that the share is the same from the first token to the last.
    again = share * (1 - right) / (1 - share * right) if share * right < 1 else 1.0
    finds = finds < again
    finds = np.concatenate([[rng.random() < share], finds[:-1]])[:count]
    # A token has a guess if one was found at or after the last token with a wrong guess.
    place = np.arange(count)
    ended = np.concatenate([[0], np.where(holds, 0, place + 1)[:-1]])[:count]
    found = np.maximum.accumulate(np.where(finds, place, -1))
    offered = found >= np.maximum.accumulate(ended)
    wrong = np.where(offered & holds, count, place)
    until = np.minimum.accumulate(wrong[::-1])[::-1]
    return offered, until - place


# Tokens per step if all guesses are checked: 1 / (1 - share * right).
KINDS = {
    # Spec-Bench's leaderboard: prompt lookup makes its conversations 1.44 times as fast for
    # Vicuna-33B, 1.57 for 7B, one stream: at least this many tokens per step. 0.62: suffix
    # decoding's first token on MT-Bench (vLLM, pull request 24852).
    "conversation": Chances(0.5, 0.62),
    # Assumed, like conversations: a completion repeats names and signatures of its prompt.
    "humaneval": Chances(0.5, 0.62),
    # Assumed, between conversations and code edits, for which n-grams guess 0.85 of the tokens,
    # with 0.81 of the first tokens of drafts right (vLLM, pull request 24344): a thought, and a
    # call that repeats paths and text.
    "agent": Chances(0.55, 0.8),
    # The same texts. Research: assumed, as little as conversations; it quotes what tools found.
    "closed-conversation": Chances(0.5, 0.62),
    "closed-agent": Chances(0.55, 0.8),
    "closed-research": Chances(0.5, 0.62),
}
"""By the names of workloads; nothing is known of how well others can be guessed."""
