"""The drafts of one continuation: which are proposed, and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.drafts.draft import Draft
from jaxserve.engine.drafts.drafting import Drafting
from jaxserve.sched.speculation.acceptance import RequestRates
from jaxserve.sched.speculation.choice import MOST


class Speculator:
    """Used on the engine's thread.

    Args:
        drafting: proposes drafts.
        rates: how often proposals were right.
        most: output tokens up to which it proposes.

    Attributes:
        draft: the tokens that may follow all known ones; None without a guess. One more than a step
        may have, as the first may be in flight.
        drafted: drafted tokens that were computed.
        accepted: drafted tokens that were right.
    """

    def __init__(self, drafting: Drafting, rates: RequestRates, most: int) -> None:
        self.draft: Draft | None = None
        self.drafted = self.accepted = 0
        self._drafting, self._rates, self._left = drafting, rates, most

    @property
    def acceptance(self) -> float:
        """The probability that the first token of the draft is right."""
        if self.draft is None:
            return 0.0
        if self.draft.certain:
            return 1.0
        return self._rates.estimate(self.draft.source, self.draft.strength)

    @property
    def guesses(self) -> tuple[int, int]:
        """Tokens for which there was a draft, used or not, and how many were as drafted."""
        return self._rates.guessed, self._rates.right

    def checked(self, drafted: int, accepted: int) -> None:
        """Counts the drafted tokens that were computed, and those that were right."""
        self.drafted += drafted
        self.accepted += accepted

    def receive(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens of the output: learns from them, and proposes what follows."""
        draft = self.draft
        for guess, token in zip(() if draft is None else draft.tokens, tokens, strict=False):
            assert draft is not None
            self._rates.note(draft.source, draft.strength, guess == token)
            if guess != token:
                break
        for token in tokens:
            self._drafting.append(token)
        self._left -= len(tokens)
        most = min(MOST + 1, self._left)
        self.draft = self._drafting.propose(most, self._rates.estimate)

    def end(self, tokens: Sequence[int]) -> None:
        """The continuation has ended with this output."""
        self._drafting.end(tokens)
