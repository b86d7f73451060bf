"""Drafts of the tokens that followed an earlier occurrence of the text's end."""

from __future__ import annotations

from jaxserve.engine.drafts.draft import Draft, strength_of
from jaxserve.engine.drafts.token_index import TokenIndex

PROMPT_LOOKUP, EARLIER_OUTPUTS = "prompt_lookup", "earlier_outputs"
LEAST = 2  # tokens of a match


class Lookup:
    """A drafter that looks up the end of the known text. It continues at its last match as long as
    that holds, so a long match is not lost if its last two tokens are frequent.

    Args:
        name: name of the drafter.
        index: the searched tokens, which may grow at any time.
        known: prompt and output so far; each token is added to it before it comes to `append`.
    """

    def __init__(self, name: str, index: TokenIndex, known: TokenIndex) -> None:
        self.name = name
        self._index, self._known = index, known
        self._found = 0

    def append(self, token: int) -> None:
        """See `Drafter`."""
        self._found += 1

    def propose(self, most: int) -> Draft | None:
        """See `Drafter`."""
        self._found, length = self._index.longest(self._known, self._found)
        if length < LEAST:
            return None
        tokens = self._index.following(self._found, most)
        return Draft(tuple(tokens), self.name, strength_of(length)) if tokens else None
