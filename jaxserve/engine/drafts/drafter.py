"""The interface of drafters."""

from __future__ import annotations

from typing import Protocol

from jaxserve.engine.drafts.draft import Draft


class Drafter(Protocol):
    """Guesses how a continuation goes on. Used by one thread at a time.

    Attributes:
        name: name under which its drafts are counted.
    """

    name: str

    def append(self, token: int) -> None:
        """Takes the next token of the output."""

    def propose(self, most: int) -> Draft | None:
        """At most `most` tokens, at least 1, that follow all known tokens; None without a guess."""
