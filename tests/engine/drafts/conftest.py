from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.drafts.draft import Draft
from jaxserve.engine.drafts.drafting import Drafting
from jaxserve.sched.speculation import choice
from jaxserve.sched.speculation.choice import MOST

Known = dict[tuple[int, ...], list[int]]  # what prompts are continued with


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are taken as far as they fit, whether they pay or not, and always waited for; how many
    varies."""
    rng = np.random.default_rng(5)

    def choose(
        batch: Any,
        rows: np.ndarray,
        most: np.ndarray,
        view: Any,
        now: float,
        prices: Any,
        *,
        flying: Any = 0,
        trial: bool = False,
    ) -> np.ndarray:
        tokens = int(batch.features.num_tokens)
        room = min(view.padding.rows[-1] - batch.num_rows, view.limits.max_batch_tokens - tokens)
        wanted = np.minimum(rng.integers(0, MOST + 1, len(rows)), most)
        return np.diff(np.minimum(np.cumsum(wanted), max(room, 0)), prepend=0)

    monkeypatch.setattr(choice, "_choose", choose)
    monkeypatch.setattr(choice.Patience, "waits", lambda self: True)


@pytest.fixture
def proposing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Known], None]:
    """Has every continuation propose what its prompt is known to be continued with, now and then
    with a wrong token in it."""
    rng = random.Random(3)

    def install(texts: Known) -> None:
        def init(self: Any, prompt: Sequence[int], *rest: Any) -> None:
            self.text, self.known = texts[tuple(prompt)], 0

        def append(self: Any, token: int) -> None:
            self.known += 1

        def propose(self: Any, most: int, estimate: Any) -> Draft | None:
            tokens = list(self.text[self.known : self.known + most])
            if tokens and rng.random() < 0.5:
                tokens[rng.randrange(len(tokens))] = rng.randrange(3, 96)
            return Draft(tuple(tokens), "known") if tokens else None

        for name, method in {"__init__": init, "append": append, "propose": propose}.items():
            monkeypatch.setattr(Drafting, name, method)
        monkeypatch.setattr(Drafting, "end", lambda self, tokens: None)

    return install
