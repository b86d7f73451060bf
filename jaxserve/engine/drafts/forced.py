"""Drafts of tokens for which a grammar leaves no choice."""

from __future__ import annotations

from jaxserve.engine.drafts.draft import Draft
from jaxserve.engine.text.matcher import Matcher

GRAMMAR = "grammar"


class Forced:
    """A drafter for a continuation under a grammar. Its drafts are certain.

    Args:
        matcher: the state after all known tokens, advanced by its owner.
    """

    name = GRAMMAR

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def append(self, token: int) -> None:
        """See `Drafter`."""

    def propose(self, most: int) -> Draft | None:
        """See `Drafter`."""
        tokens = self._matcher.forced(most)
        return Draft(tuple(tokens), self.name, certain=True) if tokens else None
