"""What every drafter can do."""

from __future__ import annotations

from typing import Protocol

from jaxserve.engine.drafts.draft import Draft


class Drafter(Protocol):
    """Guesses how one continuation goes on. Used by one thread at a time.

    Attributes:
        name: under which its drafts are counted.
    """

    name: str

    def append(self, token: int) -> None:
        """The next token of the output is known."""

    def propose(self, most: int) -> Draft | None:
        """At most `most` tokens, at least 1, that follow all known ones; None without a guess."""
