"""What may follow in the text of one continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """The state of one continuation, of which something says which tokens may follow."""

    def holds(self, ahead: int) -> bool:
        """Whether one of the next so many tokens may not be any that the model likes."""

    def feed(self, token: int) -> bool:
        """Takes the next token. Returns whether the text is complete, so that nothing can
        follow."""

    def mask(self) -> np.ndarray | None:
        """uint32 [`mask_words(V)`], a bit for each token that may follow; None if none may."""

    def masks_along(self, tokens: Sequence[int]) -> list[np.ndarray | None]:
        """What `mask` is before each of these tokens, if they come, and after the last: one more
        than tokens. None after a token that may not follow, and where one follows a complete
        text."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other. None follows one that completes
        the text."""

    def forced(self, most: int) -> list[int]:
        """At most `most` next tokens, as long as the mask has no other one."""

    @property
    def problem(self) -> str:
        """Why no token may follow; empty if the text is complete."""
