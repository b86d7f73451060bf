"""The interface of restrictions on the text of a continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Matcher(Protocol):
    """The state of a continuation whose next tokens are restricted."""

    def holds(self, ahead: int) -> bool:
        """Whether one of the next `ahead` tokens may be restricted."""

    def feed(self, token: int) -> bool:
        """Takes the next token. Returns whether the text is complete, so that nothing can
        follow."""

    def mask(self) -> np.ndarray | None:
        """uint32 [`mask_words(V)`], a bit for each token that may follow; None if none may."""

    def masks_along(self, tokens: Sequence[int]) -> list[np.ndarray | None]:
        """The value of `mask` before each of these tokens, if they come, and after the last: one
        more than tokens. None after a token that is not allowed, and for any token after a complete
        text."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of these tokens are allowed, one after the other. No token is allowed after one
        that completes the text."""

    def forced(self, most: int) -> list[int]:
        """At most `most` next tokens, as long as the mask allows exactly one."""

    @property
    def problem(self) -> str:
        """Why no token may follow; empty if the text is complete."""
